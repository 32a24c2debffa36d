"""A run explains its spikes by itself, and skips a step if its data is the cause."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from holdfast import AttemptView, Commit, Observer
from holdfast.attempt import Line, explaining, live
from holdfast.attempt.explaining import EXPLAINING_MODULE, MOST_LISTS, RUN_ITSELF, Explaining, SpikeAnswer, _may_skip
from holdfast.config import ChunkLength, Compute, Log, ProofSettings, Resume, RunConfig
from holdfast.config.steps import Steps
from holdfast.errors import ConfigError, OutOfMemory
from holdfast.journal import Journal
from holdfast.journal.pins import list_unexplained, pin_before, unpin_before
from holdfast.journal.skips import list_skips, write_skips
from holdfast.journal.spikes import Spike
from holdfast.keeping.verification import verify_run
from holdfast.store import open_store
from tests.support.makers import make_key, train
from tests.support.processes import command_of
from tests.support.spiking import POISONED, POISONED_STEP, SAMPLES, SEED, SPIKE_STEP
from tests.support.waiting import await_equal


def make_config(folder: Path, cause: str = "data", run: str = "r", flips: str = "", **fields: Any) -> RunConfig:
    known: dict[str, Any] = {
        "chunk": ChunkLength(steps=10), "compute": Compute(device="cpu"), "log": Log(folder=str(folder / "logs")),
        "seed": SEED, "proof": ProofSettings(rehearse="off"), "on_spike": "skip",
        "settings": {"cause": cause, "samples": 5 * SAMPLES, "flips": flips},
    }  # fmt: skip
    return RunConfig(recipe="tests.support.spiking:spike", run=run, store=str(folder / "runs"), **known | fields)


def open_run(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


def find_end(config: RunConfig) -> tuple[int, str, str]:
    newest = open_run(config).newest()
    assert newest is not None
    return newest.step, newest.checkpoint_sha256, newest.config_fingerprint


def train_reference(folder: Path) -> tuple[int, str, str]:
    """Train the poisoned run with the list from its beginning, and return its end."""
    config = make_config(folder, run="reference", on_spike="ask", skip=str(POISONED_STEP))
    assert live(config).complete
    return find_end(config)


def test_a_run_that_cannot_sign_a_list_is_refused(tmp_path: Path) -> None:
    trusted = Resume(trusted_keys=("key.pub",))
    with pytest.raises(ConfigError, match='on_spike = "skip" can\'t sign a skip list') as caught:
        live(make_config(tmp_path, resume=trusted))
    assert caught.value.hint == 'set signing_key, or on_spike = "ask"'
    assert not (tmp_path / "runs").exists()
    Explaining(make_config(tmp_path, resume=trusted, on_spike="ask"))


def test_a_run_skips_no_step_twice_and_no_more_often_than_the_bound(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    def write(number: int, step: int, *, is_off: bool = False, reason: str = RUN_ITSELF) -> None:
        write_skips(line.journal, number, Steps.parse("1"), Steps.parse(str(step)), 1, is_off=is_off, reason=reason)

    for number in range(1, MOST_LISTS):
        write(number, 10 + number)
    write(MOST_LISTS, 12, is_off=True, reason="a person: the sample is good")
    assert not _may_skip(line.journal, 12)
    assert not _may_skip(line.journal, 13)
    assert _may_skip(line.journal, 90)
    assert not caplog.messages
    write(MOST_LISTS + 1, 80)
    assert not _may_skip(line.journal, 90)
    assert caplog.messages == [
        f"step 90 is not skipped: the run has skipped steps by itself {MOST_LISTS} times, the most that it may"
    ]


def test_pins_name_the_commit_and_a_persons_pin_stays(line: Line) -> None:
    newest = line.journal.newest()
    assert newest is not None
    pin_before(line.journal, newest)
    assert (line.journal.numbers("pins"), list_unexplained(line.journal)) == ([1], [2])
    line.journal.pin(1)  # a person's
    assert list_unexplained(line.journal) == []
    pin_before(line.journal, newest)
    unpin_before(line.journal, 2)
    assert line.journal.numbers("pins") == [1]
    line.journal.unpin(1)
    pin_before(line.journal, newest)
    unpin_before(line.journal, 2)
    assert line.journal.numbers("pins") == []


def test_a_commit_with_a_spike_pins_first(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL right after the commit's record would otherwise lose the spike: no attempt would explain it."""

    def is_pinned(*arguments: Any) -> None:
        assert list_unexplained(line.journal) == [3]
        raise KeyboardInterrupt

    line.pins_spikes = True
    monkeypatch.setattr(line, "_find_spikes", lambda saved: [Spike(step=1, name="loss", value=9.0, usual=1.0)])
    monkeypatch.setattr(line.journal, "publish_commit", is_pinned)
    with pytest.raises(KeyboardInterrupt):
        train(line)
    assert line.journal.numbers("pins") == [1, 2]


def find_explaining() -> list[psutil.Process]:
    """Return the process that explains a step, after its ranks; nothing before it has ranks."""
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if EXPLAINING_MODULE in command_of(each) and (ranks := each.children(recursive=True)):
                return [*ranks, each]
    return []


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Wait(Observer):
    """Lets an attempt wait at its fourth commit until the run has a skip list."""

    def __init__(self) -> None:
        self.ends: list[int] = []  # the step at which the run had the list

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        if commit.number == 4:
            await_equal(lambda: len(attempt.journal.numbers("skips")), 1)
            self.ends.append(attempt.step)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
class TestWithRanks:
    def test_bad_data_is_skipped_by_the_run_itself(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        make_key(tmp_path / "key")
        signed: dict[str, Any] = {
            "signing_key": str(tmp_path / "key"),
            "resume": Resume(trusted_keys=(f"{tmp_path}/key.pub",)),
        }
        config = make_config(tmp_path, **signed)
        assert live(config).complete
        journal = open_run(config)
        (record,) = list_skips(journal)
        assert record.skip == str(POISONED_STEP)
        assert record.reason.startswith(f"{RUN_ITSELF}sample {POISONED} (content ")
        assert len(journal.numbers("attempts")) == 1
        assert journal.numbers("pins") == []
        assert verify_run(journal, everything=True).problems == []
        assert sum(f"step {POISONED_STEP} is skipped: sample {POISONED}" in each for each in caplog.messages) == 1
        assert find_end(config) == train_reference(tmp_path)

    def test_an_update_that_was_too_large_is_not_skipped(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = make_config(tmp_path, "dynamics")
        assert live(config).complete
        assert f"step {SPIKE_STEP} is not skipped: the cause is dynamics: " in caplog.text
        assert f"to see more: holdfast explain {open_run(config).store.url} {SPIKE_STEP}" in caplog.text
        assert list_skips(open_run(config)) == []
        assert open_run(config).numbers("pins") == []

    def test_a_machine_that_computed_wrongly_is_not_skipped(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        flips = tmp_path / "flips"
        flips.touch()
        ask = Explaining._ask

        def mend(*arguments: Any) -> Any:
            flips.unlink()
            return ask(*arguments)

        monkeypatch.setattr(Explaining, "_ask", mend)
        config = make_config(tmp_path, "", flips=str(flips))
        assert live(config).complete
        assert f"step {SPIKE_STEP} is not skipped: trained again, it gives other bits" in caplog.text
        assert f"on another machine: holdfast audit {open_run(config).store.url} --commit 3" in caplog.text
        assert list_skips(open_run(config)) == []

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("find_free_memory", lambda: 0, "this machine has no memory for a second set of ranks"),
            ("EXPLAINING_MODULE", "holdfast.no_module", "the process that explains it ended with exit code 1, and "),
            ("MOST_LISTS", 0, "the run has skipped steps by itself 0 times, the most that it may"),
        ],
    )
    def test_a_person_is_asked_instead(
        self, name: str, value: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(explaining, name, value)
        config = make_config(tmp_path)
        assert live(config).complete
        assert f"step {POISONED_STEP} is not skipped: {said}" in caplog.text
        assert list_skips(open_run(config)) == []
        assert open_run(config).numbers("pins") == []

    def test_a_live_attempt_goes_back_at_its_next_commit_each_time(self, tmp_path: Path) -> None:
        """Each of the two epochs trains the poisoned sample once."""
        config, wait = make_config(tmp_path, epochs=2), Wait()
        assert live(config, [wait]).complete
        assert wait.ends == [40]
        records = list_skips(open_run(config))
        assert [record.reason.startswith(RUN_ITSELF) for record in records] == [True, True]
        assert records[0].skip == str(POISONED_STEP)
        assert not any(commit.spikes for commit in open_run(config).candidates())
        assert len(open_run(config).numbers("attempts")) == 1
        reference = make_config(tmp_path, run="reference", on_spike="ask", skip=records[1].skip, epochs=2)
        assert live(reference).complete
        assert find_end(config) == find_end(reference)

    def test_an_explanation_ends_if_the_ranks_have_no_memory(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, on_spike="ask")
        assert live(config).complete
        observer, answers = Explaining(config), list[SpikeAnswer]()
        ask = threading.Thread(target=lambda: answers.append(observer._ask(open_run(config).store.url, POISONED_STEP)))
        ask.start()
        await_equal(lambda: bool(find_explaining()), True)
        observer.failed(cast(AttemptView, None), OutOfMemory("no memory"))
        ask.join()
        assert answers == [SpikeAnswer(cause="", text="the run's ranks ran out of memory during the explanation")]

    def test_a_run_that_is_killed_meanwhile_ends_on_the_same_bytes(self, tmp_path: Path) -> None:
        config = make_config(tmp_path)
        (tmp_path / "config.json").write_text(config.model_dump_json())
        code = (
            "import sys; from holdfast import live; from holdfast.config import RunConfig; from pathlib import Path; "
        )
        code += "live(RunConfig.model_validate_json(Path(sys.argv[1]).read_text()))"
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "config.json")]) as attempt:
            await_equal(lambda: bool(find_explaining()), True)
            processes = find_explaining()
            os.kill(attempt.pid, signal.SIGKILL)
        await_equal(lambda: any(map(is_alive, processes)), False)
        assert (tmp_path / "logs/r/explaining.log").read_text() == "", "it was told to end, and had no answer to give"
        journal = open_run(config)
        assert list_skips(journal) == []
        assert list_unexplained(journal) == [3]
        assert live(config).complete
        assert [record.skip for record in list_skips(journal)] == [str(POISONED_STEP)]
        assert journal.numbers("pins") == []
        assert find_end(config) == train_reference(tmp_path)

    @pytest.mark.parametrize("told", ["a signal", "a notice"])
    def test_a_run_that_is_told_to_end_while_it_waits_is_not_complete(
        self, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next attempt explains the jump, as after a kill."""
        drain = tmp_path / "drain"
        config = make_config(tmp_path, resume=Resume(drain_file=str(drain)))
        await_answers = Explaining.await_answers

        def tell(observer: Explaining, is_told: Callable[[], bool]) -> bool:
            assert observer._open
            if told == "a signal":
                raise KeyboardInterrupt
            drain.touch()
            await_equal(is_told, True)
            return await_answers(observer, is_told)

        with monkeypatch.context() as patched:
            patched.setattr(Explaining, "_ask", lambda observer, *_: observer._ends.wait())
            patched.setattr(Explaining, "await_answers", tell)
            if told == "a signal":
                with pytest.raises(KeyboardInterrupt):
                    live(config)
            else:
                assert not live(config).complete
        drain.unlink(missing_ok=True)
        journal = open_run(config)
        ending = journal.read_ending(1)
        assert ending is not None
        assert ending.reason == "preempted"
        assert list_unexplained(journal) == [3]
        assert live(config).complete
        assert [record.skip for record in list_skips(journal)] == [str(POISONED_STEP)]
        assert find_end(config) == train_reference(tmp_path)

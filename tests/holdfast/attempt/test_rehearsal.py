"""Rehearsals: new ranks have to train the steps after a checkpoint as the ranks that went on, or the run stops."""

import itertools
import logging
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.attempt import Acts, Attempt, AttemptView, CheckpointVerdict, Observer, live, ranks, rehearsal
from holdfast.config import RunConfig
from holdfast.errors import GateTripped, Inexact, RankDied
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.machine.preemption import Notice
from holdfast.rank import launching
from holdfast.store import open_store
from tests.conftest import IS_SOAK
from tests.support.processes import kill_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

# Every chunk but the first has a rehearsal, in new ranks beside those that went on, or after these have ended.
BESIDE = {"rehearse": "on", "share": 1.0}
ALONE = BESIDE | {"beside": False}
WAYS = pytest.mark.parametrize("way", [BESIDE, ALONE], ids=["beside", "alone"])


class Judged(Observer):
    """Notes each verdict on a checkpoint: judge, result and commit."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[str, str, int]] = []

    def judged(self, attempt: AttemptView, verdict: CheckpointVerdict) -> None:
        assert verdict.took_s > 0
        self.verdicts.append((verdict.judge, verdict.result, verdict.commit))


def in_turn(*cases: tuple[object, ...]) -> list[Any]:
    """Return each case with one of the ways, in turn; in make soak with both."""
    ways = {"beside": BESIDE, "alone": ALONE}
    pairs = itertools.product(cases, ways) if IS_SOAK else zip(cases, itertools.cycle(ways), strict=False)
    return [pytest.param(*case, ways[way], id="-".join(map(str, (*case, way)))) for case, way in pairs]


# No chunk is tried twice.
ONCE = Acts(train_chunk=Attempt.train_chunk)


def make_config(folder: Path, recipe: str, proof: dict[str, object], **more: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": f"tests.support.forgetting:{recipe}", "run": "run", "store": str(folder / "runs"), "epochs": 4,
            "chunk": {"steps": 8}, "log": {"folder": str(folder / "logs")}, "proof": proof, **more,
        }
    )  # fmt: skip


def commits_of(config: RunConfig) -> list[Commit]:
    journal = Journal(open_store(config.store), config.run)
    return [journal.read_commit(number) for number in journal.numbers("commits")]


def content_ids(config: RunConfig) -> list[str]:
    return [commit.checkpoint_sha256 for commit in commits_of(config)]


@WAYS
def test_a_run_that_continues_exactly_is_rehearsed_and_ends_on_the_same_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: dict[str, object]
) -> None:
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"})
    live(plain)
    rehearsed = make_config(tmp_path / "rehearsed", "exact", way)
    judged = Judged()
    with caplog.at_level(logging.INFO, "holdfast"):
        live(rehearsed, [judged])
    by_commit, covered = {
        # inside chunk 2, from a checkpoint that no commit names, and then from inside chunk 3 into chunk 4
        True: ([[], [9], [9], [9, 19]], [("inside", 9, False), ("across", 19, True)]),
        # no start inside an epoch whose end isn't rehearsed: the run continues in ranks that may lack a sum over it
        False: ([[], [], [11], [11, 24]], [("across", 11, True), ("commit", 24, False)]),
    }[way is BESIDE]
    assert [each for each in judged.verdicts if each[0] == "rehearsal"] == [
        ("rehearsal", "passed", number) for number in ((1, 3) if way is BESIDE else (2, 3))
    ]
    assert {result for _, result, _ in judged.verdicts} == {"passed"}
    assert content_ids(rehearsed) == content_ids(plain)
    assert [commit.rehearsed for commit in commits_of(rehearsed)] == by_commit
    assert [(each.kind, each.start, each.has_end) for each in commits_of(rehearsed)[-1].rehearsals] == covered
    starts = ", ".join(str(start) for _, start, _ in covered)
    assert (
        commits_of(rehearsed)[-1].verdict == f"continues exactly: rehearsed from steps {starts}; across an epoch's end"
    )
    assert not (Path(rehearsed.store) / "run" / "rehearsing").exists()
    shown = {commit.verdict for commit in commits_of(plain)}
    assert shown == {'not rehearsed: proof.rehearse = "off"'}
    lines = [each.message for each in caplog.records if each.message.startswith("rehearsed")]
    assert lines[0].startswith(f"rehearsed: new ranks trained steps {covered[0][1] + 1}-")
    assert f" from step {covered[0][1]}" in lines[0]
    assert lines[0].endswith(" exactly as the running ranks did")
    assert len(lines) == 2
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert verify_run(Journal(open_store(rehearsed.store), "run")).problems == []


@WAYS
def test_a_trail_has_no_more_of_a_rehearsed_step_than_of_another(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "exact", way)
    live(config)
    journal = Journal(open_store(config.store), "run")
    trails = [journal.store.read(f"metrics/{number:08d}.jsonl") for number in (2, 3, 4)]
    assert all(name not in trail for trail in trails for name in (b"tensors", b"parts", b"form"))
    assert [trail.count(b"\n") for trail in trails] == [8, 8, 8]
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"})
    live(plain)
    store = Journal(open_store(plain.store), "run").store
    assert trails == [store.read(f"metrics/{number:08d}.jsonl") for number in (2, 3, 4)]


def test_state_that_no_checkpoint_has_stops_the_run_as_soon_as_it_acts(tmp_path: Path) -> None:
    config, judged = make_config(tmp_path, "counting", BESIDE), Judged()
    with pytest.raises(Inexact) as caught:
        live(config, [judged])
    assert judged.verdicts[-1] == ("rehearsal", "refused", 1)
    assert caught.value.exit_code == 2
    assert "this run would not continue exactly: first in step 13: model" in caught.value.message
    assert [commit.step for commit in commits_of(config)] == [8]
    ending = Journal(open_store(config.store), "run").read_ending(1)
    assert ending is not None
    assert ending.ending.reason == "inexact"


def test_the_index_of_a_loop_is_named_although_each_commit_lies_at_an_epochs_end(tmp_path: Path) -> None:
    with pytest.raises(Inexact) as caught:
        live(make_config(tmp_path / "inside", "indexed", BESIDE))
    assert "first in step 10: lrs, optimizer, model" in caught.value.message
    found = r"forgetting.py:\d+: the index index begins at 0 again .*write enumerate\(run.batches\(\), run.batch_number"
    assert re.search(found, caught.value.message)
    live(make_config(tmp_path / "numbered", "numbered", BESIDE, chunk={"steps": 5}))


def test_a_generator_that_is_made_in_the_first_step_gets_advice_that_works(tmp_path: Path) -> None:
    with pytest.raises(Inexact) as caught:
        live(make_config(tmp_path / "late", "collating", BESIDE))
    assert "run.keep(generator=collate.generator)  # create the generator first" in caught.value.message
    live(make_config(tmp_path / "early", "collating", BESIDE, settings={"is_early": True}))


@WAYS
def test_a_run_that_has_failed_a_rehearsal_is_not_continued_by_the_next_attempt(
    tmp_path: Path, way: dict[str, object]
) -> None:
    config = make_config(tmp_path, "counting", way, settings={"acts_after": 6})
    for _ in range(2):
        with pytest.raises(Inexact):
            live(config)
    # A rehearsal across an epoch's end is compared after the living ranks have committed it.
    assert [commit.step for commit in commits_of(config)] == ([8] if way is BESIDE else [8, 16])


@WAYS
def test_a_run_goes_on_if_it_is_told_to_and_each_later_commit_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: dict[str, object]
) -> None:
    config = make_config(tmp_path, "counting", way | {"rehearse": "record"}, settings={"acts_after": 6})
    live(config)
    found = [commit.inexact for commit in commits_of(config)]
    first, step = (1, 10) if way is BESIDE else (2, 12)  # the first commit after the comparison, and its first step
    assert set(found[:first]) == {""}
    assert all(each.startswith(f"would not continue exactly: first in step {step}: model") for each in found[first:])
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_a_run_that_goes_on_beside_ends_on_the_bytes_of_one_that_was_never_rehearsed(tmp_path: Path) -> None:
    """A count that no checkpoint has is what the living ranks make it: a rehearsal beside them changes nothing."""
    plain = make_config(tmp_path / "plain", "counting", {"rehearse": "off"}, settings={"acts_after": 6})
    live(plain)
    recorded = make_config(tmp_path / "on", "counting", BESIDE | {"rehearse": "record"}, settings={"acts_after": 6})
    live(recorded)
    assert content_ids(recorded) == content_ids(plain)


def test_an_attribute_of_the_model_that_differs_after_equal_steps_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(make_config(tmp_path, "numbering", BESIDE, epochs=3))
    warnings = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "steps change model.calls (int), and no checkpoint contains it" in warnings[0]
    newest = Journal(open_store(f"{tmp_path}/runs"), "run").newest()
    assert newest is not None
    assert newest.unkept == ["model.calls"]
    assert newest.verdict.startswith("rehearsed from step")
    assert newest.verdict.endswith("; no checkpoint contains model.calls")


@WAYS
def test_ranks_that_fail_in_their_first_step_stop_the_run(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "crashing", way, settings={"folder": str(tmp_path)})
    with pytest.raises(Inexact, match="nothing cached"):
        live(config)
    assert [commit.step for commit in commits_of(config)] == ([8] if way is BESIDE else [8, 16])


@WAYS
def test_ranks_that_are_killed_in_a_rehearsal_cost_nothing_but_time(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "dying", way, settings={"folder": str(tmp_path)})
    live(config)
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"})
    live(plain)
    assert content_ids(config) == content_ids(plain)


@pytest.mark.parametrize("waits", [False, True], ids=["refused", "waiting"])
def test_a_program_that_cannot_run_beside_itself_is_rehearsed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    """Its new ranks fail, or wait for ever, while the living ranks hold a lock or a port."""
    monkeypatch.setattr(rehearsal, "LEAST_S", 5.0)
    monkeypatch.setattr(rehearsal, "PATIENCE", 0.0)
    monkeypatch.setattr(rehearsal, "count_rehearsed", lambda *_: 8 if waits else 4)
    settings = {"folder": str(tmp_path), "waits": waits}
    config = make_config(tmp_path, "locking", BESIDE, settings=settings, epochs=3)
    live(config)
    # at once if the steps reach the epoch's end, and otherwise at the next epoch's beginning
    assert commits_of(config)[-1].rehearsed[0] == (9 if waits else 16)
    (warning,) = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert warning.startswith("new ranks beside the running ranks failed (")
    assert ("reported nothing for 5 s" if waits else "BlockingIOError") in warning
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"}, epochs=3)
    live(plain)
    assert content_ids(config) == content_ids(plain)


@pytest.mark.parametrize("why", ["lock", "memory"])
def test_new_ranks_continue_no_run_that_may_have_summed_up_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """The living ranks continue if new ranks fail beside them, or if memory has become too short for both."""
    begin_inside = rehearsal.Rehearsals.begin_inside

    def begin(self: rehearsal.Rehearsals, *values: Any, **named: Any) -> bool:
        if why == "memory":
            monkeypatch.setattr(ranks, "find_free_memory", lambda: 0)
        return begin_inside(self, *values, **named)

    monkeypatch.setattr(rehearsal.Rehearsals, "begin_inside", begin)
    monkeypatch.setattr(rehearsal, "count_rehearsed", lambda *_: 4)
    settings, chunk = {"folder": str(tmp_path)}, {"epochs": 1}
    plain = make_config(tmp_path / "plain", "summing", {"rehearse": "off"}, settings=settings, chunk=chunk)
    live(plain)
    config = make_config(tmp_path, "summing", BESIDE, settings=settings, chunk=chunk)
    with pytest.raises(Inexact, match="first in step 24: optimizer"):
        live(config)
    assert content_ids(config) == content_ids(plain)[:3]


@pytest.mark.parametrize(("turn", "step", "way"), in_turn((1, 10), (1, 12), (2, 2), (2, 7)))
def test_ranks_that_are_told_to_end_in_a_rehearsal_lose_no_step(
    tmp_path: Path, way: dict[str, object], turn: int, step: int
) -> None:
    """Be it the ranks that live or the new ones, in a step that they rehearse or in the last one."""
    settings = {"folder": str(tmp_path), "turn": turn, "step": step}
    config = make_config(tmp_path, "leaving", way, epochs=2, settings=settings)
    live(config)
    if (turn, step) == (2, 7):  # trained to the end; of the others, some have trained on after their save
        assert any(commit.rehearsed for commit in commits_of(config))
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"}, epochs=2)
    live(plain)
    assert content_ids(config)[-1] == content_ids(plain)[-1]


@WAYS
def test_ranks_that_do_not_end_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, object]
) -> None:
    """Of those that ended alone, the run needs the memory; of those aside, nothing may be left."""
    monkeypatch.setattr(launching.Ranks.end, "__defaults__", (0.2,))
    ending, pids = ranks.AttemptRanks.end_running, set[int]()

    def end_frozen(self: ranks.AttemptRanks) -> None:
        if self.running is not None:
            pids.update(self.running.list_pids())
            self.running.signal(signal.SIGSTOP)
        ending(self)

    monkeypatch.setattr(ranks.AttemptRanks, "end_running", end_frozen)
    config = make_config(tmp_path, "exact", way, epochs=2)
    live(config)
    assert [commit.rehearsed for commit in commits_of(config)] == [[], [9 if way is BESIDE else 8]]
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


# Each kind of rehearsal is made once, which takes five epochs.
DONE = {"rehearse": "first"}


class Kill(Observer):
    """Kill the ranks once they have reported a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def progressed(self, attempt: AttemptView, progress: object) -> None:
        if progress.step == self._step:  # type: ignore[attr-defined]
            kill_ranks(attempt)


def test_steps_that_dead_ranks_had_trained_are_compared(tmp_path: Path) -> None:
    plain = make_config(tmp_path / "plain", "counting", {"rehearse": "off"}, settings={"acts_after": 44}, epochs=8)
    live(plain)
    logs = {"every": 1, "folder": str(tmp_path / "logs")}
    # the ranks wait to be killed before the next commit
    settings, judged = {"acts_after": 44, "until": str(tmp_path / "never"), "at": 55}, Judged()
    config = make_config(tmp_path, "counting", DONE, log=logs, settings=settings, epochs=8)
    with pytest.raises(Inexact, match=r"this run does not continue exactly: first in step \d+: (loss|model)"):
        live(config, [Kill(54), judged])
    assert judged.verdicts[-1][:2] == ("death", "refused")
    committed = content_ids(config)
    assert 5 <= len(committed) <= 6
    assert committed == content_ids(plain)[: len(committed)]


@pytest.mark.parametrize("trained", [0, 1])
def test_a_chunk_in_which_ranks_died_after_few_steps_is_rehearsed_all_the_same(tmp_path: Path, trained: int) -> None:
    """The same attempt trains it again before its first step, and the next attempt after one step that is compared."""
    plain = make_config(tmp_path / "plain", "pulsing", {"rehearse": "off"}, settings={"folder": str(tmp_path)})
    live(plain)
    committed = tmp_path / "runs" / "run" / "commits" / "00000001.json"
    settings = {"folder": str(tmp_path / "plain"), "dies_at": 9 + trained, "awaited": str(committed)}
    config, judged = make_config(tmp_path, "pulsing", BESIDE, settings=settings), Judged()
    if trained:
        with pytest.raises(RankDied):
            live(config, acts=ONCE)
    with pytest.raises(Inexact, match=r"first in step 1[4-6]"):
        live(config, [judged])
    compared = [each[:2] for each in judged.verdicts if each[0] != "gate"]
    assert compared == [("death", "passed")] * trained + [("rehearsal", "refused")]
    assert content_ids(config) == content_ids(plain)[:1]


def test_an_exact_run_passes_the_comparison_with_dead_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, "exact", DONE, log={"every": 1, "folder": str(tmp_path / "logs")}, epochs=6)
    judged = Judged()
    with caplog.at_level(logging.INFO, "holdfast"):
        live(config, [Kill(46), judged])
    assert {each[:2] for each in judged.verdicts if each[0] == "death"} == {("death", "passed")}
    assert [each.message for each in caplog.records if each.message.endswith("exactly as the dead ranks did")]
    assert not list((tmp_path / "logs" / "run").glob("*.steps.jsonl"))


def test_a_run_that_is_over_within_a_minute_is_not_rehearsed_unless_asked(tmp_path: Path) -> None:
    unasked = make_config(tmp_path / "unasked", "exact", {})
    live(unasked)
    assert commits_of(unasked)[-1].verdict == "not rehearsed: the run would end within a minute"
    asked = make_config(tmp_path / "asked", "exact", {"rehearse": "first"})
    live(asked)
    assert [commit.rehearsed for commit in commits_of(asked)] == [[], [9], [9], [9, 19]]


def test_later_rehearsals_take_a_share_of_the_training_time(tmp_path: Path) -> None:
    config = make_config(tmp_path, "exact", {"rehearse": "on", "share": 0.001}, epochs=7)
    live(config)
    assert commits_of(config)[-1].rehearsed == [9, 19, 32]
    assert {each.kind for each in commits_of(config)[-1].rehearsals} == {"inside", "across", "commit"}


@WAYS
def test_what_a_loop_logs_is_no_state_and_a_step_knows_that_it_is_a_rehearsal(
    tmp_path: Path, way: dict[str, object]
) -> None:
    noted_in = {"folder": str(tmp_path / "noted")}
    config = make_config(tmp_path, "loop", way | {"rehearse": "first"}, settings=noted_in, epochs=2)
    (tmp_path / "noted").mkdir()
    live(config)
    noted = sorted((file.read_text().split("\n")[:-1] for file in (tmp_path / "noted").iterdir()), key=len)
    rehearsed = [each for lines in noted for each in lines if each.endswith("True")]
    assert sorted(rehearsed, key=lambda each: int(each.split()[0])) == [
        f"{step} True" for step in range(9 if way is BESIDE else 8, 15)
    ]
    kept = sorted(int(each.split()[0]) for lines in noted for each in lines if each.endswith("False"))
    assert kept == list(range(16))


@pytest.mark.parametrize(("moment", "way"), in_turn(("begun",), ("renewed",), ("compared",)))
def test_a_signal_in_a_rehearsal_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: dict[str, object], moment: str
) -> None:
    """A signal may come at any moment: the attempt saves, and the same command continues to the same bytes."""
    config = make_config(tmp_path / "told", "exact", way)
    calls = {"begun": "finish", "renewed": "_train", "compared": "_note_equal"}
    original: Callable[..., object] = getattr(rehearsal.Rehearsals, calls[moment])

    def told(self: object, *arguments: object, **named: object) -> object:
        if moment == "begun":
            raise SystemExit(143)
        original(self, *arguments, **named)
        raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr(rehearsal.Rehearsals, calls[moment], told)
        with pytest.raises(SystemExit):
            live(config)
    assert commits_of(config)[-1].step >= 8
    live(config)
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"})
    live(plain)
    assert content_ids(config)[-1] == content_ids(plain)[-1]
    assert verify_run(Journal(open_store(config.store), "run")).problems == []


# Each in one way; in both ways in make soak.
COMPUTES = {
    "ddp": ({"ranks": 2}, ALONE),
    "fsdp": ({"ranks": 2, "parallel": "fsdp"}, BESIDE),
    "virtual-fsdp": ({"ranks": 2, "parallel": "fsdp", "virtual_ranks": 4}, ALONE),
    "virtual": ({"ranks": 2, "virtual_ranks": 4}, BESIDE),
}
TOGETHER = [
    pytest.param(compute, way, id=f"{name}-{'beside' if way is BESIDE else 'alone'}")
    for name, (compute, own) in COMPUTES.items()
    for way in ((BESIDE, ALONE) if IS_SOAK else (own,))
    if IS_SOAK or name in ("ddp", "fsdp")
]


@pytest.mark.parametrize(("compute", "way"), TOGETHER)
def test_several_ranks_rehearse_together(tmp_path: Path, way: dict[str, object], compute: dict[str, object]) -> None:
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"}, compute=compute, epochs=2)
    live(plain)
    rehearsed = make_config(tmp_path / "rehearsed", "exact", way, compute=compute, epochs=2)
    live(rehearsed)
    assert content_ids(rehearsed) == content_ids(plain)
    assert commits_of(rehearsed)[-1].rehearsed == [9 if way is BESIDE else 8]


@pytest.mark.parametrize("way", [BESIDE, ALONE] if IS_SOAK else [BESIDE])
def test_state_that_only_the_second_rank_has_stops_the_run(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "of_one_rank", way, compute={"ranks": 2})
    with pytest.raises(GateTripped, match=r"rank 1: .* reads state that no checkpoint has"):
        live(config)
    assert [commit.step for commit in commits_of(config)] == [8]


@pytest.mark.parametrize(
    ("moment", "after_s"), [("begin_inside", 0.0), ("note", 0.0), ("_await_lived", 0.1), ("_rehearse_beside", 0.1)]
)
def test_a_notice_ends_the_wait_for_a_rehearsal_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, after_s: float
) -> None:
    """The living ranks train on until the last safe moment, and save at each chunk's end and at the stop."""
    config = make_config(tmp_path / "told", "napping", BESIDE, epochs=400)
    attempts: list[Attempt] = []
    opening, original = Attempt.open, getattr(rehearsal.Rehearsals, moment)

    def open_attempt(attempt: Attempt) -> None:
        attempts.append(attempt)
        opening(attempt)

    def told(self: object, *arguments: Any, **options: Any) -> object:
        notice = Notice("the machine goes away", 8.0)
        if after_s:
            threading.Timer(after_s, attempts[0].notify, [notice]).start()
        done = original(self, *arguments, **options)
        if not after_s and attempts[0].notice is None:
            attempts[0].notify(notice)
        return done

    monkeypatch.setattr(rehearsal.Rehearsals, moment, told)
    live(config, acts=Acts(open=open_attempt))
    commits = commits_of(config)
    assert commits[-1].step > 16
    assert [commit.step for commit in commits[:-1]] == [*range(8, commits[-1].step, 8)]
    assert not commits[-1].rehearsed


def test_a_stop_at_the_end_of_a_chunk_is_compared(tmp_path: Path) -> None:
    config = make_config(tmp_path, "napping", {"rehearse": "on"}, chunk={"steps": 1}, epochs=400)

    class Taken(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            if commit.number == 3:
                attempts[0].notify(Notice("the machine goes away", 2.0))

    attempts: list[Attempt] = []

    def open_attempt(attempt: Attempt) -> None:
        attempts.append(attempt)
        attempt.open()

    live(config, [Taken()], Acts(open=open_attempt))
    last = commits_of(config)[-1].step
    assert last < 8 * 400
    elsewhere = config.log.model_copy(update={"folder": str(tmp_path / "elsewhere")})
    live(config.model_copy(update={"epochs": last // 8 + 2, "log": elsewhere}))
    assert commits_of(config)[-1].step == 8 * (last // 8 + 2)
    assert commits_of(config)[-1].unproved == []

"""Attempts with real ranks, without Prefect: what is read back, what the gate refuses, what another run lends."""

import gc
import itertools
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import checkpoint
from holdfast.attempt import Acts, Attempt, AttemptView, Line, Observer, Proposal, live, publish_commit, started_ahead
from holdfast.attempt.opening import Known
from holdfast.attempt.upkeep import Upkeep
from holdfast.checkpoint import read_metadata
from holdfast.config import Checkpoint, ChunkLength, InitFrom, Log, Retention, RunConfig
from holdfast.errors import (
    ConfigError,
    GateTripped,
    HoldfastError,
    NameMissing,
    NoProgress,
    RankDied,
    RunStopped,
    Superseded,
    Unhealthy,
    from_json,
)
from holdfast.journal import REPORT, Commit, Journal
from holdfast.journal.endings import Ending
from holdfast.keeping.verification import verify_run
from holdfast.ledger import history, interval
from holdfast.ledger.history import read_losses
from holdfast.ledger.standing import Outcome
from holdfast.machine.preemption import Notice
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Progress
from holdfast.rank.spawn import start_process
from holdfast.store import open_store
from holdfast.terminal import interrupt
from tests.support.lives import Lives, ranks_of
from tests.support.makers import claim, make_commit
from tests.support.processes import kill_ranks
from tests.support.waiting import await_equal

Train = Callable[..., None]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

# No chunk is tried twice.
ONCE = Acts(train_chunk=Attempt.train_chunk)
# Longer than forked ranks take to start where nothing else runs.
AHEAD_S = 2.0


def make_config(folder: Path, run: str, recipe: str = "tests.support.policy:policy", **fields: object) -> RunConfig:
    known = {"store": str(folder), "epochs": 1, "chunk": ChunkLength(steps=3), "log": Log(folder=str(folder / "logs"))}
    return RunConfig.model_validate({"recipe": recipe, "run": run, **known, **fields})


def journal_of(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


@pytest.fixture
def train(nursery: Lives) -> Train:
    """Train so many chunks of a run, or to its end."""

    def train(config: RunConfig, chunks: int = 100, **environment: str) -> None:
        settings = config.model_dump(mode="json")
        done = nursery.call("tests.support.forked:train_chunks", settings, chunks, **environment)
        if done.returncode:
            raise from_json(json.loads(done.stdout))

    return train


def train_next(attempt: Attempt) -> checkpoint.Saved:
    """Train the attempt's next chunk; return its checkpoint, which is not committed."""
    chunk = attempt.next_chunk()
    assert chunk is not None
    saved = attempt.train_chunk(chunk)
    assert saved is not None
    return saved


def content_id(config: RunConfig) -> str:
    newest = journal_of(config).newest()
    assert newest is not None
    return newest.checkpoint_sha256


@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_attempt_whose_checkpoint_a_later_one_has_pruned_is_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """The first attempt stalls just before or after its commit's record, while the second trains the run to its end."""
    config = make_config(tmp_path, "run", retention=Retention(keep_last=1))
    first = Attempt(config)
    first.open()
    try:
        saved, publish = train_next(first), first.journal.publish_commit

        def publish_slowly(commit: Commit, envelope: bytes | None = None) -> Commit:
            commit = publish(commit, envelope)
            live(config)
            return commit

        if is_recorded:
            monkeypatch.setattr(first.journal, "publish_commit", publish_slowly)
        else:
            live(config)
        with pytest.raises(Superseded, match="is superseded by attempt 2"):
            first.commit(saved)
        assert not (tmp_path / "run" / saved.path).exists()
    finally:
        first.close()
    assert verify_run(journal_of(config)).problems == []


def test_an_attempt_whose_ranks_miss_a_file_is_superseded_if_a_later_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt(make_config(tmp_path, "run"))
    attempt.open()
    try:
        chunk = attempt.next_chunk()
        assert chunk is not None

        def fail(within_s: float | None = None) -> None:
            raise NameMissing("can't write epoch-0001/metadata.json: it does not exist")

        monkeypatch.setattr(attempt.ranks.own, "next_event", fail)
        with pytest.raises(NameMissing):
            attempt.train_chunk(chunk)
        claim(attempt.journal, 2)
        with pytest.raises(Superseded):
            attempt.train_chunk(chunk)
    finally:
        attempt.close()


def test_a_command_that_comes_before_the_first_has_ended_completes_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is trained then, and the second attempt does what is left to do."""
    config, others = make_config(tmp_path, "run"), list[Outcome]()

    class Overtaken(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            if attempt.is_complete:
                others.append(live(config))

    assert live(config, [Overtaken()]).complete
    assert [each.complete for each in others] == [True]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "pruning failed: attempt 1 of run 'run' is superseded by attempt 2; the run continues (a later attempt, in "
        "another process, trains this run now; the commits of both attempts stay)"
    ]
    journal = journal_of(config)
    assert [ending.reason for ending in journal.endings()] == ["vanished", "completed"]
    assert verify_run(journal).problems == []
    assert journal.store.exists(REPORT)
    assert len(journal.store.list("metrics")) == journal.newest_number()


def test_a_complete_run_is_started_again_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, "run")
    assert live(config).complete
    assert live(config).complete
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_what_is_read_back_otherwise_than_it_was_hashed_is_trained_again(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_config(tmp_path, "straight")
    config = make_config(tmp_path, "run", checkpoint=Checkpoint(read_back_every=2))
    train(straight)
    read_back: list[int] = []

    class Damage(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            if commit.number == 2:
                payload = tmp_path / "run" / commit.path / "checkpoint.safetensors"
                data = bytearray(payload.read_bytes())
                data[-1] ^= 1
                payload.write_bytes(data)

    read = Upkeep.read_back

    def see(upkeep: Upkeep) -> bool:
        number = journal_of(config).newest_number()
        if was_due := read(upkeep):
            read_back.append(number)
        return was_due

    monkeypatch.setattr(Upkeep, "read_back", see)
    live(config, [Damage()])
    assert read_back == [1, 2, 4]
    assert [reason.split(":")[0] for reason in journal_of(config).quarantine_reasons()] == [
        "read back after its commit"
    ]
    assert content_id(config) == content_id(straight)
    assert verify_run(journal_of(config)).ok


def test_automatic_chunks_survive_a_kill_on_the_same_bytes(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_config(tmp_path, "straight", "tests.support.toy:toy", epochs=4)
    train(straight)
    monkeypatch.setenv("TOY_DELAY_S", "0.02")
    for name, value in {"PRIOR_S": 4.0, "FLOOR_S": 0.0, "SAVES": 0.0}.items():
        monkeypatch.setattr(interval, name, value)
    monkeypatch.setattr(history, "FIRST_STEPS", 2)
    # On a busy machine a save stalls training for longer, and so an automatic chunk may be longer than an epoch.
    chunk = {"steps": "auto", "epochs": 1}
    config = make_config(tmp_path, "run", "tests.support.toy:toy", epochs=4, chunk=chunk)

    class Kill(Observer):
        def progressed(self, attempt: AttemptView, progress: Progress) -> None:
            if progress.step >= 16:
                kill_ranks(attempt)

    began = time.monotonic()
    with pytest.raises(RankDied):
        live(config, [Kill()], acts=ONCE)
    live(config)
    lived_s = time.monotonic() - began

    journal = journal_of(config)
    assert content_id(config) == content_id(straight)
    assert verify_run(journal).ok
    commits = [journal.read_commit(number) for number in journal.numbers("commits")]
    steps = [0, *(commit.step for commit in commits)]
    assert steps[1] == 2, "short, so that something is measured"
    assert len({stop - start for start, stop in itertools.pairwise(steps)}) > 1
    assert {10, 20, 30} < set(steps), "each epoch ends a chunk"
    for commit in commits:
        assert 0.02 < commit.train_s < lived_s
        assert 0 < commit.stall_s < lived_s
        assert 0 < commit.save_s < lived_s
        assert commit.restart_s > 0  # a forked rank starts in milliseconds
    assert read_losses(journal).count == 1


def test_a_collapse_of_before_is_rolled_back(train: Train, tmp_path: Path) -> None:
    config = make_config(tmp_path, "run", settings={"collapse_at": 10})
    train(config)  # steps 3, 6 and 9 are healthy, step 10 isn't, and nobody asks
    collapsed = journal_of(config).newest()
    assert collapsed is not None
    metadata = read_metadata(journal_of(config).store, collapsed.path)
    assert metadata is not None
    assert (metadata.probe.values["entropy"] or 0.0) < 1e-4
    assert (metadata.probe.values["noop_rate"] or 0.0) > 0.99
    with pytest.raises(Unhealthy, match=r"after step 10 entropy is 3.*e-05, below 0.05; noop_rate is 1, above 0.9"):
        # From step 9, and collapses again.
        train(make_config(tmp_path, "run", settings={"collapse_at": 10}, epochs=2), POLICY_LIMITS="1")
    assert len(reasons := journal_of(config).quarantine_reasons()) == 1
    assert "the gate: entropy is" in reasons[0]
    healthy = journal_of(config).newest()
    assert healthy is not None
    assert healthy.step == 9
    assert verify_run(journal_of(config)).ok


def test_twice_in_a_row_it_is_not_the_checkpoints_fault(train: Train, tmp_path: Path) -> None:
    config = make_config(tmp_path, "run", settings={"collapse_at": 2})
    train(config)
    with pytest.raises(GateTripped, match=r"(?s)no checkpoint that passes the gate.*commit 4.*commit 3"):
        train(make_config(tmp_path, "run", settings={"collapse_at": 2}, epochs=2), POLICY_LIMITS="1")
    assert journal_of(config).quarantine_reasons() == []


def test_an_unhealthy_step_is_tried_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_LIMITS", "1")
    config = make_config(tmp_path, "run", settings={"collapse_at": 5})
    attempt = Attempt(config)
    try:
        attempt.open()
        attempt.commit(train_next(attempt))
        chunk = attempt.next_chunk()
        assert chunk is not None
        with pytest.raises(Unhealthy):
            attempt.train_chunk(chunk)
        with pytest.raises(NoProgress, match=r"twice in the same way.*entropy"):
            attempt.train_chunk(chunk)
    finally:
        attempt.close()
    assert attempt.step == 3


def test_ranks_that_replace_failed_ones_are_told_of_the_notice_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would train into the same collapse, and the attempt would end for it."""
    monkeypatch.setenv("POLICY_LIMITS", "1")
    config = make_config(tmp_path, "run", settings={"collapse_at": 5}, log=Log(every=1, folder=str(tmp_path)))

    attempts: list[Attempt] = []

    def open_run(attempt: Attempt) -> None:
        attempts.append(attempt)
        attempt.open()

    class Tell(Observer):
        def progressed(self, attempt: AttemptView, progress: Progress) -> None:
            if progress.step == 5 and attempts[0].notice is None:
                attempts[0].notify(Notice("the machine goes away", 300.0, is_at_once=True))

    outcome = live(config, [Tell()], Acts(open=open_run))
    assert not outcome.complete
    (ending,) = journal_of(config).endings()
    assert ending.reason == "preempted"
    assert ending.step in (3, 4), "they stop at once, or after the step that they had begun"


def test_a_run_begins_with_the_weights_of_another(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ancestor = make_config(tmp_path, "ancestor", "tests.support.varied:pythonic", epochs=2)
    train(ancestor)
    init = InitFrom(run="ancestor", reset=("2",))
    straight = make_config(tmp_path, "straight", "tests.support.varied:pythonic", init_from=init, epochs=2)
    caplog.set_level(logging.INFO)
    live(straight)
    origin = r"the run begins with the weights of run ancestor, commit 4 \(\w{12}\)"
    assert re.search(f"{origin}; its anneals begin at step 12 of ", caplog.text)
    cut = make_config(tmp_path, "cut", "tests.support.varied:pythonic", init_from=init, epochs=2)
    train(cut, chunks=1)
    train(ancestor.model_copy(update={"epochs": 3}))  # it continues: who has begun with it isn't touched
    train(cut, chunks=1)
    train(cut)
    assert content_id(cut) == content_id(straight)
    journal = journal_of(cut)
    assert journal.attempts() == 3
    origin = journal.read_attempt(1).lineage["ancestor"]
    assert (origin["run"], origin["commit"]) == ("ancestor", 4)
    newest = journal.newest()
    assert newest is not None
    metadata = read_metadata(journal.store, newest.path)
    assert metadata is not None
    assert metadata.anneal_offset == 12
    assert metadata.anneals == {"temperature": 0.1}
    fresh = make_config(tmp_path, "fresh", "tests.support.varied:pythonic", epochs=2)
    train(fresh)
    assert content_id(fresh) != content_id(straight)
    with pytest.raises(ConfigError, match="has no module or weight 'head'"):
        train(
            make_config(
                tmp_path, "wrong", "tests.support.varied:pythonic", init_from=InitFrom(run="ancestor", reset=("head",))
            )
        )


def test_damage_to_a_file_that_checkpoints_share_leaves_one_to_fall_back_on(train: Train, tmp_path: Path) -> None:
    config, straight = (
        make_config(
            tmp_path, name, "tests.support.frozen:frozen", chunk=ChunkLength(steps=2),
            checkpoint=Checkpoint(part_bytes=2**16), retention=Retention(keep_last=3),
        )
        for name in ("run", "straight")
    )  # fmt: skip
    train(straight)
    # The ranks are ahead, and leave perhaps a seventh, which shares its files with the sixth.
    train(config, chunks=6)
    journal = journal_of(config)
    kept = list(journal.candidates())
    frozen = sorted(path.name for path in (tmp_path / "run" / kept[0].path).glob("checkpoint-*"))[1:]
    files = [[(tmp_path / "run" / commit.path / name).stat().st_ino for name in frozen] for commit in kept]
    assert len(frozen) > 1
    assert files[0] != files[1] == files[2]
    damaged = tmp_path / "run" / kept[0].path / frozen[0]
    damaged.write_bytes(damaged.read_bytes()[::-1])
    train(config)
    assert list(journal.numbers("quarantine")) == [6]
    assert content_id(config) == content_id(straight)
    assert verify_run(journal).ok


def test_an_attempt_takes_over_the_ranks_that_were_started_ahead_for_it(tmp_path: Path) -> None:
    config, began = make_config(tmp_path, "run", log=Log(every=1, folder=str(tmp_path))), time.monotonic()
    seen: list[list[psutil.Process]] = []

    class See(Observer):
        def progressed(self, attempt: AttemptView, progress: Progress) -> None:
            seen.append(ranks_of(os.getpid()))

    with started_ahead(config):
        ahead = ranks_of(os.getpid())
        time.sleep(AHEAD_S)
        outcome = live(config, [See()])
    assert seen[0] == ahead
    assert outcome.complete
    assert verify_run(journal_of(config)).ok
    assert not ranks_of(os.getpid())
    # What it took to begin counts from the start of the ranks, not from when they were taken over.
    assert AHEAD_S <= journal_of(config).read_commit(1).restart_s <= time.monotonic() - began


def test_ranks_that_were_started_ahead_for_another_attempt_are_ended(tmp_path: Path) -> None:
    config = make_config(tmp_path, "run")
    attempt = Attempt(config, 2)  # somebody else was faster
    with started_ahead(config):
        ahead = ranks_of(os.getpid())
        try:
            attempt.open()
            assert len(ranks_of(os.getpid())) == 1
            assert ranks_of(os.getpid()) != ahead
        finally:
            attempt.close()


@pytest.fixture
def idle_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is a process that waits for the end of its orders, and needs no second to start."""
    idle = [sys.executable, "-c", "import sys; sys.stdin.read()", "holdfast.rank"]
    spawn = staticmethod(lambda command, environment, log: start_process(idle, environment, log))
    monkeypatch.setattr(Ranks, "spawn", spawn)


def test_ranks_that_were_started_ahead_end_when_nothing_takes_them_over(tmp_path: Path, idle_rank: None) -> None:
    def fail() -> None:
        await_equal(lambda: len(ranks_of(os.getpid())), 1)  # a command line may be empty while a process starts
        raise RunStopped("Prefect's temporary server did not start")

    with pytest.raises(RunStopped), started_ahead(make_config(tmp_path, "run")):
        fail()
    assert not ranks_of(os.getpid())


@pytest.mark.parametrize(("where", "error"), [("_build", KeyboardInterrupt), ("_resume", RunStopped)])
def test_no_rank_is_left_whatever_opening_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: type[BaseException]
) -> None:
    """As a signal does, which arrives just after a step of opening is done."""
    attempt = Attempt(make_config(tmp_path, "run"))
    done = getattr(attempt, where)

    def interrupted(*arguments: Any) -> None:
        done(*arguments)
        raise error("now")

    monkeypatch.setattr(attempt, where, interrupted)
    with pytest.raises(error):
        attempt.open()
    assert not ranks_of(os.getpid())


def test_a_signal_whose_exception_is_lost_ends_the_attempt_after_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python passes over exceptions in a destructor, also those of a signal's handler."""

    class Killed:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    class Loses(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            Killed()

    monkeypatch.setattr(interrupt, "_came", [])
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    before = signal.signal(signal.SIGTERM, interrupt.end)
    config = make_config(tmp_path, "run")
    try:
        with pytest.raises(SystemExit) as told:
            live(config, [Loses()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told.value.code == 143
    newest = journal_of(config).newest()
    assert newest is not None
    assert newest.epoch == 0


def test_no_rank_is_left_where_the_run_to_begin_from_is_unknown(tmp_path: Path) -> None:
    attempt = Attempt(make_config(tmp_path, "run", init_from=InitFrom(run="nobody")))
    with pytest.raises(HoldfastError, match="nobody"):
        attempt.open()
    assert not ranks_of(os.getpid())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Popen's: the process still runs
def test_ranks_that_lost_their_owner_end(tmp_path: Path, idle_rank: None) -> None:
    """As where a signal arrives between their start and the line that takes them."""
    Ranks(make_config(tmp_path, "run"), tmp_path / "ranks.log")
    gc.collect()
    await_equal(lambda: ranks_of(os.getpid()), [])


def test_every_commit_is_made_and_told_of_the_same_way_whoever_asks_for_it(tmp_path: Path) -> None:
    """A chunk's, a stop's, and what dead ranks had saved: checked before, told of after, in order."""
    calls: list[tuple[str, object]] = []

    def publish(line: Line, proposal: Proposal) -> Commit:
        calls.append(("before", proposal.reason))
        return publish_commit(line, proposal)

    class Tell(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            calls.append((self.name, commit.step))

    class Failing(Observer):
        def committed(self, attempt: AttemptView, commit: Commit) -> None:
            raise ZeroDivisionError("nobody minds")

    def make() -> Attempt:
        attempt = Attempt(config, None, [Tell("one"), Failing(), Tell("other")], publish)
        attempt.open()
        attempt.upkeep.prune_epochs = lambda: calls.append(("upkeep", attempt.step))  # type: ignore[method-assign, assignment, func-returns-value]
        return attempt

    config = make_config(tmp_path, "run", "tests.support.toy:toy", chunk=ChunkLength(steps=2), epochs=2)
    attempt = make()
    attempt.commit(train_next(attempt))
    assert calls == [("before", "chunk"), ("one", 2), ("other", 2), ("upkeep", 2)]

    calls.clear()
    attempt.stop()
    stopped_at = attempt.step
    assert stopped_at > 2
    names = ["before", "one", "other"]  # upkeep has no time
    assert [name for name, _ in calls] == names * (len(calls) // 3)
    assert {what for name, what in calls if name == "before"} == {"preempted"}
    assert calls[-1] == ("other", stopped_at)
    attempt.end(Ending("preempted"))

    calls.clear()
    lost = Attempt(config)
    lost.open()
    train_next(lost)
    lost.close()  # it had saved, and dies before it commits
    heir = make()
    adopted = [("before", "adopted"), ("one", heir.step), ("other", heir.step)]
    assert calls[-3:] == adopted
    train_next(heir)
    assert calls[-1] == ("upkeep", heir.head.step if heir.head else 0), "what was left to it, while its ranks train"
    heir.end(Ending("completed"))
    assert verify_run(journal_of(config)).ok


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("preempted", "preempted"), ("vanished", "preempted"), ("cancelled", "cancelled"), ("paused", "paused"),
    ],
)  # fmt: skip
def test_an_attempt_says_how_the_attempt_before_was_told_to_stop(ending: str, why: str) -> None:
    """In all these cases the last commit is that of a stop."""
    known = Known(1, make_commit(1, why="preempted"), 4, Ending(ending))
    assert known.find_reason(10, 40) == why

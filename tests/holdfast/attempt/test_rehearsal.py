"""Rehearsals: new ranks have to train the steps after a commit as the ranks that went on, or the run stops."""

import itertools
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.attempt import Acts, Attempt, AttemptView, CheckpointVerdict, Observer, live, ranks, rehearsal
from holdfast.config import RunConfig
from holdfast.errors import GateTripped, Inexact
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.rank import launching
from holdfast.store import open_store
from tests.conftest import IS_SOAK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

# Every commit is rehearsed, in new ranks beside those that went on, or after these have ended.
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
    steps = [(judge, "passed", number) for number in (1, 2, 3) for judge in ("gate", "rehearsal")]
    assert judged.verdicts == steps
    assert content_ids(rehearsed) == content_ids(plain)
    assert [commit.rehearsed for commit in commits_of(rehearsed)] == [[], [8], [8, 16], [8, 16, 24]]
    assert commits_of(rehearsed)[-1].verdict == "continues exactly: rehearsed at steps 8, 16, 24"
    assert {commit.verdict for commit in commits_of(plain)} == {'not rehearsed: proof.rehearse = "off"'}
    lines = [each.message for each in caplog.records if each.message.startswith("rehearsed")]
    assert lines[0] == "rehearsed: new ranks trained steps 9-12 from commit 1 exactly as the running ranks did"
    assert len(lines) == 3
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert verify_run(Journal(open_store(rehearsed.store), "run")).problems == []


@WAYS
def test_a_trail_has_no_more_of_a_rehearsed_step_than_of_another(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "exact", way)
    live(config)
    journal = Journal(open_store(config.store), "run")
    trails = [journal.store.read(f"metrics/{number:08d}.jsonl") for number in (2, 3)]
    assert all(b"tensors" not in trail and b"parts" not in trail for trail in trails)
    assert [trail.count(b"\n") for trail in trails] == [8, 8]


def test_state_that_no_checkpoint_has_stops_the_run_as_soon_as_it_acts(tmp_path: Path) -> None:
    config, judged = make_config(tmp_path, "counting", BESIDE), Judged()
    with pytest.raises(Inexact) as caught:
        live(config, [judged])
    assert judged.verdicts[-1] == ("rehearsal", "refused", 2)
    assert caught.value.exit_code == 2
    assert "this run would not continue exactly: first in step 17: model" in caught.value.message
    assert [commit.step for commit in commits_of(config)] == [8, 16]
    ending = Journal(open_store(config.store), "run").read_ending(1)
    assert ending is not None
    assert ending.ending.reason == "inexact"


def test_the_index_of_a_loop_is_named_where_a_commit_lies_inside_an_epoch(tmp_path: Path) -> None:
    for recipe in ("indexed", "numbered"):
        live(make_config(tmp_path / recipe, recipe, BESIDE))  # commits at the ends of epochs: no harm
    inside = {"chunk": {"steps": 5}}
    with pytest.raises(Inexact) as caught:
        live(make_config(tmp_path / "inside", "indexed", BESIDE, **inside))
    assert "first in step 6: lrs, optimizer, model" in caught.value.message
    assert re.search(
        r"forgetting.py:\d+: enumerate\(run.batches\(...\)\) .*: the iterator begins anew", caught.value.message
    )
    assert "step.number" in caught.value.message
    live(make_config(tmp_path / "numbered-inside", "numbered", BESIDE, **inside))


def test_a_generator_that_is_made_in_the_first_step_gets_advice_that_works(tmp_path: Path) -> None:
    with pytest.raises(Inexact) as caught:
        live(make_config(tmp_path / "late", "collating", BESIDE))
    assert "run.keep(generator=loader.collate_fn.generator); create the generator first" in caught.value.message
    live(make_config(tmp_path / "early", "collating", BESIDE, settings={"is_early": True}))


@WAYS
def test_a_run_that_has_failed_a_rehearsal_is_not_continued_by_the_next_attempt(
    tmp_path: Path, way: dict[str, object]
) -> None:
    config = make_config(tmp_path, "counting", way, settings={"acts_after": 6})
    for _ in range(2):
        with pytest.raises(Inexact):
            live(config)
    assert [commit.step for commit in commits_of(config)] == [8]


@WAYS
def test_a_run_goes_on_if_it_is_told_to_and_each_later_commit_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: dict[str, object]
) -> None:
    config = make_config(tmp_path, "counting", way | {"rehearse": "record"}, settings={"acts_after": 6})
    live(config)
    found = [commit.inexact for commit in commits_of(config)]
    assert found[0] == ""
    assert all(each.startswith("would not continue exactly: first in step 9: model") for each in found[1:])
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1


def test_a_run_that_goes_on_beside_ends_on_the_bytes_of_one_that_was_never_rehearsed(tmp_path: Path) -> None:
    """A count that no checkpoint has is what the living ranks make it: a rehearsal beside them changes nothing."""
    plain = make_config(tmp_path / "plain", "counting", {"rehearse": "off"}, settings={"acts_after": 6})
    live(plain)
    recorded = make_config(tmp_path / "on", "counting", BESIDE | {"rehearse": "record"}, settings={"acts_after": 6})
    live(recorded)
    assert content_ids(recorded) == content_ids(plain)


@WAYS
def test_ranks_that_fail_in_their_first_step_stop_the_run(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "crashing", way, settings={"folder": str(tmp_path)})
    with pytest.raises(Inexact, match="nothing cached"):
        live(config)
    assert [commit.step for commit in commits_of(config)] == [8]


@WAYS
def test_ranks_that_are_killed_in_a_rehearsal_cost_nothing_but_time(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "dying", way, settings={"folder": str(tmp_path)})
    live(config)
    plain = make_config(tmp_path / "plain", "exact", {"rehearse": "off"})
    live(plain)
    assert content_ids(config) == content_ids(plain)


@pytest.mark.parametrize(("turn", "step", "way"), in_turn((1, 10), (1, 12), (2, 2), (2, 4)))
def test_ranks_that_are_told_to_end_in_a_rehearsal_lose_no_step(
    tmp_path: Path, way: dict[str, object], turn: int, step: int
) -> None:
    """Be it the ranks that live or the new ones, in a step that they rehearse or in the last one."""
    settings = {"folder": str(tmp_path), "turn": turn, "step": step}
    config = make_config(tmp_path, "leaving", way, epochs=2, settings=settings)
    live(config)
    assert any(commit.rehearsed for commit in commits_of(config)) == ((turn, step) == (2, 4))  # trained to the end
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
    assert [commit.rehearsed for commit in commits_of(config)] == [[], [8]]
    assert pids
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


class Kill(Observer):
    """Kill the ranks once they have reported a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def progressed(self, attempt: AttemptView, progress: object) -> None:
        if progress.step == self._step:  # type: ignore[attr-defined]
            attempt.signal_ranks(signal.SIGKILL)


def test_steps_that_dead_ranks_had_trained_are_compared(tmp_path: Path) -> None:
    plain = make_config(tmp_path / "plain", "counting", {"rehearse": "off"})
    live(plain)
    logs = {"every": 1, "folder": str(tmp_path / "logs")}
    config, judged = make_config(tmp_path, "counting", {"rehearse": "first"}, log=logs), Judged()
    with pytest.raises(Inexact, match=r"this run does not continue exactly: first in step \d+: loss"):
        live(config, [Kill(22), judged])
    assert judged.verdicts[-1][:2] == ("death", "refused")
    committed = content_ids(config)
    assert 1 <= len(committed) <= 2
    assert committed == content_ids(plain)[: len(committed)]


def test_an_exact_run_passes_the_comparison_with_dead_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, "exact", {"rehearse": "first"}, log={"every": 1, "folder": str(tmp_path / "logs")})
    judged = Judged()
    with caplog.at_level(logging.INFO, "holdfast"):
        live(config, [Kill(22), judged])
    assert {each[:2] for each in judged.verdicts if each[0] == "death"} == {("death", "passed")}
    assert [each.message for each in caplog.records if each.message.endswith("exactly as the dead ranks did")]
    assert not list((tmp_path / "logs" / "run").glob("*.steps.jsonl"))


def test_a_run_that_is_over_within_a_minute_is_not_rehearsed_unless_asked(tmp_path: Path) -> None:
    unasked = make_config(tmp_path / "unasked", "exact", {})
    live(unasked)
    assert commits_of(unasked)[-1].verdict == "not rehearsed: the run would end within a minute"
    asked = make_config(tmp_path / "asked", "exact", {"rehearse": "first"})
    live(asked)
    assert [commit.rehearsed for commit in commits_of(asked)] == [[], [8], [8], [8]]


def test_later_rehearsals_take_a_share_of_the_training_time(tmp_path: Path) -> None:
    config = make_config(tmp_path, "exact", {"rehearse": "on", "share": 0.001})
    live(config)
    assert [commit.rehearsed for commit in commits_of(config)] == [[], [8], [8], [8]]


@WAYS
def test_what_a_loop_logs_is_no_state_and_a_step_knows_that_it_is_a_rehearsal(
    tmp_path: Path, way: dict[str, object]
) -> None:
    config = make_config(tmp_path, "loop", way | {"rehearse": "first"}, settings={"folder": str(tmp_path / "noted")})
    (tmp_path / "noted").mkdir()
    live(config)
    noted = sorted((file.read_text().split("\n")[:-1] for file in (tmp_path / "noted").iterdir()), key=len)
    rehearsed = [each for lines in noted for each in lines if each.endswith("True")]
    assert rehearsed == [f"{step} True" for step in range(8, 12)]
    kept = sorted(int(each.split()[0]) for lines in noted for each in lines if each.endswith("False"))
    assert kept == list(range(32))


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
    assert commits_of(rehearsed)[-1].rehearsed == [8]


@pytest.mark.parametrize("way", [BESIDE, ALONE] if IS_SOAK else [BESIDE])
def test_state_that_only_the_second_rank_has_stops_the_run(tmp_path: Path, way: dict[str, object]) -> None:
    config = make_config(tmp_path, "of_one_rank", way, compute={"ranks": 2})
    with pytest.raises(GateTripped, match=r"rank 1: .* reads state that no checkpoint has"):
        live(config)
    assert [commit.step for commit in commits_of(config)] == [8]

"""The shadow of a stop: the next attempt has to train the steps that the stopped ranks had trained after their save."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import AttemptView, Observer, late, live
from holdfast.checkpoint.departure import MOST_DETAILED
from holdfast.config import RunConfig
from holdfast.errors import Inexact
from holdfast.journal import Journal, RehearsalRecord
from holdfast.journal.exactness import describe_resume
from holdfast.keeping.verification import verify_run
from holdfast.ledger.standing import read_standing
from holdfast.machine.preemption import Notice
from holdfast.rank import launching
from holdfast.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]


def make_config(folder: Path, recipe: str, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": f"tests.support.forgetting:{recipe}", "run": "run", "store": str(folder / "runs"), "epochs": 4,
            "chunk": {"steps": 8}, "log": {"folder": str(folder / "logs"), "every": 1},
            "settings": {"until": str(folder / "told")}, **more,
        }
    )  # fmt: skip


def journal_of(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


def newest_id(config: RunConfig) -> str:
    commit = journal_of(config).newest()
    assert commit is not None
    return commit.checkpoint_sha256


def read_record(config: RunConfig) -> RehearsalRecord | None:
    commit = journal_of(config).newest()
    assert commit is not None
    return journal_of(config).find_rehearsal(commit)


class Stop(Observer):
    """Tell an attempt to end at the news of step 9, as a signal does, or as a notice does."""

    def __init__(self, by: str) -> None:
        self._by, self._is_due = by, False

    def progressed(self, attempt: AttemptView, progress: object) -> None:
        self._is_due |= progress.step == 9  # type: ignore[attr-defined]
        if self._is_due and self._by == "signal":
            raise SystemExit(143)

    def find_notice(self) -> Notice | None:
        return Notice("the machine is taken away", 20.0, is_at_once=True) if self._is_due else None


def stop(config: RunConfig, by: str = "signal") -> None:
    """Train until a stop in step 10 or soon after."""
    original = launching.Ranks.stop

    def told(self: launching.Ranks, within_s: float | None = None) -> None:
        original(self, within_s)
        Path(config.settings["until"]).touch()

    end = Stop(by)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(launching.Ranks, "stop", told)
        live(config, [end], sources=[end.find_notice] if by == "notice" else [])


@pytest.mark.parametrize("by", ["signal", "notice"])
def test_a_stop_off_a_commit_is_compared_over_several_chunks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    plain = make_config(tmp_path / "plain", "exact", proof={"rehearse": "off"}, settings={})
    live(plain)
    config = make_config(tmp_path, "exact")
    stop(config, by)
    record, newest = read_record(config), journal_of(config).newest()
    assert newest is not None
    assert record is not None
    steps = [line["step"] for line in record.lines]
    assert steps == list(range(newest.step + 1, 32))  # the run's last step is left out
    detailed = [line["step"] for line in record.lines if "tensors" in line.get("state", {})]
    assert detailed == steps[:MOST_DETAILED]
    assert verify_run(journal_of(config)).problems == []
    with caplog.at_level(logging.INFO, "holdfast"):
        live(config)
    told = [each.message for each in caplog.records if each.message.endswith("exactly as the stopped ranks did")]
    assert told[0].startswith(f"new ranks trained steps {newest.step + 1}-16 ")
    assert len(told) == 3
    assert f"-{steps[-1]} " in told[-1]
    assert newest_id(config) == newest_id(plain)


def test_state_that_a_stop_loses_stops_the_next_attempt_and_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, "counting", settings={"acts_after": 14, "until": str(tmp_path / "told")})
    stop(config)
    stopped = journal_of(config).newest()
    for _ in range(2):  # also the attempt after that
        with pytest.raises(Inexact, match=r"not continue exactly: first in step 15: model.*forgetting\.py:\d+: seen"):
            live(config)
        assert journal_of(config).newest() == stopped
    shown = read_standing(journal_of(config)).verdict
    assert shown.startswith("this run does not continue exactly: first in step 15: model")
    assert verify_run(journal_of(config)).verdict == shown


@pytest.mark.parametrize("keep_last", [1, 3])
def test_state_whose_loss_shows_only_in_a_later_chunk_is_named(tmp_path: Path, keep_last: int) -> None:
    settings = {"acts_after": 20, "until": str(tmp_path / "told")}
    config = make_config(tmp_path, "counting", settings=settings, retention={"keep_last": keep_last})
    stop(config)
    with pytest.raises(Inexact, match=r"not continue exactly: first in step 21: model.*forgetting\.py:\d+: seen"):
        live(config)


def stop_without_a_shadow(folder: Path, recipe: str, epochs: int = 1, **settings: Any) -> RunConfig:
    """Stop a run in step 10 or soon after. Return its configuration, which asks for rehearsals again."""
    known = {"chunk": {"epochs": epochs}, "settings": {"until": str(folder / "told"), **settings}}
    stop(make_config(folder, recipe, proof={"rehearse": "off"}, **known))
    return make_config(folder, recipe, **known)


def test_the_next_attempt_trains_a_shadow_for_which_a_stop_left_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_config(tmp_path / "plain", "exact", proof={"rehearse": "off"}, settings={})
    live(plain)
    config = stop_without_a_shadow(tmp_path, "exact")
    head = journal_of(config).newest()
    assert head is not None
    with caplog.at_level(logging.INFO, "holdfast"):
        live(config)
    assert f"new ranks trained steps {head.step + 1}-16 exactly as the uninterrupted ranks did" in caplog.text
    assert newest_id(config) == newest_id(plain)
    newest = journal_of(config).newest()
    assert newest is not None
    assert (newest.rehearsals[0].kind, newest.rehearsals[0].start, newest.unproved) == ("stop", head.step, [])


def test_that_shadow_finds_what_the_stop_lost(tmp_path: Path) -> None:
    config = stop_without_a_shadow(tmp_path, "counting", epochs=4, acts_after=14)
    stopped = journal_of(config).newest()
    for _ in range(2):  # also the attempt after that
        with pytest.raises(Inexact, match=r"not continue exactly: first in step 15: model.*forgetting\.py:\d+: seen"):
            live(config)
        assert journal_of(config).newest() == stopped


def test_a_resume_that_nothing_is_compared_with_is_marked_as_unproved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stop_without_a_shadow(tmp_path, "exact")
    monkeypatch.setattr(late, "BRIEF_S", -1.0)  # as if the chunk had taken long
    head = journal_of(config).newest()
    assert head is not None
    live(config)
    newest = journal_of(config).newest()
    assert newest is not None
    assert newest.unproved == [head.number + 1]
    shown = describe_resume(journal_of(config), newest)
    audit = f"holdfast audit {tmp_path}/runs/run --commit {head.number + 1}"
    assert shown.endswith(
        f"; unproved: commit {head.number + 1} begins after a stop or a kill that left no steps to compare ({audit})"
    )
    assert "exactly" not in shown
    assert verify_run(journal_of(config)).verdict == shown


@pytest.mark.parametrize("recipe", ["exact", "failing_in_rehearsals"])
def test_a_shadow_costs_no_save(tmp_path: Path, recipe: str) -> None:
    """Neither steps that fail nor steps that are turned off change what a stop has saved."""
    proof = {"rehearse": "off"} if recipe == "exact" else {}
    config = make_config(tmp_path, recipe, proof=proof, chunk={"steps": 32})
    stop(config)
    newest = journal_of(config).newest()
    assert newest is not None
    assert newest.step >= 9
    assert newest.why == "preempted"
    assert read_record(config) is None


def test_a_complete_run_that_is_made_longer_repeats_its_evaluation(tmp_path: Path) -> None:
    live(make_config(tmp_path, "averaging", epochs=1, settings={}))
    with pytest.raises(Inexact, match=r"mean is \S+ in a second evaluation after step 8, and was"):
        live(make_config(tmp_path, "averaging", epochs=2, settings={}))


@pytest.mark.parametrize(("recipe", "unproved"), [("evaluated", []), ("exact", [2])])
def test_a_complete_run_that_is_made_longer_is_unproved_only_without_an_evaluation(
    tmp_path: Path, recipe: str, unproved: list[int]
) -> None:
    for epochs in (1, 2):
        live(make_config(tmp_path, recipe, epochs=epochs, settings={}))
    newest = journal_of(make_config(tmp_path, recipe)).newest()
    assert newest is not None
    assert (newest.number, newest.unproved) == (2, unproved)

"""A checkpoint that is whole and that the gate refuses: the run stops, names the suspects and quarantines nothing."""

import logging
from pathlib import Path

import pytest

from holdfast.attempt import Acts, Attempt, AttemptView, Observer, live
from holdfast.config import ChunkLength, Log, Resume, RunConfig
from holdfast.errors import GateTripped, RankDied
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.store import open_store
from tests.support.processes import kill_ranks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

# No chunk is tried twice.
ONCE = Acts(train_chunk=Attempt.train_chunk)


class KillAfter(Observer):
    """Kill the ranks after a commit."""

    def __init__(self, number: int) -> None:
        self._number = number

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        if commit.number == self._number:
            kill_ranks(attempt)


def make_config(folder: Path, run: str, recipe: str, **settings: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "recipe": f"tests.support.careless:{recipe}", "run": run, "settings": settings, "store": str(folder),
            "epochs": 3, "chunk": ChunkLength(steps=3), "log": Log(folder=str(folder / "logs")),
        }
    )  # fmt: skip


def journal_of(config: RunConfig) -> Journal:
    return Journal(open_store(config.store), config.run)


def train_and_kill(config: RunConfig) -> None:
    """Train until two chunks are committed, and kill the ranks."""
    with pytest.raises(RankDied):
        live(config, [KillAfter(2)], acts=ONCE)


def content_id(config: RunConfig) -> str:
    newest = journal_of(config).newest()
    assert newest is not None
    assert newest.step == 18
    return newest.checkpoint_sha256


@pytest.mark.parametrize(
    ("recipe", "check", "named"),
    [
        ("late", "results", "model.calls (int) changes when the model is called"),
        ("loading", "state", "after the checkpoint was restored, model.0.bias differ from the saved state"),
    ],
)
def test_a_run_that_no_checkpoint_can_continue_stops(tmp_path: Path, recipe: str, check: str, named: str) -> None:
    """The commit before would pass the gate of `late`: the count acts after step 4, and commit 1 is of step 3."""
    config = make_config(tmp_path, "run", recipe)
    train_and_kill(config)
    for attempt in (2, 3):
        with pytest.raises(GateTripped) as caught:
            live(config)
        assert (caught.value.exit_code, caught.value.data["check"]) == (2, check)
        assert named in caught.value.message
        ending = journal_of(config).read_ending(attempt)
        assert ending is not None
        assert (ending.reason, named in ending.message) == ("refused", True)
    newest = journal_of(config).newest()
    assert newest is not None
    assert newest.step >= 6
    assert journal_of(config).numbers("quarantine") == []
    assert verify_run(journal_of(config)).ok


def test_a_refusal_without_a_suspect_says_where_to_look(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    config = make_config(tmp_path, "run", "reading", path=str(path))
    train_and_kill(config)
    path.write_text("2")
    with pytest.raises(GateTripped, match=r"no cause was found: check .* the files"):
        live(config)
    path.write_text("1")
    live(config)
    assert content_id(config)


def test_a_run_goes_on_with_other_results_if_it_is_told_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The hint of the refusal names the setting."""
    config = make_config(tmp_path, "run", "late")
    train_and_kill(config)
    with caplog.at_level(logging.WARNING, "holdfast"):
        live(config.model_copy(update={"resume": Resume(accept_drift=["built"])}))
    assert "recorded, not refused" in caplog.text
    assert content_id(config)
    assert journal_of(config).numbers("quarantine") == []


def test_a_machine_that_computes_wrongly_once_costs_only_new_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once = tmp_path / "once"
    straight, config = (make_config(tmp_path, run, "struck", once=str(once)) for run in ("straight", "run"))
    live(straight)
    train_and_kill(config)
    once.touch()
    with caplog.at_level(logging.WARNING, "holdfast"):
        live(config)
    assert not once.exists()
    assert "new ranks check it again" in caplog.text
    assert "fails now and then" in caplog.text
    assert content_id(config) == content_id(straight)
    assert journal_of(config).numbers("quarantine") == []

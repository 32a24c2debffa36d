"""A comparison of runs whose checkpoints at an epoch's end come after or before the loop's code at that end."""

import contextlib
from pathlib import Path

import pytest

from holdfast.attempt import live
from holdfast.config import Compute, Log, Retention, RunConfig
from holdfast.config.fields import ChunkLength
from holdfast.errors import HoldfastError
from holdfast.extensions.compare.ancestry import read_ancestry
from holdfast.extensions.compare.comparing import compare_trainings
from holdfast.extensions.compare.report import Comparison
from holdfast.journal import Journal
from holdfast.proof.audit import audit_commit
from holdfast.recipe.trust import Trust
from holdfast.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

EPOCH, LAST = 6, 18
# The numbers of epochs of the lives of each run.
RUNS = {"extended": (2, 3), "straight": (3,), "stopped": (3, 3)}
RECIPE = "tests.support.accepted:logs_at_the_end"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store for the runs of this file."""
    return tmp_path_factory.mktemp("ends")


@pytest.fixture
def store(trained: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with three runs: extended when it was complete, trained at once, and stopped in an epoch's last step."""
    if not (trained / "runs").exists():
        for run, lives in RUNS.items():
            for number, epochs in enumerate(lives):
                is_stopped = run == "stopped" and not number
                monkeypatch.setenv("STOP_IN", str(EPOCH - 1) if is_stopped else "-1")
                config = RunConfig(
                    recipe=RECIPE, run=run, store=str(trained / "runs"), epochs=epochs,
                    compute=Compute(device="cpu"), chunk=ChunkLength(steps=3), log=Log(folder=str(trained / "logs")),
                    retention=Retention(keep_last=99),
                )  # fmt: skip
                with pytest.raises(HoldfastError) if is_stopped else contextlib.nullcontext():
                    assert live(config).complete
    return str(trained / "runs")


def compare(store: str, one: str, other: str) -> Comparison:
    def read(text: str) -> tuple[Journal, str, str]:
        run, _, commit = text.partition("@")
        return Journal(open_store(store), run), text, commit

    return compare_trainings(read_ancestry(*read(one)), read_ancestry(*read(other)))


def test_a_run_that_was_extended_has_the_states_of_one_that_was_not(store: str) -> None:
    found = compare(store, "extended", "straight")
    assert (found.is_equal, found.equal_until, found.notes) == (True, LAST, [])


def test_a_stop_before_the_code_at_the_epochs_end_makes_no_difference(store: str) -> None:
    found = compare(store, "stopped", "straight")
    assert (found.is_equal, found.equal_until) == (True, LAST), str(found)
    (note,) = found.notes
    assert note.startswith(f"the states at step {EPOCH} weren't compared: the checkpoint of straight comes after")


@pytest.mark.parametrize("run", ["stopped", "straight"])
def test_commits_before_and_after_that_code_are_the_same_again(store: str, run: str) -> None:
    journal = Journal(open_store(store), run)
    for commit in [each for each in journal.candidates() if each.step in (EPOCH, EPOCH + 3)]:
        found = audit_commit(journal, commit, trust=Trust(recipe=RECIPE))
        assert found.is_identical, str(found)

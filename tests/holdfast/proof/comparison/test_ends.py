"""A comparison of a run that was complete, and then extended, with one that trained straight on."""

import shutil
from pathlib import Path

import pytest

from holdfast.attempt import live
from holdfast.config import Compute, Log, Retention, RunConfig
from holdfast.config.fields import ChunkLength
from holdfast.journal import Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.proof.comparison import Comparison, compare_trainings, read_ancestry
from holdfast.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

EPOCH, COMPLETE = 6, 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store for the runs of this file."""
    return tmp_path_factory.mktemp("ends")


@pytest.fixture
def store(trained: Path) -> str:
    """A store with a run that was complete after two epochs and then extended, and one that trained three at once."""
    folder = trained / "runs"
    if not folder.exists():
        for run, lives in {"extended": (2, 3), "straight": (3,)}.items():
            for epochs in lives:
                config = RunConfig(
                    recipe="tests.support.accepted:logs_at_the_end", run=run, store=str(folder), epochs=epochs,
                    compute=Compute(device="cpu"), chunk=ChunkLength(steps=3), log=Log(folder=str(trained / "logs")),
                    retention=Retention(keep_last=99),
                )  # fmt: skip
                assert live(config).complete
    return str(folder)


def compare(store: str, one: str, other: str) -> Comparison:
    def read(text: str) -> tuple[Journal, str, str]:
        run, _, commit = text.partition("@")
        return Journal(open_store(store), run), text, commit

    return compare_trainings(read_ancestry(*read(one)), read_ancestry(*read(other)))


@pytest.mark.parametrize("commit", ["", "@4"])
def test_the_code_at_the_epochs_end_makes_no_difference(store: str, commit: str) -> None:
    found = compare(store, f"extended{commit}", "straight")
    assert found.is_equal, str(found)
    assert found.equal_until == (COMPLETE - 3 if commit else COMPLETE + EPOCH)
    (note,) = found.notes
    assert note.startswith(
        f"the states at step {COMPLETE} weren't compared: extended{commit} was complete at this step"
    )


def test_a_pruned_end_makes_none_either(store: str, tmp_path: Path) -> None:
    copied = str(tmp_path / "runs")
    shutil.copytree(store, copied)
    prune_by_policy(Journal(open_store(copied), "extended"), Retention(keep_last=1), EPOCH)
    assert compare(copied, "extended", "straight").is_equal

"""An audit of the commit that completed a run: a loop over epochs, and a Trainer's loop, end with its step."""

from pathlib import Path

import pytest

from holdfast.attempt import live
from holdfast.config import Compute, Log, RunConfig
from holdfast.journal import Journal
from holdfast.proof.audit import audit_commit
from holdfast.recipe.trust import Trust
from holdfast.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]


def test_each_commit_that_ended_the_run_is_the_same_again(tmp_path: Path) -> None:
    """The run was complete after two epochs, and then was extended."""
    for epochs in (2, 3):
        config = RunConfig(
            recipe="tests.support.accepted:logs_at_the_end", run="r", store=str(tmp_path / "runs"), epochs=epochs,
            compute=Compute(device="cpu"), log=Log(folder=str(tmp_path / "logs")),
        )  # fmt: skip
        assert live(config).complete
    journal = Journal(open_store(config.store), "r")
    commits = sorted(journal.candidates(), key=lambda each: each.number)
    assert [each.epoch for each in commits if each.step % 6 == 0][-2:] == [2, 3]
    for commit in commits[-2:]:
        found = audit_commit(journal, commit, trust=Trust(config=config))
        assert found.is_identical, str(found)


@pytest.mark.extras
@pytest.mark.parametrize("program", ["lit:automatic", "hugging:train"])
def test_the_last_commit_of_a_trainer_is_the_same_again(program: str, tmp_path: Path) -> None:
    """The second form of this commit's attempt has died before it recorded that the run is complete."""
    settings = {"output_dir": str(tmp_path / "out")} if program == "hugging:train" else {}
    config = RunConfig(
        recipe=f"tests.support.{program}", run="r", store=str(tmp_path / "runs"), epochs=3, settings=settings,
        compute=Compute(device="cpu"), log=Log(folder=str(tmp_path / "logs")),
    )  # fmt: skip
    assert live(config).complete
    journal = Journal(open_store(config.store), "r")
    for _ in range(2):
        newest = journal.newest()
        assert newest is not None
        found = audit_commit(journal, newest, trust=Trust(config=config))
        assert found.is_identical, str(found)
        (tmp_path / "runs/r/endings/00000001.json").unlink(missing_ok=True)

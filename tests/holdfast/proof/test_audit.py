"""An audit of a loop over epochs: the code at the end of its last epoch belongs to the run's last step."""

from pathlib import Path

import pytest

from holdfast.attempt import live
from holdfast.config import Compute, Log, RunConfig
from holdfast.journal import Journal
from holdfast.proof.audit import audit_commit
from holdfast.recipe.permission import Trust
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
        found = audit_commit(journal, commit, trust=Trust(recipe=config.recipe))
        assert found.is_identical, str(found)

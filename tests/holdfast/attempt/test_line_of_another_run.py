"""Resume refuses the commits of another run."""

import shutil
from typing import Any

import pytest

from holdfast.attempt import Line
from holdfast.config import Retention
from holdfast.journal import Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.makers import STEPS_PER_EPOCH, assert_good, make_line, root, train


@pytest.fixture
def other(store: LocalStore) -> Line:
    """Another run with equal settings, and other data: four commits."""
    line = make_line(store, "other")
    for steps in (11, 9, 10, 10):
        train(line, steps)
    return line


def bring(line: Line, other: Line, *numbers: int) -> None:
    """Commits and checkpoints of the other run lie among those of this one."""
    for number in numbers:
        commit = other.journal.read_commit(number)
        name = f"commits/{number:08d}.json"
        shutil.copy(root(other) / name, root(line) / name)
        shutil.copytree(root(other) / commit.path, root(line) / commit.path, dirs_exist_ok=True)


@pytest.mark.parametrize("numbers", [(3,), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("latest", ["as it was", "lost"])
def test_resume_refuses_the_commits_of_another_run(
    line: Line, other: Line, store: LocalStore, numbers: tuple[int, ...], latest: str
) -> None:
    bring(line, other, *numbers)
    if latest == "lost":
        (root(line) / "latest.json").unlink()
    assert not verify_run(Journal(store, "run")).ok
    after = make_line(store)
    assert after.head
    assert after.head.number == numbers[0] - 1
    assert after.journal.numbers("quarantine") == [*numbers]
    assert "its record breaks the chain" in after.journal.quarantine_reasons()[0]
    assert train(after).number == numbers[-1] + 1
    assert_good(store)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_record_sha256": "f" * 64}, "commits/00000002.json isn't linked to commits/00000001.json"),
        ({"previous_checkpoint_sha256": "f" * 64}, "was trained from a different checkpoint than that of commit 1"),
        ({"parent": 2}, "says that its parent is commit 2, which is later"),
        ({"step": 21}, "epoch-0002: step was saved as 20 but committed as 21"),
        ({"epoch": 7}, "epoch-0002: epoch was saved as 2 but committed as 7"),
        ({"config_fingerprint": "f" * 64}, "epoch-0002: config_fingerprint was saved as"),
    ],
)
def test_resume_refuses_what_verify_calls_broken(
    line: Line, store: LocalStore, fields: dict[str, Any], said: str
) -> None:
    forged = line.journal.read_commit(2).model_copy(update=fields)
    line.journal.store.replace("commits/00000002.json", forged.to_bytes())
    assert any(said in problem for problem in verify_run(Journal(store, "run"), deep=True).problems)
    after = make_line(store)
    assert after.head
    assert (after.head.number, after.journal.numbers("quarantine")) == (1, [2])
    assert said in after.journal.quarantine_reasons()[0]


@pytest.mark.parametrize("change", ["lost", "damaged", "quarantined", "pruned"])
def test_resume_goes_on_over_what_verify_accepts(line: Line, store: LocalStore, change: str) -> None:
    train(line)
    path = root(line) / "commits/00000002.json"
    if change == "lost":
        path.unlink()
    elif change == "damaged":
        path.write_bytes(b"{")
    elif change == "quarantined":
        line.journal.quarantine(2, "by hand", 1)
    else:
        prune_by_policy(line.journal, Retention(keep_last=1), STEPS_PER_EPOCH)
    after = make_line(store)
    assert after.head
    assert (after.head.number, after.journal.numbers("quarantine")) == (3, [2] if change == "quarantined" else [])

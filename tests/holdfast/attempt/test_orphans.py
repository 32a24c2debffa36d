"""Dead ranks' checkpoints are adopted only if their state was trained from the run's newest one."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Recipe
from holdfast.checkpoint import Saved, find_orphans
from holdfast.checkpoint.progress import Sums, find_disagreement
from holdfast.journal import Commit
from holdfast.store.local import LocalStore
from holdfast.training import Training
from holdfast.training.recording import read_lines
from tests.support import trainings
from tests.support.makers import commit_of
from tests.support.trainings import save_step, train_to

pytestmark = pytest.mark.usefixtures("same_process")

STEPS_PER_EPOCH = 4


def fitted() -> Recipe:
    """A recipe whose data the settings don't name: DATA does."""
    generator = torch.Generator().manual_seed(int(os.environ.get("DATA", "1")))
    model = nn.Linear(4, 1)
    return Recipe(
        model=model, data=list(torch.randn(8, 4, generator=generator)), batch_size=2, steps_per_epoch=STEPS_PER_EPOCH,
        optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=lambda model, x: (model(x) - x.sum(1)).square().mean(),
    )  # fmt: skip


def make(folder: Path) -> Training:
    return trainings.make(folder, f"{__name__}:fitted")


def orphans(store: LocalStore, head: Commit | None) -> list[Saved]:
    return list(find_orphans(store, head, {"f" * 64}.__contains__, STEPS_PER_EPOCH))


@pytest.mark.parametrize("steps", [(3, 6), (3, 4), (4, 6), (6, 30)])
def test_an_orphan_of_another_checkpoint_is_not_adopted_though_it_names_the_newest_as_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, int]
) -> None:
    first, last = steps
    own, store = make(tmp_path), LocalStore(str(tmp_path / "run"))
    train_to(own, first)
    head = commit_of(save_step(own, store))
    monkeypatch.setenv("DATA", "2")
    other = make(tmp_path)
    train_to(other, first)
    read_lines(other)
    other.record.lines = []
    other.parent = head.checkpoint_sha256
    train_to(other, last)
    save_step(other, store)
    assert orphans(store, head) == []
    train_to(own, last)
    mine = save_step(own, store)
    assert [saved.path for saved in orphans(store, head)] == [mine.path]


def test_the_first_checkpoint_of_another_run_in_the_same_folder_is_adopted(tmp_path: Path) -> None:
    """Nothing was committed: whatever was trained from the beginning with these settings is this run's."""
    own, store = make(tmp_path), LocalStore(str(tmp_path / "run"))
    train_to(own, 6)
    saved = save_step(own, store)
    assert [each.path for each in orphans(store, None)] == [saved.path]


@pytest.mark.parametrize(
    ("before", "losses", "after", "is_same"),
    [
        (Sums(), [1.0, 2.0], Sums(2, (), 3.0, 2), True),
        (Sums(), [1.0, 2.0, 3.0, 4.0, 0.5], Sums(5, (2.5,), 0.5, 1), True),
        (Sums(3, (), 0.3, 3), [0.1], Sums(4, ((0.3 + 0.1) / 4,), 0.0, 0), True),
        (Sums(), [1.0, 2.0], Sums(2, (), 3.5, 2), False),
        (Sums(4, (9.0,)), [1.0], Sums(5, (8.0,), 1.0, 1), False),
        (Sums(), ["nan", 2.0], Sums(2, (), 0.0, 2), True),  # what can't be told speaks against nothing
        (None, [1.0], Sums(), True),
        (Sums(), [1.0], None, True),
    ],
)
def test_losses_follow_from_the_parents(before: Any, losses: Any, after: Any, is_same: bool) -> None:
    assert (find_disagreement(before, losses, after, STEPS_PER_EPOCH) == "") is is_same

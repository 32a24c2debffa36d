"""A loader that goes on after another program's steps gives the batches of one that was read so far."""

from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader, TensorDataset

from holdfast.data.loaders import LoaderBatches
from holdfast.data.sharing import Share
from tests.support.workers import OneRank

SAMPLES, BATCH = 14, 2
LENGTH = SAMPLES // BATCH


def make(kind: str) -> LoaderBatches:
    data = TensorDataset(torch.arange(SAMPLES))
    options: dict[str, Any] = {"shuffle": kind == "shuffled"}
    if kind == "seeded":
        options = {"sampler": SeedableRandomSampler(data, data_seed=5)}
    loader = DataLoader(data, BATCH, **options)
    return LoaderBatches(loader, [Share(BATCH)], 7, 0, OneRank())


@pytest.mark.parametrize("kind", ["in order", "seeded"])
@pytest.mark.parametrize("per_epoch", [LENGTH, 4, 5], ids=["a batch a step", "two a step", "epochs that are no pass"])
@pytest.mark.parametrize("step", [1, 4, 6, 8, 13])
def test_it_goes_on_with_the_batches_that_follow(kind: str, per_epoch: int, step: int, same_process: None) -> None:
    read, moved = make(kind), make(kind)
    epochs, steps = divmod(step, per_epoch)
    done = {LENGTH: step, 4: epochs * LENGTH + 2 * steps, 5: step}[per_epoch]
    for _ in range(done):
        next(read)
    assert moved.move_to(step, per_epoch) == ""
    positions = [each.state_dict()["number"] for each in (read, moved)]
    assert positions == [done, done]
    for _ in range(LENGTH + 3):
        (name, batch), (other, found) = next(read), next(moved)
        assert (name, batch[0].tolist()) == (other, found[0].tolist())


def test_an_order_from_the_global_generator_is_unknown_inside_a_pass(same_process: None) -> None:
    assert make("shuffled").move_to(2 * LENGTH, LENGTH) == ""
    lost = make("shuffled").move_to(2 * LENGTH + 1, LENGTH)
    assert lost == "the order of the samples in pass 3, which step 15 belongs to, is drawn again"

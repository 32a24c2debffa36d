"""Checks that several ranks make together of the exchange of whole gradients during a backward pass.

Each check is a function that returns 0, for `in_ranks`.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from holdfast import Recipe
from holdfast.errors import RecipeError
from holdfast.extensions.virtual_ranks.buckets import BucketSum
from holdfast.training import Training
from tests.holdfast.extensions.virtual_ranks.cut import make_config
from tests.support import shares
from tests.support.sharded import launch_checks
from tests.support.trainings import train_to

LAYERS = 6


def in_ranks(count: int, function: str, *arguments: Any) -> int:
    """Call a function of this module in several ranks; return 0 if it has returned 0 in all of them."""
    return launch_checks(globals()[function], count, *arguments)


class Layers(nn.Module):
    """Layers of which each fills a bucket, and an idle one that comes last.

    Args:
        again: says whether the first layer is used twice, in two checkpointed parts that each run a backward pass.
    """

    def __init__(self, again: Any = bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(LAYERS))
        self.idle = nn.Linear(16, 16, bias=False)
        self.again = again
        self.is_lopsided = False  # whether all ranks but the main one use the idle layer, which is their first in order

    def forward(self, points: Tensor) -> Tensor:
        """Return a number for each point; shape (n, 1)."""
        found = nn.functional.pad(points, (0, 8)).requires_grad_()
        for layer in self.layers:
            found = layer(found).tanh()
        if self.is_lopsided and distributed.get_rank():
            found = self.idle(found)
        if self.again():
            for _ in range(2):
                found = checkpoint(self.layers[0], found, use_reentrant=True)  # type: ignore[no-untyped-call]
        return found.mean(1, keepdim=True)


def layered(again: Any = bool) -> Recipe:
    """Build a recipe of `Layers`."""
    recipe = shares.plain()
    recipe.model = Layers(again)
    recipe.optimizer = torch.optim.SGD(recipe.model.parameters(), lr=0.1)
    return recipe


def twice() -> Recipe:
    """Build a recipe whose first layer has its gradient in several parts."""
    return layered(lambda: True)


def make_training(folder: str, recipe: str) -> Training:
    """Return the training of a recipe of this module with eight virtual ranks."""
    return Training(make_config(folder, recipe=f"{__name__}:{recipe}", parallel="ddp"))


def watch_exchange(training: Training) -> list[str]:
    """Return a list to which is added when an exchange begins, and when the first layer's weight has its gradient."""
    events: list[str] = []

    def noting(function: Any) -> Any:
        def note(found: BucketSum) -> None:
            events.append("exchange")
            function(found)

        return note

    for name in ("send", "pass_on"):
        setattr(BucketSum, name, noting(getattr(BucketSum, name)))
    weight = training.model.get_parameter("layers.0.weight")
    weight.register_post_accumulate_grad_hook(lambda _: events.append("first layer"))  # type: ignore[no-untyped-call]
    return events


def exchange_early(folder: str) -> int:
    """Train steps: from the second on, most of the exchange begins before the backward pass comes to its end."""
    training = make_training(folder, "layered")
    events = watch_exchange(training)
    for step in (1, 2, 3):
        events.clear()
        train_to(training, step)
        last = len(events) - 1 - events[::-1].index("first layer")
        early, late = events[:last].count("exchange"), events[last:].count("exchange")
        buckets = LAYERS + 1
        assert early + late == 2 * buckets, "each bucket is sent and passed on"
        assert early == (0 if step == 1 else 2 * LAYERS - 3), (
            "all layers but the first, of which one is passed on later"
        )
    training.record.is_detailed = True
    events.clear()
    train_to(training, 4)
    assert "first layer" in events
    assert "exchange" not in events[: len(events) - events[::-1].index("first layer")], "its facts come first"
    return 0


def agree_on_order(folder: str) -> int:
    """Train ranks whose gradients are complete in other orders: they exchange the same buckets, to the same sums."""
    found = []
    for is_early in (True, False):
        training = make_training(folder, "layered")
        model: Any = training.recipe.model
        model.is_lopsided = True
        ranks: Any = training.ranks
        if not is_early:
            ranks.sums.overlapped = contextlib.nullcontext
        train_to(training, 3)
        found.append([each.detach().clone() for each in model.parameters()])
    assert all(map(torch.equal, *found))
    return 0


def exchange_late(folder: str) -> int:
    """Train a model whose gradients come in several parts: nothing is exchanged before they are complete."""
    training = make_training(folder, "twice")
    events = watch_exchange(training)
    train_to(training, 3)
    ranks: Any = training.ranks
    assert events == 3 * (3 * len(ranks.turns) * ["first layer"] + 2 * (LAYERS + 1) * ["exchange"])
    return 0


def refuse_parts(folder: str) -> int:
    """Train a model whose gradient comes in several parts in a later step: it is refused, by name."""
    training = make_training(folder, "layered")
    train_to(training, 2)
    model: Any = training.recipe.model
    model.again = lambda: True
    with pytest.raises(RecipeError, match=r"computes the gradient of layers.0.weight in several parts") as found:
        train_to(training, 3)
    assert found.value.hint == "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
    return 0

"""Faults in one of several ranks, each between the gate and the first resumed step; rows of `tests.support.mutants`."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

RANK = 1


def in_one_rank(change: Callable[[Any], object]) -> Callable[[Any, Any], None]:
    """Return a change for `mutants.after_the_gate` that the second rank alone makes."""

    def apply(training: Any, model: Any) -> None:
        if training.accelerator.process_index == RANK:
            change(training)

    return apply


def draw(training: Any) -> None:
    with training.generators.training():
        random.random()


def take_the_first_share(training: Any) -> None:
    shares = training.batches._shares
    shares[0] = dataclasses.replace(shares[0], rank=0)


def keep_the_generators(training: Any) -> None:
    """Let the shares draw from the generators as they are; the step still ends with its own."""
    right = training.ranks._reseed
    training.ranks._reseed = lambda name: right(name) if name == "end" else None


def grow_a_buffer(training: Any) -> None:
    next(training.model.buffers()).add_(1.0)


def sum_in_a_row(training: Any) -> None:
    """Add the gradients of this rank's shares one after the other, not as the tree does."""
    from holdfast.extensions.virtual_ranks import buckets
    from holdfast.extensions.virtual_ranks.tree import Node

    size = len(training.ranks.own)

    class Row(buckets.TreeSum):
        def add(self, node: Node, value: Any) -> None:
            if node.level:
                return super().add(node, value)
            self.left = [*getattr(self, "left", []), value]
            if len(self.left) == size:
                total = self.left[0]
                for each in self.left[1:]:
                    total = total + each
                super().add(Node((size - 1).bit_length(), node.index // size), total)
            return None

    buckets.TreeSum = Row  # type: ignore[misc]

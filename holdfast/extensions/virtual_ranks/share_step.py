"""A step of virtual ranks: the shares of the batch that a rank trains in turn."""

from collections.abc import Iterator
from typing import Any

from holdfast.errors import RecipeError
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Place
from holdfast.training.build import Training
from holdfast.training.checksums import describe_components
from holdfast.training.kept import OWN_EXTRAS


def take_shares(training: Training, virtual: Any, names: list[str]) -> Iterator[Any]:
    """Yield the micro-batches of a step's shares that this rank trains. The caller calls ``backward`` on each loss.

    After the last micro-batch the parameters have the mean gradient of all shares. All ranks call it together.

    Args:
        virtual: the `VirtualRanks`.
        names: a list to which this call adds the names of the micro-batches.

    Raises:
        RecipeError: a share has changed extras or parameters, which have to stay the same for all shares. Only a
            process's first step is checked.
    """
    extras = _sum_extras(training) if virtual.is_first_step else None
    with virtual.step(training.model, training.progress.step + 1, in_detail=training.record.has_parts):
        for turn in virtual.turns:
            with virtual.share(turn):
                for number in range(training.recipe.grad_accum):
                    name, batch = training.next_batch()
                    if turn.counts:
                        names.append(name)
                    virtual.micro_batch(turn, is_last=number == training.recipe.grad_accum - 1)
                    yield batch
        heartbeats.mark(Place.SYNCING)
    heartbeats.mark(Place.COMPUTING)
    if extras is None:
        return
    if virtual.has_changed_parameters:
        raise RecipeError(
            "the parameters were changed by code that trains only a share of a batch",
            hint=training.program.advice.shares,
        )
    if _sum_extras(training) != extras:
        raise RecipeError(
            "the extras were changed by code that trains only a share of a batch", hint=training.program.advice.shares
        )


def _sum_extras(training: Training) -> dict[str, Any]:
    own = {f"extras.{name}" for name in OWN_EXTRAS}
    found = describe_components(training, in_detail=False).items()
    return {name: each for name, each in found if name.startswith("extras.") and name not in own}

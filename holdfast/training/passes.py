"""The shares of a step's batch that a rank trains in turn, in the engine's loop or in a user's own loop."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.errors import RecipeError
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Place
from holdfast.training.build import Training
from holdfast.training.checksums import describe_components
from holdfast.training.kept import OWN_EXTRAS
from holdfast.training.left_gradients import Gradients

if TYPE_CHECKING:
    from holdfast.training.virtual_ranks.step import VirtualRanks

# The hint for a loop that doesn't train the shares of its batches.
BY_SHARES = "take batches by `for batch in step.shares():`, or set compute.virtual_ranks = 0"


def take_shares(training: Training, virtual: "VirtualRanks", names: list[str]) -> Iterator[Any]:
    """Yield the micro-batches of a step's shares that this rank trains. The caller calls ``backward`` on each loss.

    After the last micro-batch the parameters have the mean gradient of all shares. All ranks call it together.

    Args:
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
        raise RecipeError("a share of a batch has changed the parameters", hint=training.program.advice.shares)
    if _sum_extras(training) != extras:
        raise RecipeError("a share of a batch has changed the extras", hint=training.program.advice.shares)


def _sum_extras(training: Training) -> dict[str, Any]:
    own = {f"extras.{name}" for name in OWN_EXTRAS}
    found = describe_components(training, in_detail=False).items()
    return {name: each for name, each in found if name.startswith("extras.") and name not in own}


class Taking:
    """The shares that a user's own loop takes in each step.

    Attributes:
        log: the function that logs a number of the present batch, by name; None outside of a loop over shares.
    """

    def __init__(self, training: Training, gradients: Gradients) -> None:
        self._training, self._gradients = training, gradients
        self._has_begun = False
        self.log: Callable[[str, Tensor], None] | None = None

    @property
    def _setting(self) -> str:
        return f"compute.virtual_ranks = {self._training.config.compute.virtual_ranks}"

    def take(self, names: list[str], numbers: dict[str, Tensor], next_batch: Callable[[], Any]) -> Iterator[Any]:
        """Yield the batches of a step; see `Step.shares`.

        Args:
            names: see `take_shares`.
            numbers: a dict to which this call adds the numbers that the shares have logged.
            next_batch: returns this rank's next batch; used without virtual ranks.

        Raises:
            RecipeError: the step's shares were taken already, or there is a gradient that no optimizer has used.
        """
        training = self._training
        if self._has_begun:
            raise RecipeError(
                f"step.shares() was called twice in step {training.progress.step + 1}",
                hint="compute all losses of a batch in one loop over step.shares()",
            )
        self._has_begun = True
        self._gradients.clear()
        if training.virtual is not None:
            self.log = training.virtual.log
            yield from take_shares(training, training.virtual, names)
            numbers |= training.virtual.numbers
        else:
            logged: dict[str, list[Tensor]] = {}
            self.log = lambda name, number: logged.setdefault(name, []).append(number)
            for _ in range(training.recipe.grad_accum):
                yield next_batch()
            numbers |= {name: torch.stack(found).mean() for name, found in logged.items()}
        self.log = None

    def refuse_whole_batch(self) -> None:
        """Raise RecipeError with virtual ranks: a loop then has to take its batches from `take`, and not one by one."""
        if self._training.virtual is not None:
            raise RecipeError(
                f"{self._setting}: a whole batch was taken, but virtual ranks train a batch in shares", hint=BY_SHARES
            )

    def end_step(self) -> None:
        """Raise RecipeError if, with virtual ranks, the loop hasn't trained all of this rank's shares of the step."""
        if self._training.virtual is not None and (not self._has_begun or self.log is not None):
            step = self._training.progress.step + 1
            raise RecipeError(f"{self._setting}: step {step} has not trained all shares of its batch", hint=BY_SHARES)
        self._has_begun, self.log = False, None

"""The shares of a step's batch that a rank trains in turn in a user's own loop."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import RecipeError
from holdfast.training.build import Training
from holdfast.training.left_gradients import Gradients


class Taking:
    """The shares that a user's own loop takes in each step.

    Attributes:
        log: the function that logs a number of the present batch, by name; None outside of a loop over shares.
    """

    def __init__(self, training: Training, gradients: Gradients) -> None:
        self._training, self._gradients = training, gradients
        self._has_begun = False
        self.log: Callable[[str, Tensor], None] | None = None

    def take(self, names: list[str], numbers: dict[str, Tensor], next_batch: Callable[[], Any]) -> Iterator[Any]:
        """Yield the batches of a step; see `Step.shares`.

        Args:
            names: see `Cooperation.take`.
            numbers: a dict to which this call adds the numbers that the shares have logged.
            next_batch: returns this rank's next batch; used if each rank trains one share.

        Raises:
            RecipeError: the step's shares were taken already, or there is a gradient that no optimizer has used.
        """
        training, ranks = self._training, self._training.ranks
        if self._has_begun:
            raise RecipeError(
                f"step.shares() was called twice in step {training.progress.step + 1}",
                hint="compute all losses of a batch in one loop over step.shares()",
            )
        self._has_begun = True
        self._gradients.clear()
        if ranks.sums_gradients:
            self.log = ranks.log
            yield from ranks.take(training, names)
            numbers |= ranks.numbers
        else:
            logged: dict[str, list[Tensor]] = {}
            self.log = lambda name, number: logged.setdefault(name, []).append(number)
            for _ in range(training.recipe.grad_accum):
                yield next_batch()
            numbers |= {name: torch.stack(found).mean() for name, found in logged.items()}
        self.log = None

    def refuse_whole_batch(self) -> None:
        """Raise RecipeError if a loop has to take its batches from `take`, and not one by one."""
        self._training.ranks.refuse_whole_batch()

    def end_step(self) -> None:
        """Raise RecipeError if the loop had to train all of this rank's shares of the step, and has not."""
        if not self._has_begun or self.log is not None:
            self._training.ranks.refuse_missing_shares(self._training.progress.step + 1)
        self._has_begun, self.log = False, None

"""Skipped steps: steps whose batches are drawn, but not trained.

A skipped step has a number, a line in the trail, and a place in epoch, chunk and data, as every step has. Of the state
it changes only the step's number, the position in the data, and the generators from which the data draws. There is no
forward pass, and no optimizer or scheduler steps. Anneals continue, because they depend only on the step's number.
"""

from holdfast.config.steps import Steps
from holdfast.data import NoBatches
from holdfast.errors import RecipeError
from holdfast.training.build import Training
from holdfast.training.step_record import Unread

UNDO = "to train these steps, use holdfast skip RUN --off STEPS or change the setting skip"


def set_skipped(training: Training, skip: str) -> None:
    """Set the steps to skip.

    Args:
        skip: the steps, as in the setting ``skip``.

    Raises:
        RecipeError: the program's steps can't be skipped.
    """
    training.program.skipped = Steps.parse(skip)
    named = f"{training.program.skipped.named} can't be skipped"
    if training.program.skipped and training.program.framework:
        raise RecipeError(
            f"{named}: {training.program.framework} counts its steps and batches itself",
            hint=UNDO,
        )
    if training.program.skipped and isinstance(training.batches, NoBatches):
        raise RecipeError(
            f"{named}: the loop makes its own batches, so Holdfast can't leave one out",
            hint=f"pass the data: for step in run.steps(loader); {UNDO}",
        )


def pass_over(training: Training) -> None:
    """Draw the batches of the next step, and set `StepRecord.trained`. All ranks call it together."""
    names: list[str] = []
    counts = training.ranks.counts
    with training.generators.training():
        for is_own in counts:
            for _ in range(training.recipe.grad_accum):
                name, _ = training.next_batch(is_moved=False)
                names += [name] if is_own else []
    step = training.progress.step + 1
    training.record.trained = Unread(step, {}, training.lrs, training.anneals, names, is_skipped=True)

"""A further step in front of a loop's code at an epoch's end, if a checkpoint was saved before that code.

The code may read variables of the inner loop, such as the last loss, which a new process doesn't have. So the loop
trains one batch more, and then the checkpoint's state is restored again. The code finds its variables with the values
that this one batch gives.
"""

from collections.abc import Callable, Generator

from torch import nn

from holdfast.data import NoBatches
from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Phase
from holdfast.training.build import Training


def repeat_last_step(training: Training, restore: Callable[[], object]) -> Generator[None, None, None]:
    """Yield once for the loop to train a step that has no effect, if the loop's code at an epoch's end is to be run.

    Args:
        restore: restores the state of the checkpoint that was restored last, with its position in the data.
    """
    if not _is_before_end(training) or not _can_restore(training):
        return
    training.progress.step -= 1
    training.record.ends.is_repeating = True
    heartbeats.begin(Phase.STEP, training.progress.step + 1)
    training.set_anneals()
    with training.generators.training():
        yield
    training.record.ends.is_repeating = False
    heartbeats.begin(Phase.RESTORING)
    restore()


def _is_before_end(training: Training) -> bool:
    step = training.progress.step
    is_at_end = 0 < step < training.total_steps and step % training.steps_per_epoch == 0
    return training.record.ends.has_code and is_at_end and not training.progress.has_ended_epoch


def _can_restore(training: Training) -> bool:
    """Return whether a second restore in one process is exact.

    It isn't for a kept loader whose iterator a step has begun, and it takes long for a stream that is read again.
    """
    loaders = [
        each
        for each in training.recipe.extras.values()
        if hasattr(each, "__iter__") and hasattr(each, "load_state_dict") and not isinstance(each, nn.Module)
    ]
    has_position = isinstance(training.batches, NoBatches) or training.order is not None or training.batches.has_state
    return not loaders and has_position

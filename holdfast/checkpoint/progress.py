"""The sums of losses in a state, which prove that a checkpoint was trained from its parent.

A state's sums must equal its parent's sums plus the losses of the steps in between, which the trail records. A
different checkpoint of the same step has different sums. ``metadata.json`` alone proves nothing, because anyone could
rewrite it.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from holdfast.checkpoint.format import HEADER_METADATA, MAX_HEADER_BYTES, METADATA_KEY, PAYLOAD
from holdfast.errors import NameMissing
from holdfast.journal import FileRecord
from holdfast.provenance.canonical import read_exactly
from holdfast.store import Store

# A state and its metadata have an entry for each of the last EPOCHS_KEPT epochs only, because a run may have many
# thousand epochs.
EPOCHS_KEPT = 1000
# A key in a state's progress. It exists only if the loop's code at the end of the last epoch ran before the save. It
# doesn't exist if the ranks had to stop at once, and earlier versions set it only at a run's last step.
ENDED_EPOCH = "has_ended_epoch"


@dataclass(frozen=True)
class Sums:
    """The sums of losses in a state.

    Attributes:
        epochs: the mean loss of each of the last EPOCHS_KEPT completed epochs.
        loss_sum: the sum of the losses of the epoch in progress.
        steps: the number of completed steps in the epoch in progress.
    """

    step: int = 0
    epochs: tuple[float, ...] = ()
    loss_sum: float = 0.0
    steps: int = 0

    def add(self, losses: Sequence[float], steps_per_epoch: int) -> Self:
        """Return the sums after further steps, added in the order in which training adds them."""
        step, epochs, loss_sum, steps = self.step, [*self.epochs], self.loss_sum, self.steps
        for loss in losses:
            step, loss_sum, steps = step + 1, loss_sum + loss, steps + 1
            if step % steps_per_epoch == 0:
                epochs.append(loss_sum / steps)
                loss_sum, steps = 0.0, 0
        return type(self)(step, tuple(epochs[-EPOCHS_KEPT:]), loss_sum, steps)


def read_sums(folder: Store, path: str, parts: Sequence[FileRecord]) -> Sums | None:
    """Read the sums from the header of a checkpoint's first part; return None if they can't be read."""
    name = f"{path}/{parts[0].name if parts else PAYLOAD}"
    try:
        (header_bytes,) = struct.unpack("<Q", folder.read(name, 0, 8))
        header = json.loads(folder.read(name, 8, 8 + min(header_bytes, MAX_HEADER_BYTES)))
        progress = json.loads(header[HEADER_METADATA][METADATA_KEY])["progress"]
        return Sums(
            int(progress["step"]),
            tuple(read_exactly(entry["avg_loss"]) for entry in progress["history"]),
            read_exactly(progress["epoch_loss_sum"]),
            int(progress["epoch_loss_steps"]),
        )
    except (NameMissing, struct.error, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_disagreement(before: Sums | None, losses: Sequence[Any], after: Sums | None, steps_per_epoch: int) -> str:
    """Return why a state can't have been trained from its parent; empty if the sums agree with the losses.

    Args:
        before, after: the sums of the parent and of the state; None if they can't be read. If either is None, the
            result is empty.
        losses: the losses of the steps between parent and state, from the trail.
    """
    numbers = [loss for loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]
    if before is None or after is None or len(numbers) != len(losses):
        return ""
    if before.add(numbers, steps_per_epoch) == after:
        return ""
    return "the losses in its state aren't its parent's losses plus the losses in its trail"

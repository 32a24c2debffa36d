"""The learning rates of each epoch's first step, which a checkpoint's metadata carries across resumes.

They are not part of the payload, so that a content id doesn't depend on them.
"""

import contextlib
import json
from typing import Any

from holdfast.checkpoint import Metadata
from holdfast.errors import NameMissing
from holdfast.store import Store


def read_first_lrs(metadata: Metadata, folder: Store) -> list[list[float]]:
    """Return the rates (one per parameter group) of the first step of each epoch that had begun at the checkpoint.

    An earlier version recorded the rates of each epoch's last step. For its checkpoints, read the trail in
    ``metrics/``; if an epoch's trail is lost, return the recorded rates for that epoch.

    Args:
        folder: the run's folder.
    """
    in_progress = metadata.epoch_first_lrs
    if in_progress is not None:
        return [*metadata.learning_rate_history, *([in_progress] if in_progress else [])]
    trail = _read_first_steps(folder, metadata.steps_per_epoch)
    recorded = [*metadata.learning_rate_history, *([] if metadata.is_at_epoch_end else [metadata.current_lrs])]
    return [trail.get(epoch, rates) for epoch, rates in enumerate(recorded)]


def _read_first_steps(folder: Store, steps_per_epoch: int) -> dict[int, list[float]]:
    """Return the rates of each epoch's first step, by epoch from 0. Of several lines the newest commit's counts."""
    found: dict[int, list[float]] = {}
    for name in folder.list("metrics"):
        with contextlib.suppress(NameMissing, ValueError, KeyError, TypeError):
            for text in folder.read(f"metrics/{name}").splitlines():
                line: dict[str, Any] = json.loads(text)
                epoch, within = divmod(line["step"] - 1, steps_per_epoch)
                if within == 0:
                    found[epoch] = [float(rate) for rate in line["lrs"]]
    return found

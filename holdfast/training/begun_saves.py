"""The last saves that all ranks have begun, each with the lines of the trail since the save before.

If the main rank is lost, another rank saves instead. That rank doesn't know which of the last saves are durable, so it
looks for their checkpoints on the store. The newest checkpoint found becomes the parent of the rank's own checkpoint.
"""

import contextlib
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.checkpoint import is_folder_name, read_metadata, step_of
from holdfast.errors import RecordDamaged
from holdfast.store import Store

# The main rank begins a save only when the save before is durable. Another rank may have begun one save more than the
# main rank. So that rank's last two saves may not be durable, and only its third-last save surely is.
KEPT = 3


@dataclass(frozen=True)
class BegunSave:
    """A save that was begun, or the checkpoint that was restored.

    Attributes:
        content_id: the checkpoint's content id; empty for the state before the run's first step; None if this rank
            doesn't know the content id.
        lines: the lines of the trail since the save before, one for each step.
        shown: the texts and pictures of these steps, as in ``shown.jsonl``.
        train_s: the seconds that these steps took.
    """

    step: int
    content_id: str | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    shown: bytes = b""
    train_s: float = 0.0


class BegunSaves:
    """The last saves, at most `KEPT`. All ranks begin a save together; only the main rank writes files."""

    def __init__(self) -> None:
        self._saves = [BegunSave(0, "")]

    def restart(self, step: int, content_id: str) -> None:
        """Forget all saves, and record a restored checkpoint as the newest durable save."""
        self._saves = [BegunSave(step, content_id)]

    def add(self, save: BegunSave) -> None:
        """Add a save, and drop the oldest one if more than `KEPT` are held."""
        self._saves = [*self._saves[1 - KEPT :], save]

    def find_durable(self, folder: Store, steps_per_epoch: int, fingerprint: str) -> BegunSave | None:
        """Return the newest durable save; None if no save is durable.

        The returned save has the lines, texts and seconds of all later saves instead of its own. The later saves aren't
        durable, so the next save has to record their steps.

        Args:
            folder: the run's folder on the store.
            fingerprint: the fingerprint of the settings under which the saves were begun.
        """
        lost = BegunSave(0)
        for save in reversed(self._saves):
            content_id = save.content_id
            if content_id is None:
                content_id = _find_content_id(folder, save.step, steps_per_epoch, fingerprint)
            if content_id is not None:
                return replace(lost, step=save.step, content_id=content_id)
            lost = BegunSave(0, None, save.lines + lost.lines, save.shown + lost.shown, save.train_s + lost.train_s)
        return None


def _find_content_id(folder: Store, step: int, steps_per_epoch: int, fingerprint: str) -> str | None:
    """Return the content id of the newest complete checkpoint of a step; None if there is none."""
    found = []
    for path in folder.list():
        if is_folder_name(path) and step_of(path, steps_per_epoch) == step:
            with contextlib.suppress(RecordDamaged):
                metadata = read_metadata(folder, path)
                if metadata is not None and metadata.config_fingerprint == fingerprint:
                    found.append((metadata.created_at, metadata.checkpoint_sha256))
    return max(found)[1] if found else None

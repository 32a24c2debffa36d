"""The checkpoint from which a rehearsal inside a chunk starts. It is stored apart from the run's own checkpoints.

No commit names it, no attempt adopts it, and it is deleted when the rehearsal has ended. After a kill, the next attempt
deletes it.
"""

import contextlib

from holdfast.attempt.ranks import Uncommitted
from holdfast.attempt.refusing import FOR_REHEARSAL
from holdfast.checkpoint import Saved
from holdfast.errors import StoreError
from holdfast.journal import Commit, now
from holdfast.store import Store

FOLDER = "rehearsing"


class Aside:
    """The checkpoint for one attempt's rehearsals.

    Attributes:
        saved: the checkpoint; None if it isn't durable yet, or if the ranks have saved nothing.
        is_known: whether the ranks have reported the save's result.
    """

    def __init__(self, store: Store, attempt: int) -> None:
        """
        Args:
            store: the run's folder.
        """
        self._store, self._attempt = store, attempt
        self._count = 0
        self.saved: Saved | None = None
        self.is_known = False

    @property
    def folder(self) -> str:
        """Return the name of the checkpoint's folder in the run's folder."""
        return f"{FOLDER}/{self._attempt:08d}-{self._count}"

    def begin(self) -> str:
        """Expect a new checkpoint. Return the name of its folder, which no earlier checkpoint had."""
        self._count += 1
        self.saved, self.is_known = None, False
        return self.folder

    def note(self, saved: Saved | None) -> None:
        """Note the save's result."""
        self.saved, self.is_known = saved, True

    def describe(self, head: Commit) -> Uncommitted:
        """Return the checkpoint for ranks that restore it.

        Args:
            head: the commit that the checkpoint's first steps continue.
        """
        assert self.saved is not None
        saved, metadata = self.saved, self.saved.metadata
        commit = Commit(
            number=head.number + 1, parent=head.number, attempt=self._attempt, step=saved.step,
            epoch=metadata.epoch, path=saved.path, files=saved.files, metrics={},
            checkpoint_sha256=metadata.checkpoint_sha256, previous_record_sha256="",
            previous_checkpoint_sha256=metadata.previous_checkpoint_sha256,
            config_fingerprint=metadata.config_fingerprint, why=FOR_REHEARSAL, created_at=now(),
        )  # fmt: skip
        return Uncommitted(commit, self.folder, lambda commit: metadata)

    def clear(self) -> None:
        """Delete this attempt's checkpoint, if it has saved any. If the deletion fails, the next `sweep` deletes it."""
        self.saved = None
        if self._count:
            self.sweep()

    def sweep(self) -> None:
        """Delete this attempt's checkpoint, and those that dead attempts have left."""
        with contextlib.suppress(StoreError):
            self._store.delete_folder(FOLDER)

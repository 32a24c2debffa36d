"""Saving checkpoints in the background while training continues.

A save first copies the state; then training may continue. Threads hash and write the copy: one thread hashes a part
while another writes it, and several parts are in progress at once. So a save takes as long as hashing or writing,
whichever is slower, and nothing is read back to be hashed.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint_save import CheckpointSave, count_cores
from holdfast.checkpoint.metadata import Saved
from holdfast.checkpoint.parts import Written
from holdfast.checkpoint.payload import Payload
from holdfast.config import PART_BYTES, RunConfig
from holdfast.errors import StoreError
from holdfast.memory import Buffers, Pin, Priority
from holdfast.store import Store, open_store

if TYPE_CHECKING:
    from holdfast.checkpoint.near import Near

# The number of threads that copy the state. More threads copy no faster, because memory bandwidth is the limit.
COPIERS = 4


class Saver:
    """A saver of checkpoints: one save at a time, in background threads.

    If a part has not changed in the last two checkpoints (a frozen layer, for example), the store copies or links it
    from the last checkpoint, as far as ``shared_by`` allows. Still each checkpoint is complete by itself.

    Args:
        part_bytes: see `cut`.
        shared_by: the largest number of consecutive checkpoints that share one file. A disk holds such a file once, so
            damage to it damages all of them.
        pin: pins the memory of parts that are copied from a device; see `Buffers.pin`. None if no memory is pinned.
        near: the near folder, to which each checkpoint is written before it is written to the store; None for no near
            folder.
    """

    def __init__(
        self,
        part_bytes: int = PART_BYTES,
        shared_by: int = 1,
        pin: Pin | None = None,
        near: "Near | None" = None,
    ) -> None:
        self.part_bytes = part_bytes
        self.shared_by = shared_by
        self.pin = pin
        self.near = near
        self.buffers = Buffers()
        # The threads stay alive between saves, because training would wait 0.2 ms for their start.
        self._copiers = ThreadPoolExecutor(min(count_cores(), COPIERS), "copy")
        # the parts of the last checkpoint in each folder, by the folder's URL and the part's name
        self._last: dict[str, dict[str, Written]] = {}
        self._under_way: Future[Saved | None] | None = None
        self._priority = Priority()

    def begin(self, save: CheckpointSave) -> None:
        """Copy a state and start to save it; first wait for a save in progress. The state may change after the call.

        Raises:
            StoreError: the save in progress failed.
        """
        self.wait()
        began = time.monotonic()
        # Training waits for this copy. So the save's threads, which could hold the GIL, start only after the copy.
        save.copy(self.part_bytes, self.buffers, self._copiers)
        # All save threads share one priority. If only the hashing threads were low, a writer could wait for the GIL
        # behind one of them and stall training: 0.3 s instead of 0.04 s on busy cores.
        self._priority = Priority()
        prepare = None if save.is_urgent else self._priority.lower
        thread = ThreadPoolExecutor(1, "save", prepare)
        self._under_way = thread.submit(self._finish, save, began, prepare)
        thread.shutdown(wait=False)

    def _finish(self, save: CheckpointSave, began: float, prepare: Callable[[], object] | None) -> Saved | None:
        """Hash and write the copied state, and pass the checkpoint on. Return None if a failure is only noted."""
        try:
            last = self._last.get(save.folder.url, {})
            saved, self._last[save.folder.url] = save.write(self.near, last, self.shared_by, prepare)
            problem = self.near.take_problem() if self.near else ""
            saved = saved.model_copy(update={"save_s": time.monotonic() - began, "near_problem": problem})
            save.then(saved)
            return saved
        except StoreError as error:
            if save.note_failure is None:
                raise
            save.note_failure(error)
            return None
        finally:
            # Pin for the next save. An urgent save is the last one, and the process waits for its end.
            if self.pin is not None and not save.is_urgent:
                self.buffers.pin(save.on_devices, self.pin)

    @property
    def is_busy(self) -> bool:
        """Return whether a save is in progress."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> Saved | None:
        """Wait for the last save and return its checkpoint, complete and durable; None if no save was started.

        Raises:
            StoreError: the checkpoint couldn't be written.
        """
        if self._under_way is None:
            return None
        if self.is_busy:
            self._priority.restore()  # the caller waits, so training doesn't need the cores now
        return self._under_way.result()

    def on_failure(self, call: Callable[[], object]) -> None:
        """Call a function if the last save fails: in another thread, or at once if the save has already failed."""
        if self._under_way is not None:
            self._under_way.add_done_callback(lambda save: call() if save.exception() else None)

    def check(self) -> None:
        """Raise the last save's error if the save has failed. Don't wait for a save in progress."""
        if not self.is_busy:
            self.wait()


def save(
    folder: Store,
    payload: Payload,
    metadata: dict[str, Any],
    metrics: str,
    part_bytes: int = PART_BYTES,
    shown: bytes = b"",
) -> Saved:
    """Save a checkpoint, and return it when it is durable; see `CheckpointSave`."""
    saver = Saver(part_bytes)
    saver.begin(CheckpointSave(folder, payload, metadata, metrics, shown=shown))
    saved = saver.wait()
    assert saved is not None
    return saved


def open_near(config: RunConfig) -> "Near | None":
    """Return the near copies of a configured run; None if it has no near folder."""
    if config.near.folder is None:
        return None
    from holdfast.checkpoint.near import Near  # few runs have a near folder

    return Near(config.near, open_store(config.store).inside(config.run), config.run)

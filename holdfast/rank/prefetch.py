"""A reader that loads the checkpoint to restore while torch is being imported.

Reading needs the disk, and importing needs a processor, so they overlap. ``HOLDFAST_WITHOUT=prefetch`` turns it off;
see `holdfast.memory`.

Measured gain: none on a machine whose cores are all busy (medians of 3 and 4 runs: 22 s with it and 23 s without it for
100 MB, 44 s and 40 s for 1 GB). On a quiet machine it hides at most the time of the read: 0.05 s for 100 MB and 0.4 s
for 1 GB from a local disk, and all of a download from a bucket.

Nothing here imports torch.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.checkpoint import Payload, read_metadata, read_payload
from holdfast.config import RunConfig
from holdfast.errors import CheckpointDamaged, HoldfastError, NameMissing, RecordDamaged
from holdfast.journal import Commit, Journal
from holdfast.memory import Buffers, is_on
from holdfast.store import open_store

CONFIG_VARIABLE = "HOLDFAST_CONFIG"
# The number of the commit that the attempt will probably restore; 0 for none.
COMMIT_VARIABLE = "HOLDFAST_COMMIT"

Read = tuple[Commit, Payload | CheckpointDamaged]


class Prefetch:
    """A background read of one commit's state, which verifies the bytes.

    Attributes:
        config: the configuration that this rank was started with.
        buffers: the memory that the state is read into; later saves use it again.
    """

    def __init__(self) -> None:
        self.config = RunConfig.model_validate_json(os.environ[CONFIG_VARIABLE])
        self.buffers = Buffers()
        self._pool = ThreadPoolExecutor(1, "prefetch")
        number = int(os.environ.get(COMMIT_VARIABLE, "0"))
        self._described = ThreadPoolExecutor(1, "prefetch").submit(self._read_environment, number)
        # A rank with a shard of the state doesn't need all of it.
        is_whole = self.config.compute.parallel == "ddp" or self.config.compute.rank_count == 1
        self._reading = self._pool.submit(self._read, number) if number and is_whole and is_on("prefetch") else None

    def _read(self, number: int) -> Read:
        journal = Journal(open_store(self.config.store), self.config.run)
        commit = journal.read_commit(number)
        try:
            return commit, read_payload(journal.store, commit, self.buffers)
        except CheckpointDamaged as error:
            return commit, error

    def _read_environment(self, number: int) -> dict[str, Any]:
        if not number:
            return {}
        journal = Journal(open_store(self.config.store), self.config.run)
        try:
            metadata = read_metadata(journal.store, journal.read_commit(number).path)
        except (RecordDamaged, NameMissing):
            return {}  # the resume will read the same records and report what is wrong with them
        return metadata.environment if metadata else {}

    def read_environment(self) -> dict[str, Any]:
        """Return the commit's ``environment``: its machine and code; empty if there is no commit, or no record."""
        return self._described.result()

    def take(self, commit: Commit) -> Payload | None:
        """Return the commit's state; None if another commit was read, or the state was taken already.

        Raises:
            CheckpointDamaged: the bytes aren't those of the commit; see `read_payload`.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return None
        try:
            found, payload = reading.result()
        except HoldfastError:
            return None  # the caller reads the state itself and meets the same error
        if found != commit:
            return None
        if isinstance(payload, CheckpointDamaged):
            raise payload
        return payload

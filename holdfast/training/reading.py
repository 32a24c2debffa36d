"""The reading of a checkpoint by all ranks.

If each rank needs all of it, one rank of each node reads and verifies it, and the other ranks of the node map the
reader's memory. So the node has the checkpoint in its memory once, and reads it once from the store. No rank keeps the
memory after the restore.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.checkpoint import Payload, deserialize, read_payload
from holdfast.errors import HoldfastError, StateError
from holdfast.journal import Commit
from holdfast.machine.host import name_host
from holdfast.machine.processes import find_free_memory
from holdfast.memory import SharedBuffers, map_shared
from holdfast.store import Store
from holdfast.training.build import Training
from holdfast.training.division import find_built_division

if TYPE_CHECKING:
    from holdfast.checkpoint.near import NearReader

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Offer(NamedTuple):
    """The checkpoint in the memory of one rank.

    Attributes:
        place: where the memory can be mapped; see `_describe_place`.
        files: see `SharedBuffers`.
        failure: why the rank has no checkpoint; None if it has one.
    """

    place: Any
    files: list[tuple[str, int]]
    failure: HoldfastError | None


def read_state(training: Training, folder: Store, commit: Commit, near: "NearReader | None") -> Payload:
    """Read and verify a committed state; if it is divided over the ranks, this rank's part. All ranks call it together.

    Args:
        near: the reader of this node's local copies, which are tried before the store; None if there are none.

    Raises:
        CheckpointDamaged, RunStopped: see `read_payload`.
        StateError: only some ranks hold a part of the state.
    """
    division = find_built_division(training)
    if len({*training.ranks.gather(division is not None)}) > 1:
        raise StateError(
            "some ranks have sharded tensors and others have none, so the ranks can't read a checkpoint together",
            hint="shard each model in all ranks in the same way: holdfast docs layouts",
        )
    if division is not None:
        return division.read(folder, commit, near)
    return _read_on_node(training, folder, commit, near)


def _read_on_node(training: Training, folder: Store, commit: Commit, near: "NearReader | None") -> Payload:
    """Read and verify a committed state, once on each node. All ranks call it together.

    Args:
        near: see `read_payload`.

    Raises:
        CheckpointDamaged, RunStopped: see `read_payload`; all ranks of the node raise it.
    """
    ranks = training.ranks
    if not ranks.has_others:
        return read_payload(folder, commit, training.saver.buffers, near)
    place, shared = _describe_place(), SharedBuffers(find_free_memory())
    own: Payload | None = None
    offer: _Offer | None = None
    if training.accelerator.is_local_main_process:
        failure: HoldfastError | None = None
        try:
            own = read_payload(folder, commit, shared, near)
        except HoldfastError as error:
            failure = error
        offer = _Offer(place, shared.files, failure)
    offers = ranks.gather(offer)
    try:
        offer = offer or next((each for each in offers if each and each.place == place), None)
        if offer and offer.failure:
            raise offer.failure
        return own or _map(offer) or read_payload(folder, commit, near=near)
    finally:
        ranks.gather(None)  # the readers' files stay open until all ranks have mapped them
        shared.close()


def _map(offer: _Offer | None) -> Payload | None:
    """Return the checkpoint in another rank's memory; None if this rank can't map it."""
    try:
        return deserialize([map_shared(*each) for each in offer.files]) if offer else None
    except OSError:
        return None


def _describe_place() -> tuple[str, str, int]:
    """Return facts that are equal in two processes which know each other's files in /proc by the same path."""
    return name_host(), BOOT_ID.read_text("utf-8"), Path("/proc/self/ns/pid").stat().st_ino

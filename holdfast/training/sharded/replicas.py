"""The check that replicas are equal: ranks that hold the same rows of a tensor need the same values in these rows.

A checkpoint contains each row once, so a resume would give one rank's values to all replicas. Replicas of a shard, or
of a pipeline's stage, differ if their gradients aren't averaged. Different stages of a pipeline look like differing
replicas if their layers have the same names.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from holdfast.checkpoint import Payload
from holdfast.errors import StateError
from holdfast.state.checksum import checksum, checksum_together
from holdfast.state.shards import ShardedBytes, list_alike
from holdfast.state.tensor_forms import local_of
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.extents import Placed


def check_replicas(exchange: Exchange, payload: Payload) -> None:
    """Raise StateError in all ranks if the replicas of a shard differ. Only shards with replicas are read.

    All ranks call it together, while no save is in progress.

    Args:
        payload: a state; only its sharded tensors are compared.
    """
    pieces = {name: piece for name, each in payload.tensors.items() for piece in each.pieces}
    cut = {name: piece for name, piece in pieces.items() if isinstance(piece, ShardedBytes)}
    holders = exchange.list_holders({name: [Placed(0, piece)] for name, piece in cut.items()})
    groups: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, piece in cut.items():
        if len(ranks := list_alike(holders[name][0], exchange.rank)) > 1:
            groups.setdefault(ranks, {})[name] = local_of(piece.tensor)
    # First compare one checksum for each group of replicas, because that is little data: a rank belongs to one or two
    # groups.
    sums = exchange.each(lambda: {ranks: checksum_together([*each.values()]) for ranks, each in groups.items()})
    if _find_different(sums) is None:
        return
    named = exchange.each(
        lambda: {
            (name, ranks): value
            for ranks, each in groups.items()
            for name, value in zip(each, checksum([*each.values()]), strict=True)
        }
    )
    found = _find_different(named)
    assert found is not None
    (name, _), first, second = found
    raise StateError(
        f"ranks {first} and {second} have different values in the same rows of {name}, and a checkpoint can contain "
        "only one of them",
        hint="give the replicas of a tensor the same first values and the same gradients, and different layers "
        "different names, such as their number in the whole model: holdfast docs layouts",
    )


def _find_different(sums: Sequence[Mapping[Any, int]]) -> tuple[Any, int, int] | None:
    """Return a key under which two ranks have different checksums, and the two ranks; None if all checksums are equal.

    Args:
        sums: by rank, the checksums by key.
    """
    known: dict[Hashable, tuple[int, int]] = {}
    for rank, own in enumerate(sums):
        for key, value in own.items():
            first, before = known.setdefault(key, (rank, value))
            if value != before:
                return key, first, rank
    return None

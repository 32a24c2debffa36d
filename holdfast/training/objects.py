"""The exchange of Python objects between the ranks, over gloo on every device.

A rank that waits in NCCL spins on its GPU and on a core, and NCCL ends the wait after a timeout. A rank that waits in
gloo sleeps. Tensors travel through the host's memory and arrive there: a pickled tensor of a GPU would be restored to
the GPU of the same number, where the receiver may have no memory, or which the receiver doesn't see.
"""

import datetime
import functools
import io
import pickle
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d

from holdfast.state.layout import move
from holdfast.state.tensor_forms import is_sharded

# The timeout of every process group. It is long, because a wait for a slow store, or for a rank that evaluates alone,
# is no error: torch would end the wait after 10 minutes with NCCL, and after 30 with gloo. The attempt finds ranks that
# hang without a timeout, and a dead rank's connections close.
PATIENCE = datetime.timedelta(days=7)
CPU = torch.device("cpu")


def be_patient() -> None:
    """Set the timeout of process groups that are made without one, such as a device mesh's groups, to `PATIENCE`."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(distributed_c10d, name, None) is not None:  # a build for the CPU has no timeout of NCCL
            setattr(distributed_c10d, name, PATIENCE)


def gather(value: Any) -> list[Any]:
    """Return the values that all ranks pass to this call, by rank."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, dump(value), group=_find_group())
    return [*map(pickle.loads, found)]


def gather_in_main(value: Any) -> list[Any]:
    """Return in the main rank the values that all ranks pass to this call, by rank; in each other rank only its own.

    All ranks call it together. The values that a rank lacks are None.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    found: list[Any] = [None] * ranks
    distributed.gather_object(dump(value), found if rank == 0 else None, dst=0, group=_find_group())
    if rank:
        found[rank] = dump(value)
    return [each and pickle.loads(each) for each in found]


def broadcast(value: Any) -> Any:
    """Return the value that the main rank passes to this call. All ranks call it together."""
    found = [dump(value)]
    distributed.broadcast_object_list(found, 0, group=_find_group())
    return pickle.loads(found[0])


def find_group(device: torch.device, trained_on: torch.device) -> Any:
    """Return a process group of all ranks that can send from a device's memory; None for the default group.

    Args:
        trained_on: the device on which the ranks train, from whose memory the default group can send.
    """
    return None if device.type == trained_on.type else _find_group()


def dump(value: Any) -> bytes:
    """Return a pickle of a value whose tensors are restored to the host's memory, with the same strides."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler that copies tensors from other devices to the host's memory."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a tensor of a different device as a copy in the host's memory. Leave a parameter to pickle."""
        if isinstance(value, nn.Parameter) or not isinstance(value, Tensor) or value.device == CPU or is_sharded(value):
            return NotImplemented
        own = value.detach()
        moved = (move(own, CPU) if own.layout is torch.strided else own.cpu()).requires_grad_(value.requires_grad)
        return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def _find_group() -> Any:
    return _make_group(distributed.group.WORLD)


@functools.lru_cache(maxsize=1)
def _make_group(world: Any) -> Any:
    """Return a new group of all ranks. All ranks call it together.

    Args:
        world: the present default group; a process that has connected anew needs a new group.
    """
    return distributed.new_group(backend="gloo", timeout=PATIENCE)

"""Ranks that wait for each other longer than torch's default timeout, and what they send each other."""

import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F

from holdfast import Recipe
from holdfast.checkpoint import digest_payload, writing
from holdfast.config import RunConfig
from holdfast.memory import Buffers
from holdfast.rank.events import Events
from holdfast.rank.restore import load_checkpoint
from holdfast.store.local import LocalStore
from holdfast.training import SaveRequest, Training, begin_save, objects
from holdfast.training.capturing import capture
from holdfast.training.devices import prepare_device
from tests.support import forked
from tests.support.makers import commit_of
from tests.support.sharded import launch_checks
from tests.support.trainings import train_to
from tests.support.varied import Points

LAZY = torch.device("lazy", 0)  # a kind of device for which no build of torch has a library


def train(path: str, timeout_s: float, held_s: float, marks: str) -> int:
    """Train a run whose ranks have this default timeout, and whose store holds the last write of each checkpoint.

    Args:
        marks: the folder in which each held write leaves a file.
    """
    distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=timeout_s)
    write = writing.write_file

    def hold(folder: Any, path: str, name: str, data: Any) -> Any:
        if name == writing.METADATA:
            Path(marks, path.replace("/", "-")).touch()
            time.sleep(held_s)
        return write(folder, path, name, data)

    writing.write_file = hold
    return forked.train(path, [])


def in_ranks(count: int, function: str, *arguments: Any) -> int:
    """Call a function of this module in several ranks; return 0 if it has returned 0 in all of them."""
    return launch_checks(globals()[function], count, *arguments)


class Far(Tensor):
    """A tensor on a device that this machine doesn't have. Only ``cpu()`` tells its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "Far":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device=LAZY
        )
        made.host = host
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Copy the tensor to the host's memory, or view it."""
        host = operation(arguments[0].host, *arguments[1:], **(options or {}))
        return host if (options or {}).get("device") == torch.device("cpu") else Far(host)


def gather_from_a_device(settings: dict[str, Any]) -> int:
    """Gather a tensor of a device from each rank: it arrives in the host's memory, with its strides."""
    prepare_device(RunConfig.model_validate(settings))
    rank = distributed.get_rank()
    own = Far(torch.arange(6.0).reshape(2, 3).t() + rank)
    for found in (objects.gather({"far": own}), objects.gather_in_main({"far": own})):
        for number, each in enumerate(found):
            if each is None:
                assert rank not in (0, number), "the main rank has all, and each rank its own"
                continue
            assert type(each["far"]) is Tensor
            assert each["far"].device == torch.device("cpu")
            assert each["far"].stride() == own.stride()
            assert torch.equal(each["far"], torch.arange(6.0).reshape(2, 3).t() + number)
    assert objects.broadcast(own if rank == 0 else None).device == torch.device("cpu")
    return 0


def capture_extras(settings: dict[str, Any]) -> int:
    """Capture extras that differ between the ranks: the main rank has all of them, each other rank its own."""
    training = Training(RunConfig.model_validate(settings))
    train_to(training, 1)
    extras, rank = capture(training)["extras"], distributed.get_rank()
    assert [each is not None for each in extras] == [rank in (0, number) for number in range(len(extras))]
    assert len({json.dumps(each, default=Tensor.tolist) for each in extras if each}) == sum(map(bool, extras))
    return 0


def wide(megabytes: int) -> Recipe:
    """Build a recipe with a large part of the model that isn't trained."""
    model = nn.Module()
    model.trained = nn.Linear(8, 1)
    model.still = nn.Parameter(torch.arange(megabytes * 2**18).float(), requires_grad=False)
    model.forward = model.trained.forward
    return Recipe(
        model=model, data=Points(noise=False), optimizer=torch.optim.SGD(model.trained.parameters(), 0.05),
        loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), batch_size=8,
    )  # fmt: skip


def measure_own_bytes() -> int:
    """Return the bytes of this process's memory; memory that several processes share is divided between them."""
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) * 1024


def measure_restore(settings: dict[str, Any]) -> int:
    """Restore a checkpoint in all ranks of a node: they read it into the node's memory once, and keep nothing of it."""
    training = Training(RunConfig.model_validate(settings))
    store, events = LocalStore(f"{settings['store']}/r"), Events()
    train_to(training, 1)
    begin_save(training, SaveRequest(store, "f" * 64, {}))
    saved, *_ = training.ranks.gather(training.saver.wait())
    size_bytes = sum(part.size_bytes for part in saved.metadata.parts)
    training.saver.buffers = Buffers()  # those of the save
    before = measure_own_bytes()
    opened: list[str] = []
    sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
    loaded = load_checkpoint(training, store, commit_of(saved), events)
    assert loaded is not None
    digests = training.ranks.gather(digest_payload(loaded[0]))  # each rank touches each page
    assert len({*digests}) == 1
    grown = training.ranks.gather(measure_own_bytes() - before)
    del loaded
    left = training.ranks.gather(measure_own_bytes() - before)
    if distributed.get_rank() == 0:
        print(f"bytes of a state of {size_bytes}: while read {grown}, kept {left}", file=sys.stderr)
    readers = training.ranks.gather(any(name.endswith(".safetensors") for name in opened))
    assert readers == [True] + [False] * (len(readers) - 1)
    assert sum(grown) < 1.7 * size_bytes
    assert max(left) < 0.4 * size_bytes
    return 0


def find_timeouts(settings: dict[str, Any]) -> int:
    """Connect ranks: the default group, and a group that is made without a timeout, wait as long as any other."""
    distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=3)
    prepare_device(RunConfig.model_validate(settings))
    for group in (distributed.group.WORLD, distributed.new_group(), objects._find_group()):
        backend: Any = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert backend.options._timeout == objects.PATIENCE
    assert objects._find_group() is not distributed.group.WORLD, "on GPUs that one is NCCL's"
    assert distributed.get_backend(objects._find_group()) == "gloo"
    assert int(os.environ["WORLD_SIZE"]) == distributed.get_world_size()
    distributed.barrier()  # a rank that ends now would cut the connections that the others still make
    return 0

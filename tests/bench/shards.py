"""What saving and restoring a sharded state costs, beside `torch.distributed.checkpoint` (DCP) with the same sharding.

The ranks of one measurement are started by torchrun and share this machine's cores and its disk.
"""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from holdfast.checkpoint import CheckpointSave, Saved, Saver
from holdfast.state import localize, to_payload
from holdfast.store.local import LocalStore
from holdfast.training.sharded.exchange import Exchange
from holdfast.training.sharded.restoring import read_shards
from tests.bench.disk import make_cold
from tests.bench.frame import Benchmark, Row, ask, compare, scratch, time_of
from tests.support.makers import METADATA_FIELDS, commit_of

MB = 10**6
SIZES = {"300 MB": 300 * MB, "1 GB": 1000 * MB, "3 GB": 3000 * MB}
TENSORS = 48
# What a figure is compared with, in the words of the page.
SHOWN = {
    "copy of a share": "a copy of the shard", "DCP async_save returns": "DCP async_save, until it returns",
    "DCP async_save is done": "DCP async_save, until it is done",
}  # fmt: skip
RANKS = (1, 2, 4)
ROUNDS = 3


def run(full: bool) -> list[Row]:
    """The rows of all states and counts of ranks; the largest states only if there is time."""
    chosen = [name for name in SIZES if full or name == "300 MB"]
    return [row for name in chosen for ranks in RANKS for row in _ask_ranks(name, ranks)]


def _ask_ranks(name: str, ranks: int) -> list[Row]:
    with scratch() as folder:
        launched = ("--standalone", f"--nproc-per-node={ranks}", "-m", "tests.bench.shards", name, folder)
        found: list[Row] = ask("torch.distributed.run", *launched, OMP_NUM_THREADS="1")
        return found


# ---- in each rank


def measure(name: str, folder: Path) -> list[Row]:
    """All figures of one state over the ranks of this process's group."""
    bench = _Bench(folder, SIZES[name])
    figures = [each for part in (bench.memory, *[bench.round] * ROUNDS) for each in part()]
    for figure, number in figures:
        slowest: list[Any] = [None] * bench.exchange.ranks
        distributed.all_gather_object(slowest, number)
        bench.times.setdefault(figure, []).append(max(slowest))
    # DCP keeps memory for its next save, so only the first round shows what it needs.
    times = {
        figure: values[0] if "memory" in figure.split() else statistics.median(values)
        for figure, values in bench.times.items()
    }
    state = f"{name}, {bench.exchange.ranks} rank{'s' if bench.exchange.ranks > 1 else ''}"

    def row(figure: str, key: str, of: str, reach: float | None = None) -> Row:
        return compare(state, figure, times[key], SHOWN.get(of, of), times[of], reach)

    return [
        row("pause of training for a save", "stall", "copy of a share", 1.3),
        row("pause of training for a save", "stall", "DCP async_save returns"),
        row("time until durable and hashed", "durable", "DCP save", 1.0),
        row("time until durable and hashed", "durable", "DCP async_save is done", 1.0),
        row("time to restore and verify", "restore", "DCP load", 1.0),
        *(
            compare(
                state, f"peak memory of a rank during {what}", times[f"{what} memory"], of, limit, reach, unit="shards"
            )
            for what, of, limit, reach in (
                ("save", "the rank's shard", 1.0, 2.2), ("restore", "the rank's shard", 1.0, 2.2),
                ("DCP async_save", "Holdfast's save", times["save memory"], None),
            )
        ),
    ]  # fmt: skip


class _Bench:
    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.exchange = Exchange(torch.device("cpu"))
        self.mesh = init_device_mesh("cpu", (self.exchange.ranks,))
        self.folder, self.times = folder, dict[str, list[float]]()
        self.store = LocalStore(str(folder / "run"))
        self.state: dict[str, Any] = {"small": self._make(torch.zeros(64, 64))}
        self.saver, self.step = Saver(), 0
        self._save()  # so that connections and threads don't count
        self.base = _resident()
        rows = size_bytes // 4 // TENSORS // 64 // self.exchange.ranks
        self.state = {f"layer{number:04d}": self._make(torch.randn(rows, 64)) for number in range(TENSORS)}
        self.share_bytes = TENSORS * rows * 64 * 4

    def _make(self, local: torch.Tensor) -> Any:
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    def memory(self) -> Iterator[tuple[str, float]]:
        """The memory of a first save, and that of a process that restores and has saved nothing yet."""
        self.saver = Saver()
        with _Peak(self) as peak:
            saved, _, _ = self._save()
        yield "save memory", peak.shares
        self.saver = Saver()
        with _Peak(self) as peak:
            self._restore(saved)
        yield "restore memory", peak.shares
        self._save()  # the memory of later saves
        self.copy = [tensor.to_local().clone() for tensor in self.state.values()]

    def round(self) -> Iterator[tuple[str, float]]:
        """The times of a save that uses the memory of an earlier one, and those of a restore and of DCP."""
        yield "copy of a share", self._time(self._copy)
        saved, stall, durable = self._save()
        yield "stall", stall
        yield "durable", durable
        self._make_cold(self.folder / "run" / saved.path)
        yield "restore", self._time(lambda: self._restore(saved))
        if self.exchange.rank == 0:
            self.store.delete_folder(saved.path)
        yield from self._round_of_dcp()

    def _save(self) -> tuple[Saved, float, float]:
        """Save as a rank does. Return the checkpoint, and the seconds of the stall and of the whole save."""
        self.step += 10
        fields = METADATA_FIELDS | {"optimizer_steps_total": self.step}
        began = self._begin()
        payload = to_payload({"model": self.state})
        peers = self.exchange if self.exchange.ranks > 1 else None
        payload = payload if peers else localize(payload)
        self.saver.begin(CheckpointSave(self.store, payload, fields, "", is_urgent=False, peers=peers))
        stall = time.perf_counter() - began
        saved = self.saver.wait()
        assert saved is not None
        return saved, stall, time.perf_counter() - began

    def _restore(self, saved: Saved) -> None:
        shares = {f"model.{name}": each for name, each in self.state.items()}
        read_shards(self.exchange, shares, self.store, commit_of(saved))

    def _round_of_dcp(self) -> Iterator[tuple[str, float]]:
        yield "DCP save", self._time(lambda: dcp.save(self.state, storage_writer=self._writer("dcp")))
        with _Peak(self) as peak:
            began = self._begin()
            saving: Any = dcp.async_save(
                self.state, storage_writer=self._writer("async"), process_group=self.exchange.group
            )
            yield "DCP async_save returns", time.perf_counter() - began
            saving.result()
            yield "DCP async_save is done", time.perf_counter() - began
        yield "DCP async_save memory", peak.shares
        self._make_cold(self.folder / "dcp")
        yield "DCP load", self._time(lambda: dcp.load(self.state, checkpoint_id=self.folder / "dcp"))

    def _writer(self, name: str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.folder / name)  # which syncs its files

    def _copy(self) -> None:
        for copy, tensor in zip(self.copy, self.state.values(), strict=True):
            copy.copy_(tensor.to_local())

    def _make_cold(self, folder: Path) -> None:
        if self.exchange.rank == 0:
            make_cold(folder)

    def _begin(self) -> float:
        distributed.barrier()
        return time.perf_counter()

    def _time(self, call: Callable[[], object]) -> float:
        distributed.barrier()
        return time_of(call)


class _Peak:
    """The largest memory of this process in a block, in shares of the state. It has one already: the state itself."""

    def __init__(self, bench: _Bench) -> None:
        self._bench, self.shares = bench, 0.0

    def __enter__(self) -> "_Peak":
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return self

    def __exit__(self, *_: object) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        self.shares = (peak - self._bench.base) / self._bench.share_bytes


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


BENCHMARK = Benchmark(
    "shards",
    "Medians of the slowest rank. DCP syncs its files, hashes nothing, and reads nothing back to verify it. The ranks "
    "share the machine's cores, so that more ranks are not faster here.",
    run,
)

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    figures = measure(sys.argv[1], Path(sys.argv[2]))
    if distributed.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    distributed.barrier()
    os._exit(0)  # as Holdfast's ranks do: gloo's threads outlive the process group, and may abort an exit

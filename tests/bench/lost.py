"""How much training a save costs that is made beside it, where every core trains and where one is free.

Each state is measured in a process of its own. Steps are taken in blocks: quiet ones, and ones in which a save is
begun, that go on until it is durable and some steps longer. What a block took longer than its steps take in the quiet
blocks before and after it was lost. A figure is the median over the rounds, and how far it is to be trusted stands
beside it; others have their turn in every fourth.
"""

import functools
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from holdfast.checkpoint import CheckpointSave, Saver, count_cores
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.bench.disk import take_memory, write_raw
from tests.bench.frame import Benchmark, Row, ask, compare, median_of, scratch, time_of
from tests.bench.workload import Loop
from tests.support.makers import METADATA_FIELDS

# Steps after a save is durable, and of a quiet block at least.
AFTER, QUIET = 2, 6
ROUNDS = {"100 MB": 12, "1,000 tensors": 12, "1 GB": 4, "3 GB": 4}
FULL_ROUNDS = {"100 MB": 40, "1,000 tensors": 40, "1 GB": 8}
PEERS_EVERY = 4
REACH = 1.3

Begin = Callable[[], Callable[[], bool]]


def run(full: bool) -> list[Row]:
    """Every core trains, or all but one; others only where they have the time, and the memory."""
    cores, rows = count_cores(), []
    for name in ("100 MB", "1,000 tensors", "1 GB", *(["3 GB"] if full else [])):
        for threads in dict.fromkeys((cores, max(1, cores - 1))):
            rounds = (ROUNDS | FULL_ROUNDS if full else ROUNDS)[name]
            with_peers = ["peers"] if name == "100 MB" or (full and name != "3 GB") else []
            rows += ask("tests.bench.lost", name, str(threads), str(rounds), *with_peers)
    return rows


# ---- in the process of one state


def measure(name: str, threads: int, rounds: int, *, with_peers: bool) -> list[Row]:
    """All rows of one state, where so many threads train."""
    torch.set_num_threads(threads)
    gc.freeze()  # as a rank does
    with scratch() as folder:
        bench = _Bench(Path(folder), name)
        if not with_peers:
            bench.peers = {}
        times = bench.time_all(rounds)
    free = count_cores() - threads
    of, limit = "a memory copy", times["copy"]
    if not free:
        of, limit = (
            "a memory copy + CPU time of hash and write / cores",
            limit + (times["hash"] + times["write"]) / count_cores(),
        )
    gb = bench.bytes / 1e9
    state = f"{name}, {free or 'no'} core free"

    def row(figure: str, key: str, against: str, limit: float, reach: float | None = None) -> Row:
        return compare(state, figure, times[key] / gb, against, limit / gb, reach, unit="s/GB")

    return [
        row("training lost by a save", "holdfast", of, limit, REACH),
        compare(state, "standard error of the training lost by a save", times["uncertain"] / gb, unit="s/GB"),
        row("training lost by a save, without priority", "without priority", of, limit),
        row("pause of training for a save", "stall", "a memory copy", times["copy"]),
        *(row(f"training lost by {peer}", peer, of, limit) for peer in bench.peers),
        compare(state, "time until a save is durable, beside training", times["holdfast durable"]),
        compare(state, "time of a step without a save", times["step"]),
    ]


@dataclass(frozen=True)
class _Block:
    """Steps with a save among them, in seconds: in all, until they went on, and until the save was durable."""

    steps: int
    elapsed: float
    stall: float
    durable: float


class _Bench:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.store = folder, LocalStore(str(folder / "run"))
        self.loop, self.saver = Loop(name, keep_gradients=True), Saver()
        for _ in range(3):
            self.loop.step()
        self.threads = ThreadPoolExecutor(1)
        self.saves = 0
        self.peers: dict[str, Begin] = {
            "DCP async_save": self._begin_dcp,
            "clone, torch.save in a thread": self._begin_thread,
            "torch.save, fsync, hash": self._block,
        }
        self.bytes = sum(tensor.nbytes for tensor in _tensors(self._state()))

    def time_all(self, rounds: int) -> dict[str, float]:
        samples: dict[str, list[float]] = {}

        def add(key: str, seconds: float) -> None:
            samples.setdefault(key, []).append(seconds)

        self._take_memory()
        hurried = functools.partial(self._begin_ours, is_urgent=True)
        savers: dict[str, Begin] = {"holdfast": self._begin_ours, "without priority": hurried} | self.peers
        for begin in savers.values():  # whose first is slower: it takes its memory
            self._save(begin)
        for number in range(rounds):
            for key, seconds in self._limits().items():
                add(key, seconds)
            quiet = self._steps(QUIET)
            for key, begin in savers.items():
                if key in self.peers and number % PEERS_EVERY:
                    continue
                block = self._save(begin)
                before, quiet = quiet, self._steps(max(block.steps, QUIET))
                step = statistics.mean((before, quiet))
                add(key, block.elapsed - block.steps * step)
                if key == "holdfast":
                    add("step", step)
                    add("stall", block.stall)
                    add("holdfast durable", block.durable)
        return median_of(samples) | {"uncertain": _uncertainty(samples["holdfast"])}

    def _steps(self, count: int) -> float:
        """Seconds of a quiet step."""
        return time_of(lambda: [self.loop.step() for _ in range(count)]) / count

    def _save(self, begin: Begin) -> "_Block":
        self.saves += 1
        steps, began = 0, time.perf_counter()
        is_done = begin()
        stood = durable = time.perf_counter()
        while not is_done():
            self.loop.step()
            steps, durable = steps + 1, time.perf_counter()
        for _ in range(AFTER):
            self.loop.step()
        elapsed = time.perf_counter() - began
        self._delete(self.folder)
        return _Block(steps + AFTER, elapsed, stood - began, durable - began)

    def _delete(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def _state(self) -> dict[str, Any]:
        return {"model": self.loop.model.state_dict(), "optimizer": self.loop.optimizer.state_dict()}

    # ---- the machine

    def _take_memory(self) -> None:
        self.copies = [torch.empty_like(tensor).zero_() for tensor in _tensors(self._state())]
        self.image = take_memory(self.bytes)[: self.bytes // 4096 * 4096]  # whole blocks, as `O_DIRECT` wants them
        torch.frombuffer(self.image, dtype=torch.uint8).random_()

    def _limits(self) -> dict[str, float]:
        tensors = list(_tensors(self._state()))
        copy = time_of(lambda: [to.copy_(tensor) for to, tensor in zip(self.copies, tensors, strict=True)])
        hashing = _cpu_of(lambda: hashlib.sha256(self.image))
        raw = self.folder / "raw"
        writing = _cpu_of(lambda: write_raw(raw, self.image))
        raw.unlink()
        return {"copy": copy, "hash": hashing, "write": writing}

    # ---- ours

    def _begin_ours(self, *, is_urgent: bool = False) -> Callable[[], bool]:
        """As a rank does it at the end of a chunk; see `holdfast.training.begin_save`."""
        fields = METADATA_FIELDS | {"optimizer_steps_total": 10 * self.saves}
        self.saver.begin(CheckpointSave(self.store, to_payload(self._state()), fields, "", is_urgent=is_urgent))
        return lambda: not self.saver.is_busy

    # ---- others

    def _begin_dcp(self) -> Callable[[], bool]:
        model, optimizer = get_state_dict(self.loop.model, self.loop.optimizer)
        writer = dcp.FileSystemWriter(self.folder / "dcp")  # syncs its files
        saving = dcp.async_save({"model": model, "optimizer": optimizer}, storage_writer=writer, no_dist=True)
        assert isinstance(saving, Future)
        return saving.done

    def _begin_thread(self) -> Callable[[], bool]:
        state = _cloned(self._state())
        return self.threads.submit(self._write_torch, state).done

    def _block(self) -> Callable[[], bool]:
        self._write_torch(self._state())
        with (self.folder / "torch").open("rb") as file:
            hashlib.file_digest(file, "sha256")
        return lambda: True

    def _write_torch(self, state: dict[str, Any]) -> None:
        with (self.folder / "torch").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def _uncertainty(losses: Sequence[float]) -> float:
    """The standard error of a median, from where the middle half of the values is."""
    quarter, _, three_quarters = statistics.quantiles(losses, n=4)
    return 1.253 * (three_quarters - quarter) / 1.349 / math.sqrt(len(losses))


def _cpu_of(call: Callable[[], object]) -> float:
    """Seconds of a processor that this thread uses for a call."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    return [_cloned(item) for item in value] if isinstance(value, list) else value


BENCHMARK = Benchmark(
    name="lost",
    about=(
        "Training that a save costs which is made beside it, in seconds a GB saved. The copy, and the processor's time "
        "for SHA-256 and for writing, are measured in the same minutes; a hash or a write can't cost less than its own "
        "time where every core trains. Rows that name another tool save the same state with this tool; the clone in a "
        "thread and DCP compute no hash."
    ),
    run=run,
)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), with_peers="peers" in sys.argv[4:])))

"""What a step with virtual ranks costs, beside torch's DDP and FSDP2 with as many ranks.

The ranks of one measurement are started by torchrun and share this machine's cores.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from holdfast import Recipe
from holdfast.config import Compute, Determinism, RunConfig
from holdfast.machine import determinism
from holdfast.training import Training
from holdfast.training.loop import train_step
from tests.bench import workload
from tests.bench.bare import KEEP_MEMORY
from tests.bench.frame import Benchmark, Row, ask, compare, scratch

SIZE = "100 MB"
RANKS = (2, 4)
SHARES = 8
WARM_UP, STEPS, ROUNDS = 2, 4, 9
STOCK = {"ddp": "torch's DDP", "fsdp": "torch's FSDP2"}
MB = 10**6
# Otherwise the C library keeps freed memory, more of it than the sums need.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**16)}


def run(full: bool) -> list[Row]:
    """The rows of two ranks, and of four if there is time."""
    chosen = [ranks for ranks in RANKS if full or ranks == RANKS[0]]
    return [row for ranks in chosen for row in (*compare_times(ranks), *compare_memory(ranks))]


def compare_times(ranks: int) -> list[Row]:
    state, rows = f"{SIZE}, {ranks} ranks", list[Row]()
    for parallel, stock in STOCK.items():
        times = _ask_ranks(ranks, "time", parallel)
        for shares in (ranks, SHARES):
            reach = 1.1 if shares == ranks else None
            figure = f"time of a step with {shares} virtual ranks"
            rows.append(compare(state, f"{figure}, {parallel}", times[str(shares)], stock, times["0"], reach))
    return rows


def compare_memory(ranks: int) -> list[Row]:
    state, rows = f"{SIZE}, {ranks} ranks", list[Row]()
    peaks = {
        (parallel, shares): _ask_ranks(ranks, "memory", parallel, str(shares))["peak"] / MB
        for parallel in STOCK
        for shares in (0, SHARES)
    }
    for parallel, stock in STOCK.items():
        ours, limit = peaks[parallel, SHARES], peaks[parallel, 0]
        figure = f"memory of a rank's steps with {SHARES} virtual ranks, {parallel}"
        rows.append(compare(state, figure, ours, stock, limit, unit="MB"))
    return rows


def _ask_ranks(ranks: int, *arguments: str) -> Any:
    memory = KEEP_MEMORY if arguments[0] == "time" else RETURN_MEMORY
    environment = determinism.preamble(Determinism(threads=1)) | memory
    with scratch() as folder:
        launched = ("--standalone", f"--nproc-per-node={ranks}", "-m", "tests.bench.virtual", folder, *arguments)
        return ask("torch.distributed.run", *launched, **environment)


def build() -> Recipe:
    """The workload as a recipe."""
    model = workload.make_model(SIZE)
    return Recipe(
        model=model,
        data=workload.make_data(SIZE),
        optimizer=workload.make_optimizer(model),
        loss=workload.loss,
        batch_size=workload.SIZES[SIZE].batch,
        clip_norm=workload.CLIP_NORM,
    )


# ---- in each rank


def make_step(folder: str, parallel: str, shares: int) -> Callable[[], object]:
    """The program that trains a step: torch's own way without shares, or virtual ranks."""
    if not shares:
        return _Stock(parallel).step
    compute = Compute.model_validate(
        {"ranks": distributed.get_world_size(), "virtual_ranks": shares, "parallel": parallel, "device": "cpu"}
    )
    training = Training(
        RunConfig(
            recipe="tests.bench.virtual:build", run="r", store=folder, epochs=99,
            compute=compute, determinism=Determinism(threads=1),
        )
    )  # fmt: skip
    return lambda: train_step(training)


class _Stock(workload.Loop):
    """The same training with torch alone. Each rank has its part of the batch."""

    def __init__(self, parallel: str) -> None:
        super().__init__(SIZE)
        model: Any = self.model
        if parallel == "ddp":
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        self.optimizer = workload.make_optimizer(self.model)
        part = workload.SIZES[SIZE].batch // distributed.get_world_size()
        self.loader = torch.utils.data.DataLoader(workload.make_data(SIZE), part, shuffle=True, drop_last=True)
        self._batches = iter(self.loader)


def measure_times(folder: str, parallel: str) -> dict[str, float]:
    """Median seconds of the slowest rank's step by number of shares, 0 for none; the rounds take turns."""
    counts = dict.fromkeys((0, distributed.get_world_size(), SHARES))
    steps = {shares: make_step(folder, parallel, shares) for shares in counts}
    samples: dict[int, list[float]] = {shares: [] for shares in counts}
    for number in range(ROUNDS + 1):
        for shares, step in steps.items():
            spent = torch.tensor(_time(step, STEPS if number else WARM_UP))
            distributed.all_reduce(spent, distributed.ReduceOp.MAX)
            samples[shares] += [spent.item()] * bool(number)
    return {str(shares): statistics.median(values) for shares, values in samples.items()}


def _time(step: Callable[[], object], count: int) -> float:
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - began) / count


def measure_memory(folder: str, parallel: str, shares: str) -> dict[str, float]:
    """Bytes that the largest rank's steps need at most beyond what it had before the model was built."""
    import torch.distributed.fsdp  # so that its own memory doesn't count

    distributed.barrier()
    base = _read_status("VmRSS")
    step = make_step(folder, parallel, int(shares))
    _time(step, 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    _time(step, STEPS)
    peak = torch.tensor(float(_read_status("VmHWM") - base))
    distributed.all_reduce(peak, distributed.ReduceOp.MAX)
    return {"peak": peak.item()}


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


BENCHMARK = Benchmark(
    "virtual",
    "Medians of the slowest rank. Each rank trains in one thread. The ranks share the machine's cores, so that more "
    "ranks are not faster here.",
    run,
)

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    kind, *arguments = sys.argv[2:]
    found = {"time": measure_times, "memory": measure_memory}[kind](sys.argv[1], *arguments)
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    distributed.barrier()
    os._exit(0)  # as Holdfast's ranks do: gloo's threads outlive the process group, and may abort an exit

"""``python -m tests.bench.agreement``: what it costs a step that several ranks agree on when to stop.

Starts the ranks, and prints one JSON object of seconds: those of rank 0.
"""

import json
import socket
import time
from collections.abc import Callable

import torch
from torch import distributed, multiprocessing

from holdfast.rank.agreement import Agreement, Wish
from tests.bench.frame import Benchmark, Row, ask, compare, median_of

RANKS = 4
WARM_UP, STEPS, ROUNDS = 20, 100, 5
STEP_S = 2e-3  # a step that leaves the processor free, as one on a GPU does
REACH_S = 0.1e-3


def run(full: bool) -> list[Row]:
    found = ask("tests.bench.agreement")
    state, own = f"{RANKS} ranks", found["agreement"]
    return [
        compare(state, "time of a step's agreement", own, "gloo's all-reduce + 0.1 ms", found["gloo"] + REACH_S, 1.0),
        compare(state, "time of a step's agreement", own, "an all-gather of an object", found["objects"]),
    ]


def measure(rank: int, port: int, results: "multiprocessing.SimpleQueue[str]") -> None:
    """Be one of the ranks. Rank 0 puts its results into the queue, as JSON."""
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    agreement, number = Agreement(), torch.zeros(2, dtype=torch.float64)
    calls: dict[str, Callable[[], object]] = {
        "agreement": lambda: agreement.exchange(Wish.NOTHING, 0.0),
        "gloo": lambda: distributed.all_reduce(number, distributed.ReduceOp.MAX),
        "objects": lambda: distributed.all_gather_object([None] * RANKS, False),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(_time_beside_steps(call))
    distributed.barrier()
    if rank == 0:
        results.put(json.dumps(median_of(samples)))


def _time_beside_steps(call: Callable[[], object]) -> float:
    """Return the mean seconds that a call takes between two steps, to which all ranks come together."""
    spent_s = 0.0
    for number in range(WARM_UP + STEPS):
        time.sleep(STEP_S)
        distributed.barrier()
        began = time.perf_counter()
        call()
        spent_s += (time.perf_counter() - began) * (number >= WARM_UP)
    return spent_s / STEPS


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    multiprocessing.spawn(measure, (port, results), RANKS)
    print(results.get())


BENCHMARK = Benchmark(
    name="agreement",
    about="What several ranks spend in each step on agreeing whether to save or to stop, beside the step itself.",
    run=run,
)

if __name__ == "__main__":
    main()

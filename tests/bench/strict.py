"""What deterministic algorithms cost."""

from tests.bench.bare import bare_loop
from tests.bench.frame import Benchmark, Row, compare, median_of

ROUNDS, BLOCK_S = 6, 1.5


def run(full: bool) -> list[Row]:
    """Two processes, which train in turn."""
    rows = []
    for size in ("100 MB", "1,000 tensors"):
        with bare_loop(size, "strict") as strict, bare_loop(size, "fast") as fast:
            steps = max(2, round(BLOCK_S / fast(2)))
            samples: dict[str, list[float]] = {"strict": [], "fast": []}
            for _ in range(ROUNDS * (3 if full else 1)):
                samples["strict"].append(strict(steps))
                samples["fast"].append(fast(steps))
        step = median_of(samples)
        rows.append(
            compare(
                size,
                "time of a step, deterministic algorithms",
                step["strict"],
                "torch's default algorithms",
                step["fast"],
            )
        )
    return rows


BENCHMARK = Benchmark(
    name="strict",
    about=(
        'A step with determinism.mode = "strict" over one with "fast", on the CPU, where most operations are '
        "deterministic either way. A GPU has other kernels for it."
    ),
    run=run,
)

"""``python -m tests.bench.trust SIZE``: what it costs to know that a resume was right, beside a step.

Trains in this process, and prints one JSON object of seconds.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint import count_cores
from holdfast.config import Determinism, Resume, RunConfig
from holdfast.machine import determinism
from holdfast.training import Training, measure_probe
from holdfast.training.checksums import describe_components
from holdfast.training.step_record import choose_every
from tests.bench.bare import KEEP_MEMORY
from tests.bench.frame import Benchmark, Row, ask, compare, median_of, time_of
from tests.bench.recipe import STEPS_VARIABLE
from tests.support.trainings import train_to

SIZES = ("100 MB", "1,000 tensors")
WARM_UP, STEPS, ROUNDS = 5, 8, 7
# Of a step's time, for the checksums of the trail.
REACH = 0.005


def run(full: bool) -> list[Row]:
    """Each size in a process of its own."""
    rows: list[Row] = []
    for size in (*SIZES, *(["1 GB"] if full else [])):
        found = ask("tests.bench.trust", size, **determinism.preamble(_strict()), **KEEP_MEMORY)
        step, every = found["step"], found["every"]
        rows += [
            compare(size, "time of the forward probe, at a save and a resume", found["probe"], "a whole step", step),
            compare(
                size,
                "time of the training probe, at a save and a resume",
                found["both probes"] - found["probe"],
                "a whole step",
                step,
            ),
            compare(
                size,
                "time of checksums in each step, on average",
                found["checksums"] / every,
                "a whole step",
                step,
                REACH,
            ),
            compare(
                size, "time to set and take out the generators in a step", found["generators"], "a whole step", step
            ),
            compare(size, "time to compare torch's flags in a step", found["flags"], "a whole step", step),
        ]
    return rows


def _strict() -> Determinism:
    return Determinism(threads=count_cores())


def main(size: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_measure(size, Path(folder))))


def _measure(size: str, folder: Path) -> dict[str, float]:
    os.environ[STEPS_VARIABLE] = str(folder / "steps")
    settings = {"size": size, "steps": 10**6}
    known = {"recipe": "tests.bench.recipe:stack", "run": "trust", "store": str(folder), "settings": settings}
    both = RunConfig(**known, determinism=_strict())
    one = RunConfig(**known, determinism=_strict(), resume=Resume(training_probe=False))
    training = Training(both)

    def probe(config: RunConfig) -> None:
        training.config = config
        measure_probe(training)

    def enter() -> None:
        with training.generators.training():
            pass

    calls: dict[str, Callable[[], object]] = {
        "step": lambda: train_to(training, training.progress.step + STEPS),
        "both probes": lambda: probe(both),
        "probe": lambda: probe(one),
        "checksums": lambda: describe_components(training, in_detail=False),
        "generators": enter,
        "flags": lambda: determinism.check_unchanged(both.determinism, training.as_built.flags, "here"),
    }
    train_to(training, WARM_UP)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(time_of(call))
    found = median_of(samples)
    return found | {"step": found["step"] / STEPS, "every": choose_every(training.model)}


BENCHMARK = Benchmark(
    name="trust",
    about=(
        "What it costs to know that a resume was right. The probes are taken at each save and each resume; the rest "
        "is what each step pays, the checksums spread over the steps between two of them."
    ),
    run=run,
)

if __name__ == "__main__":
    main(sys.argv[1])

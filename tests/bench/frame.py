"""What a benchmark is, and how its rows are shown."""

import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from holdfast import __version__
from holdfast.checkpoint import count_cores
from holdfast.memory import WITHOUT_VARIABLE

Row = dict[str, str | int | float | None]

FOLDER_VARIABLE = "BENCH_FOLDER"
ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("torch", "numpy", "accelerate", "prefect", "fsspec", "s3fs", "gcsfs", "moto")


@dataclass(frozen=True)
class Benchmark:
    """Something that is measured.

    Attributes:
        name: what it is asked for by.
        about: what its figures are, and what is not so about them.
        run: the rows, all with the same columns. It is given whether to take the time for the largest sizes.
        across: the column that grows; rows that are alike in the columns before it are shown in one line. None where
            each row has a line of its own.
    """

    name: str
    about: str
    run: Callable[[bool], list[Row]]
    across: str | None = None


def compare(
    state: str,
    figure: str,
    ours: float,
    of: str = "",
    limit: float | None = None,
    reach: float | None = None,
    *,
    unit: str = "s",
    least: bool = False,
) -> Row:
    """A figure beside what it is held against.

    Args:
        of: what that is: the machine's limit, or what somebody else does.
        limit: that, in the same unit.
        reach: what the ratio has to be at most; None where nothing is asked of it.
        least: at least, instead.
    """
    ratio = None if limit is None else ours / limit
    is_met = None if ratio is None or reach is None else ratio >= reach if least else ratio <= reach
    return {
        "state": state, "figure": figure, "ours": _round(ours), "unit": unit, "of": of,
        "limit": None if limit is None else _round(limit), "ratio": None if ratio is None else round(ratio, 3),
        "reach": None if reach is None else f"{'>=' if least else '<='} {reach:g}",
        "met": None if is_met is None else "yes" if is_met else "NO",
    }  # fmt: skip


def _round(value: float) -> float:
    """Four digits are more than a time is worth."""
    return float(f"{value:.4g}")


def median_of(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(values) for name, values in samples.items()}


def ask(module: str, *arguments: str, python: str | Path = sys.executable, **environment: str) -> Any:
    """What a module prints as JSON in a process of its own, so that its memory and its threads are its own.

    Its scratch folders go with it, however it ends.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    command = [str(python), "-m", module, *arguments]
    with scratch() as folder:
        variables = os.environ | {FOLDER_VARIABLE: folder} | environment
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def scratch() -> "tempfile.TemporaryDirectory[str]":
    """A folder on the disk that is measured, which goes afterwards: in BENCH_FOLDER, if that is set."""
    return tempfile.TemporaryDirectory(prefix="bench-", dir=os.environ.get(FOLDER_VARIABLE), ignore_cleanup_errors=True)


def time_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def without(name: str) -> Iterator[None]:
    """Turn a means of speed off for the block, in this process and in those that it starts; see `holdfast.memory`."""
    os.environ[WITHOUT_VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[WITHOUT_VARIABLE]


def describe_machine() -> dict[str, str | int]:
    """What the times depend on. Nothing here says whose machine it is."""
    versions = {"holdfast": __version__, **{package: metadata.version(package) for package in PACKAGES}}
    return {"cpu": _cpu_model(), "cores": count_cores(), "python": platform.python_version(), **versions}


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def make_table(benchmark: Benchmark, rows: list[Row]) -> Table:
    """The rows as a person reads them: what grows is side by side, what doesn't is there once; the last of a ratio."""
    table = Table(
        title=benchmark.name, caption=benchmark.about, title_justify="left", caption_justify="left", box=box.SIMPLE
    )
    columns = list(rows[0])
    before = columns[: columns.index(benchmark.across)] if benchmark.across else columns
    after = columns[len(before) :]
    for column in columns:
        is_text = column in before and not any(isinstance(row[column], int | float) for row in rows)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    previous: list[str] = []
    for texts, group in itertools.groupby(rows, lambda row: [_show(column, [row[column]]) for column in before]):
        lines = list(group)
        if texts[:1] != previous[:1]:
            table.add_section()
        table.add_row(*texts, *(_show(column, [row[column] for row in lines]) for column in after))
        previous = texts
    return table


def _show(column: str, values: Sequence[str | float | None]) -> str:
    if column.endswith("ratio"):
        values = values[-1:]
    texts = ["-" if value is None else value if isinstance(value, str) else f"{value:,}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)

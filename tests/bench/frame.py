"""What a benchmark is, and how its rows are shown."""

import itertools
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich import box
from rich.table import Table

from holdfast.checkpoint import count_cores

Row = dict[str, str | int | float | None]

PACKAGES = ("holdfast", "torch", "numpy", "fsspec", "s3fs", "gcsfs", "moto")


@dataclass(frozen=True)
class Benchmark:
    """Something that is measured.

    Attributes:
        name: what it is asked for by.
        about: what its figures are, and what is not so about them.
        run: the rows, all with the same columns. It is given whether to take the time for the largest sizes.
        across: the column that grows; rows that are alike in the columns before it are shown in one line.
    """

    name: str
    about: str
    run: Callable[[bool], list[Row]]
    across: str


def describe_machine() -> dict[str, str | int]:
    """What the times depend on. Nothing here says whose machine it is."""
    versions = {package: metadata.version(package) for package in PACKAGES}
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
    before = columns[: columns.index(benchmark.across)]
    after = columns[len(before) :]
    for column in columns:
        table.add_column(column, justify="left" if column in before else "right", no_wrap=True)
    previous: list[str] = []
    for texts, group in itertools.groupby(rows, lambda row: [str(row[column]) for column in before]):
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

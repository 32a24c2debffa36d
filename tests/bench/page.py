"""``python -m tests.bench.page [bench.json]``: write each benchmark's newest run to docs/data/costs.csv.

This also writes the table of docs/performance.md. A benchmark's rows replace those of its last run on one machine with
one set of versions. The page has the rows that a reader decides by, of the machine with the most benchmarks.
"""

import csv
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.frame import ROOT

PAGE = ROOT / "docs" / "performance.md"
DATA = ROOT / "docs" / "data" / "costs.csv"
TABLE = "<!-- {} -->\n", "<!-- end -->\n"
COLUMNS = ("state", "figure", "ours", "unit", "of", "limit", "ratio", "reach", "met")

# The heads of the file's columns.
HEADS = ("machine", "benchmark", "state", "figure", "measured", "unit", "compared with", "its value", "ratio", "target",
         "met")  # fmt: skip

# The states and the figures of the page, by benchmark.
SHOWN = {
    "cold": {"100 MB"},
    "flow": {"100 MB, no core free", "100 MB, 1 core free"},
    "lost": {"100 MB, no core free", "100 MB, 1 core free"},
    "peers": {"100 MB"},
    "saving": {"100 MB", "1 GB"},
    "shards": {"1 GB, 2 ranks"},
    "virtual": {"100 MB, 2 ranks"},
}
FIGURES = re.compile(
    r"speed of a run|slowdown|time (from|until durable and hashed$|to restore and verify$|of a step with)|"
    r"pause of training for a save$|training lost by (a save$|DCP)"
)

# A machine's tables: a benchmark's rows, by the benchmark's name.
Rows = dict[str, list[list[str]]]


def read_tables(text: str) -> dict[str, Rows]:
    """Return the tables of the file, by machine."""
    tables: dict[str, Rows] = {}
    for machine, benchmark, *row in list(csv.reader(io.StringIO(text)))[1:]:
        tables.setdefault(machine, {}).setdefault(benchmark, []).append(row)
    return tables


def read_run(found: dict[str, Any]) -> tuple[str, Rows]:
    """Return a run's machine, and the rows of every benchmark whose figures stand beside a limit."""
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    return machine, {
        name: [
            ["" if value is None else str(value) for value in row.values()]
            for row in benchmark["rows"]
            if tuple(row) == COLUMNS
        ]
        for name, benchmark in found["benchmarks"].items()
    }


def write_tables(tables: dict[str, Rows]) -> str:
    """Return the tables as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADS)
    for machine, benchmarks in tables.items():
        writer.writerows([machine, name, *row] for name, rows in benchmarks.items() for row in rows)
    return text.getvalue()


def merge(tables: dict[str, Rows], machine: str, run: Rows) -> dict[str, Rows]:
    """Return the tables with a run's rows in place of those of the same benchmarks; the run's machine comes first."""
    others = {each: {name: rows for name, rows in old.items() if name not in run} for each, old in tables.items()}
    merged = {machine: dict(sorted((others.pop(machine, {}) | run).items()))}
    return merged | {each: rows for each, rows in others.items() if rows}


def show(tables: dict[str, Rows]) -> str:
    """Return the page's table: the rows that a reader decides by, of the machine with the most benchmarks."""
    machine, benchmarks = max(tables.items(), key=lambda item: len(item[1]))
    lines = [machine, "", "| benchmark, state | figure | measured | compared with |", "|---|---|---|---|"]
    for name, rows in benchmarks.items():
        for state, figure, ours, unit, of, limit, *_ in rows:
            is_shown = state in SHOWN.get(name, ()) and of not in ("", "the allowed time")
            if is_shown and FIGURES.match(figure):
                lines.append(f"| {name}, {state} | {figure} | {ours} {unit} | {of}: {limit} |")
    return "\n".join([*lines, ""])


def show_growth(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the benchmark growth: a line for each operation, with its figures at all sizes."""
    lines = ["| what grows | sizes | operation | milliseconds | requests |", "|---|---|---|---|---|"]
    for (grows, operation), group in itertools.groupby(rows, lambda row: (row["grows"], row["operation"])):
        found = list(group)
        sizes, ms, requests = ([row[column] for row in found] for column in ("size", "ms", "requests"))
        asked = "-" if None in requests else _join(sorted({*requests}))
        lines.append(f"| {grows} | {_join(sizes)} | {operation} | {_join(ms)} | {asked} |")
    return "\n".join([*lines, ""])


def _join(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:,.0f}" if number >= 10 else f"{number:.2g}" for number in numbers)


def replace_table(page: str, name: str, table: str) -> str:
    """Return the page with another table between the comments of this name."""
    begin, end = TABLE[0].format(name), TABLE[1]
    before, _, rest = page.partition(begin)
    assert rest, name
    return f"{before}{begin}{table}{end}{rest.partition(end)[2]}"


def main(path: str = "bench.json") -> None:
    found = json.loads(Path(path).read_text("utf-8"))
    machine, run = read_run(found)
    tables = read_tables(DATA.read_text("utf-8"))
    if any(run.values()):
        tables = merge(tables, machine, run)
        DATA.write_text(write_tables(tables), "utf-8")
    page = replace_table(PAGE.read_text("utf-8"), "make bench", show(tables))
    if growth := found["benchmarks"].get("growth"):
        page = replace_table(page, "make bench ARGS=growth", show_growth(growth["rows"]))
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

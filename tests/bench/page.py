"""``python -m tests.bench.page [bench.json]``: the newest run of each benchmark, as tables in docs/performance.md.

The benchmarks of one machine and one set of versions share a table. A benchmark's rows replace those of its last run.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.bench.frame import ROOT

PAGE = ROOT / "docs" / "performance.md"
BETWEEN = re.compile(r"(<!-- make bench -->\n)(.*)(<!-- end -->\n)", re.S)
COLUMNS = ("state", "figure", "ours", "unit", "of", "limit", "ratio", "reach", "met")

# The heads of these columns on the page.
HEADS = ("state", "figure", "measured", "unit", "compared with", "its value", "ratio", "target", "met")

# A machine's tables: a benchmark's rows in Markdown, by the benchmark's name.
Rows = dict[str, list[str]]


def read_tables(text: str) -> dict[str, Rows]:
    """Return the tables that the page has, by machine."""
    tables: dict[str, Rows] = {}
    rows: Rows = {}
    for line in filter(None, text.splitlines()):
        if not line.startswith("|"):
            rows = tables.setdefault(line, {})
        elif not line.startswith(("| benchmark |", "|---")):
            rows.setdefault(line.split(" | ")[0].removeprefix("| "), []).append(line)
    return tables


def read_run(found: dict[str, Any]) -> tuple[str, Rows]:
    """Return a run's machine, and the rows of every benchmark whose figures stand beside a limit."""
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    return machine, {
        name: [
            f"| {' | '.join([name, *('' if value is None else str(value) for value in row.values())])} |"
            for row in benchmark["rows"]
            if tuple(row) == COLUMNS
        ]
        for name, benchmark in found["benchmarks"].items()
    }


def write_tables(tables: dict[str, Rows]) -> str:
    """Return the tables as Markdown."""
    head = f"| benchmark | {' | '.join(HEADS)} |\n|{'---|' * (len(COLUMNS) + 1)}\n"
    return "\n".join(
        f"{machine}\n\n{head}" + "".join(f"{row}\n" for rows in benchmarks.values() for row in rows)
        for machine, benchmarks in tables.items()
    )


def merge(tables: dict[str, Rows], machine: str, run: Rows) -> dict[str, Rows]:
    """Return the tables with a run's rows in place of those of the same benchmarks; the run's machine comes first."""
    others = {each: {name: rows for name, rows in old.items() if name not in run} for each, old in tables.items()}
    merged = {machine: dict(sorted((others.pop(machine, {}) | run).items()))}
    return merged | {each: rows for each, rows in others.items() if rows}


def main(path: str = "bench.json") -> None:
    page = PAGE.read_text("utf-8")
    between = BETWEEN.search(page)
    assert between is not None
    tables = merge(read_tables(between[2]), *read_run(json.loads(Path(path).read_text("utf-8"))))
    PAGE.write_text(page.replace(between[2], write_tables(tables)), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""``python -m tests.bench.page [bench.json]``: the table in docs/performance.md is that of the run."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.bench.frame import ROOT

PAGE = ROOT / "docs" / "performance.md"
BETWEEN = re.compile(r"(<!-- make bench -->\n).*(<!-- end -->\n)", re.S)
COLUMNS = ("state", "figure", "ours", "unit", "of", "limit", "ratio", "reach", "met")


def make_table(found: dict[str, Any]) -> str:
    """The machine, and the rows of every benchmark whose figures stand beside a limit."""
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = [machine, "", f"| benchmark | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    for name, benchmark in found["benchmarks"].items():
        rows = [row for row in benchmark["rows"] if tuple(row) == COLUMNS]
        lines += [
            f"| {' | '.join([name, *('' if value is None else str(value) for value in row.values())])} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main(path: str = "bench.json") -> None:
    table = make_table(json.loads(Path(path).read_text()))
    PAGE.write_text(BETWEEN.sub(lambda found: f"{found[1]}{table}{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Columns of text for a terminal: names with values, and tables."""

from collections.abc import Mapping, Sequence

NARROWEST, WIDEST = 14, 40


def align(rows: Mapping[str, str], indent: str = "") -> list[str]:
    """Return one line for each name and its value. All values begin in one column, two spaces after the longest name.

    A name of more than 40 characters moves only its own value, so that the other lines fit a narrow terminal.
    """
    width = max([NARROWEST, *(len(name) for name in rows if len(name) <= WIDEST)])
    return [f"{indent}{name:{width}}  {value}" for name, value in rows.items()]


def tabulate(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines: the first column flush left, the others flush right, each as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        ).rstrip()
        for cells in rows
    ]

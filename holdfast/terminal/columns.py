"""Columns of text for a terminal: names with values, and tables."""

from collections.abc import Mapping, Sequence

NARROWEST, WIDEST = 14, 40


def align(rows: Mapping[str, str], indent: str = "") -> list[str]:
    """Return a line for each name with its value. All values begin in one column, two spaces after the longest name.

    A name of more than 40 characters shifts only its own value, so that the other lines fit a narrow terminal.
    """
    width = max([NARROWEST, *(len(name) for name in rows if len(name) <= WIDEST)])
    return [f"{indent}{name:{width}}  {value}" for name, value in rows.items()]


def tabulate(rows: Sequence[Sequence[str]], *, has_numbers: bool = True) -> list[str]:
    """Return a table's lines. Each column is as wide as its longest cell, so that the reader can copy every name.

    Args:
        has_numbers: whether to align all columns except the first on the right; otherwise all are aligned on the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust, *[str.rjust if has_numbers else str.ljust] * (len(widths) - 1)]
    columns = list(zip(pads, widths, strict=True))
    return [
        "  ".join(pad(cell, width) for cell, (pad, width) in zip(row, columns, strict=True)).rstrip() for row in rows
    ]

"""Names and values in two columns, for a terminal."""

from collections.abc import Mapping

NARROWEST, WIDEST = 14, 40


def align(rows: Mapping[str, str], indent: str = "") -> list[str]:
    """Return a line for each name and its value; the values begin in one column, two spaces after the longest name.

    A name of more than 40 characters moves only its own value, so that the others fit a narrow terminal.
    """
    width = max([NARROWEST, *(len(name) for name in rows if len(name) <= WIDEST)])
    return [f"{indent}{name:{width}}  {value}" for name, value in rows.items()]

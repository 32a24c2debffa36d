"""Two columns of text for a terminal: names and values."""

from collections.abc import Mapping

NARROWEST, WIDEST = 14, 40


def align(rows: Mapping[str, str], indent: str = "") -> list[str]:
    """Return one line for each name and its value. All values begin in one column, two spaces after the longest name.

    A name of more than 40 characters moves only its own value, so that the other lines fit a narrow terminal.
    """
    width = max([NARROWEST, *(len(name) for name in rows if len(name) <= WIDEST)])
    return [f"{indent}{name:{width}}  {value}" for name, value in rows.items()]

"""Text for people: what comes from a store or a recipe must not command the terminal that shows it."""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Control characters but for the tab and the line feed, halves of surrogate pairs, and what turns the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: int, what: str) -> str:
    """Return a number with its noun: ``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return a text with escapes in place of the characters that could command a terminal: ``\\x1b``."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Printable:
    """A stream for people in front of another one.

    Attributes:
        rich_proxied_file: the stream behind it, which rich writes its own colours and bars to.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write a text as `printable` returns it."""
        return self.rich_proxied_file.write(printable(text))

    def writelines(self, lines: "list[str]") -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Whatever the block prints, warns of or logs to the terminal is `printable`."""
    out, err = sys.stdout, sys.stderr
    ours: tuple[Any, Any] = Printable(out), Printable(err)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == ours:  # unless somebody has put others in their place
            sys.stdout, sys.stderr = out, err

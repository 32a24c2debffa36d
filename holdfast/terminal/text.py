"""Text for terminals: escapes for control characters in untrusted text, counted nouns, and durations."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

# Control characters except tab and line feed, halves of surrogate pairs, and characters that set the writing direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")

TIME = "%Y-%m-%d %H:%M:%S "


def counted(number: int, what: str) -> str:
    """Return a number with its noun: ``1 run``, ``2 runs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def stamp(stream: TextIO, at_s: float | None = None) -> str:
    """Return a time as the beginning of a line; empty for a terminal, and outside of a Slurm job.

    A Slurm job that is queued again appends to the same file.

    Args:
        stream: the stream of the line.
        at_s: the time in seconds since the epoch; None for now.
    """
    if not os.environ.get("SLURM_JOB_ID", "").isdecimal() or stream.isatty():
        return ""
    return time.strftime(TIME, time.localtime(at_s))


def spell_s(seconds: float) -> str:
    """Return a duration as a readable text: ``12 s``, ``5 min``, ``3 h``, ``4 days``."""
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def one_line(text: str) -> str:
    """Return a `printable` text in which tabs and line ends are escaped, too, for a cell of a table."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable(text: str) -> str:
    """Return a text with escapes, such as ``\\x1b``, for the characters that could control a terminal."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Printable:
    """A text stream that makes texts `printable` and writes them to another stream.

    Attributes:
        rich_proxied_file: the other stream. rich looks for an attribute of this name, and writes its colours and bars
            directly to that stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write a text after making it `printable`."""
        return self.rich_proxied_file.write(printable(text))

    def writelines(self, lines: "list[str]") -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Apply `printable` to everything that the block prints to the terminal, warnings and logs included."""
    out, err = sys.stdout, sys.stderr
    ours: tuple[Any, Any] = Printable(out), Printable(err)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        if (sys.stdout, sys.stderr) == ours:  # the block may have replaced the streams
            sys.stdout, sys.stderr = out, err

"""The command `watch`: a live view of a run, or of all runs of a store."""

import sys
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from holdfast.errors import WrongUse
from holdfast.extensions.watch.lines import follow
from holdfast.extensions.watch.reading import RunReader, StoreReader
from holdfast.extensions.watch.screen import show_live
from holdfast.journal import Journal
from holdfast.journal.finding import open_place
from holdfast.journal.runs import MOST_SHOWN
from holdfast.terminal.options import Limit

SHORTEST_S = 0.2


def watch_command(
    place: str, /, *, every: Annotated[float, Parameter(name="--every")] = 2.0, limit: Limit = None
) -> int:
    """Watch a run, or all runs of a store, as they train, from any machine that can read the store.

    On a terminal, show a live view until you press q. Elsewhere, print a line for each commit, and end when the run is
    complete. A poll without news costs one listing for each run.

    The exit code is 2 if a record of the run is damaged or lost.

    Args:
        place: <store>/<run>, or a store.
        every: Seconds between two polls.
        limit: How many runs of a store to watch, the newest first; runs that begin later are added. By default 100.
    """
    if not every >= SHORTEST_S:
        raise WrongUse(f"--every {every:g}: expected at least {SHORTEST_S} seconds")
    found = open_place(place)
    reader = RunReader(found) if isinstance(found, Journal) else StoreReader(found, limit or MOST_SHOWN)
    reader.begin()
    if isinstance(reader, StoreReader) and reader.note:
        print(f"{reader.note}; --limit watches more", file=sys.stderr)
    console = Console(highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        show_live(reader, console, every)
    else:
        for line in follow(reader, every):
            print(line, flush=True)
    runs = [reader.seen] if isinstance(reader, RunReader) else reader.seen
    return 2 if any(seen.missing for seen in runs) else 0

"""A live view of runs. The view reads only the runs' store, in few requests, and writes nothing."""

from holdfast.looking.watching.lines import follow
from holdfast.looking.watching.reading import RunReader, StoreReader
from holdfast.looking.watching.screen import show_live

__all__ = ["RunReader", "StoreReader", "follow", "show_live"]

"""A live view of runs. It reads their store alone, in few requests, and writes nothing."""

from holdfast.looking.watching.lines import follow
from holdfast.looking.watching.reading import RunReader, StoreReader
from holdfast.looking.watching.screen import show_live

__all__ = ["RunReader", "StoreReader", "follow", "show_live"]

"""A live view of runs, read from their store alone, in few requests and without writing anything."""

from holdfast.watching.lines import follow
from holdfast.watching.reading import RunReader, StoreReader
from holdfast.watching.screen import show

__all__ = ["RunReader", "StoreReader", "follow", "show"]

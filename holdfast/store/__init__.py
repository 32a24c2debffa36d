"""One interface for every storage that holds runs. `open_store` opens a store by its folder or URL."""

from holdfast.store.contract import PIECE_BYTES, Bytes, Store, Writer, checked
from holdfast.store.opening import open_store

__all__ = ["PIECE_BYTES", "Bytes", "Store", "Writer", "checked", "open_store"]

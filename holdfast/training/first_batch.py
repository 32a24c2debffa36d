"""A stream's first micro-batch, which is kept for the probe because a stream can't be read at an index."""

import base64
from collections.abc import Callable
from typing import Any

from holdfast import state
from holdfast.checkpoint import deserialize, serialize
from holdfast.errors import StateError

# The size of the largest batch that is kept. The limit is low, because each checkpoint's metadata contains the batch.
# With a larger batch the stream has no default probe.
LARGEST_BYTES = 2**18


class FirstBatch:
    """The main rank's part of a stream's first micro-batch.

    Attributes:
        text: the batch as a safetensors file in base64; empty if none is kept.
    """

    def __init__(self) -> None:
        self.text = ""
        self._is_over = False

    def keep(self, batch: Any, gather: Callable[[Any], list[Any]]) -> None:
        """Keep a copy of the batch if this is the first call. All ranks call it together.

        A batch isn't kept if it is too large, or contains values that only a pickle could save.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            data = b"".join(map(bytes, serialize(state.to_payload({"batch": batch}))))
        except StateError:
            data = b""
        self.text = gather(base64.b64encode(data).decode() if len(data) <= LARGEST_BYTES else "")[0]

    def read(self) -> Any:
        """Return a new copy of the batch."""
        payload = deserialize([base64.b64decode(self.text)])
        return state.from_payload(payload)["batch"]

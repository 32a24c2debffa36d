"""A stream's first micro-batch, kept for the probe: unlike map-style data, a stream can't be asked for it again."""

import base64
from collections.abc import Callable
from typing import Any

from holdfast import state
from holdfast.checkpoint import deserialize, serialize
from holdfast.errors import StateError

# It is part of every checkpoint's metadata. A larger one isn't kept, and the stream has no default probe.
LARGEST_BYTES = 2**18


class FirstBatch:
    """The main rank's part of a stream's first micro-batch.

    Attributes:
        text: its bytes, a safetensors file in base64; empty if there is none.
    """

    def __init__(self) -> None:
        self.text = ""
        self._is_over = False

    def keep(self, batch: Any, gather: Callable[[Any], list[Any]]) -> None:
        """Keep a copy of the first batch that this is called with. To be called by all ranks together.

        A batch that is too large, or has what can't be saved without a pickle, isn't kept.
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
        """Return the batch, in memory of its own each time."""
        payload = deserialize([base64.b64decode(self.text)])
        return state.from_payload(payload)["batch"]

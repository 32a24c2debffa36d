"""A state that is saved in several parts, and its save."""

from typing import Any

import torch

from holdfast import checkpoint
from holdfast.checkpoint import Saved
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS

PART_BYTES = 2**16
STATE: dict[str, Any] = {
    "model": {
        "embedding": torch.arange(64_000.0).reshape(1000, 64),  # four parts
        "head": (torch.arange(64_000) % 256).to(torch.bfloat16).reshape(64, 1000),  # two
        "norm": torch.ones(64),
        "row": torch.arange(40_000.0).reshape(1, -1),  # one row is larger than a part
    },
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
    "rng": (torch.arange(5000) % 251).to(torch.uint8),
}
PARTS = [f"checkpoint-{number:05d}-of-00008.safetensors" for number in range(1, 9)]


def save(folder: LocalStore, state: Any = STATE) -> Saved:
    """Save a state in parts of `PART_BYTES`."""
    return checkpoint.save(folder, to_payload(state), METADATA_FIELDS, "", PART_BYTES)

"""The device that tests of ranks train on: the CPU with gloo, or in `make test-gpus` a GPU for each rank, with NCCL."""

import os
from typing import Any

VARIABLE = "HOLDFAST_TEST_DEVICE"
DEVICE = os.environ.get(VARIABLE, "cpu")
ON_GPUS = DEVICE == "cuda"
# For tests of what a CPU doesn't have.
NEEDS_GPU = "it needs a GPU: make test-gpus"


def device_of(model: Any) -> Any:
    """Return the device that a model is on."""
    return next(model.parameters()).device

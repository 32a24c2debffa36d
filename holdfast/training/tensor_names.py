"""The names of a model's tensors."""

from typing import Any

from torch import nn


def list_saved_names(model: nn.Module) -> dict[str, Any]:
    """Return the model's parameters and saved buffers by name, including buffers that are None: a step may set them."""
    buffers = {
        f"{prefix}.{name}" if prefix else name: each
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, each in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return dict(model.named_parameters(remove_duplicate=False)) | buffers

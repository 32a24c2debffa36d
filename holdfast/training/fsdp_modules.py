"""The modules that torch's `fully_shard` (FSDP2) has sharded."""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def list_fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that `fully_shard` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a run without sharded modules needn't import torch's FSDP
    return [each for each in model.modules() if fsdp is not None and isinstance(each, fsdp.FSDPModule)]


def shard_again(modules: Iterable[Any]) -> None:
    """Shard modules again that are still gathered after a forward pass.

    By default FSDP2 keeps the outermost module gathered after a forward pass, because the backward pass needs it next.
    After an evaluation no backward pass follows. Without this call the model would then have different parameters than
    its optimizer.
    """
    for each in modules:
        each.reshard()

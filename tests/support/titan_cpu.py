"""torchtitan on a CPU: what its 0.3 lacks there, replaced for tests. Import it before anything of torchtitan's."""

import sys
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class _Kernels(ModuleType):
    """A module of Triton's kernels, none of which a CPU runs."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


sys.modules[KERNELS] = _Kernels(KERNELS)  # importing it imports triton
usual, torch._utils._get_available_device_type = torch._utils._get_available_device_type, lambda: "cpu"
import torchtitan.tools.utils  # noqa: E402  # reads the device's type: without a GPU it would be "cuda"

torch._utils._get_available_device_type = usual

import torchtitan.trainer  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402


def _attend(  # torchtitan's tensor parallelism finds the tensors by these names
    self: Any,
    q_BLNH: Any,  # noqa: N803
    k_BLNH: Any,  # noqa: N803
    v_BLNH: Any,  # noqa: N803
    *,
    attention_masks: Any,
    scale: Any = None,
    **options: Any,
) -> Any:
    """Compute FlexAttention's result, whose backward pass needs a GPU, with a dense mask."""
    q, k, v = (each.transpose(1, 2) for each in (q_BLNH, k_BLNH, v_BLNH))
    mask = create_mask(attention_masks.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    gqa = options.get("enable_gqa", False)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa).transpose(1, 2)


def _set_divide_factor(self: FSDPModule, factor: float) -> None:
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


class _Memory:
    """A monitor of a device's memory, which torch.cpu has no functions for."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        """Do nothing."""


metrics.build_device_memory_monitor = _Memory
_divide = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = _set_divide_factor  # type: ignore[method-assign]
FlexAttention.forward = _attend
torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **options: None  # its barrier takes the numbers of GPUs

"""The plugins of an `Accelerator` that a user's loop creates in addition to the run's own accelerator.

accelerate uses only the plugins of a process's first accelerator, which is the run's own. While the loop's function
runs, `Plugins` puts an FSDP2 plugin of a later accelerator into the state that all accelerators share, so that
``accelerator.prepare`` shards the model. It does so on CPUs, too, where accelerate without `Plugins` ignores an FSDP2
plugin.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn

from holdfast.checkpoint import shorten
from holdfast.config import RunConfig
from holdfast.errors import RecipeError
from holdfast.training.sharded.model import SHOWN_NAMES, list_whole

# Arguments that accelerate uses only from the first ``Accelerator`` of a process, by the name of the plugin's backend.
IGNORED = {"FSDP": "fsdp_plugin", "DEEPSPEED": "deepspeed_plugin", "MEGATRON_LM": "megatron_lm_plugin"}
FSDP2 = 2


class Plugins:
    """The plugins of the accelerators that a loop creates.

    Attributes:
        owner: the accelerator whose plugin is in use; the run's accelerator if no other accelerator has a plugin.
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator) -> None:
        """
        Args:
            accelerator: the run's accelerator.
        """
        self._config, self._accelerator = config, accelerator
        self.owner = accelerator

    @property
    def is_fsdp(self) -> bool:
        """Return whether accelerate shards the models that it prepares."""
        return bool(self._accelerator.distributed_type == DistributedType.FSDP)

    @contextlib.contextmanager
    def taken(self, located: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        """Use the FSDP2 plugin of each accelerator that the block creates.

        Args:
            located: returns a context that adds the user's file and line to the message of an error.
        """
        usual = Accelerator.__init__
        signature = inspect.signature(usual)

        @functools.wraps(usual)
        def init(accelerator: Accelerator, *arguments: Any, **options: Any) -> None:
            usual(accelerator, *arguments, **options)
            with located():
                self._take(accelerator, signature.bind(accelerator, *arguments, **options).arguments)

        Accelerator.__init__ = init
        try:
            yield
        finally:
            Accelerator.__init__ = usual

    def _take(self, accelerator: Accelerator, arguments: Mapping[str, Any]) -> None:
        """Take the FSDP2 plugin from a new accelerator's arguments, and set it in the state that accelerators share."""
        if accelerator.num_processes == 1:  # with one rank accelerate uses no plugins
            return
        if arguments.get("parallelism_config") is not None:
            raise RecipeError(
                "Accelerator(parallelism_config=...): accelerate takes it only from a process's first accelerator, and "
                "Holdfast has made one already",
                hint='set compute.mesh and compute.parallel = "fsdp", or pass a mesh to run.data_parallel(mesh)',
            )
        plugin = arguments.get("fsdp_plugin")
        if plugin is None and not self.is_fsdp and parse_flag_from_env("ACCELERATE_USE_FSDP"):
            plugin = FullyShardedDataParallelPlugin()  # reads the variables that `accelerate launch --use_fsdp` sets
        if plugin is None:
            return
        self._refuse(plugin)
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        self.owner = accelerator

    def _refuse(self, plugin: FullyShardedDataParallelPlugin) -> None:
        """Raise RecipeError if a run can't resume exactly with a plugin."""
        from torch.distributed.fsdp import CPUOffloadPolicy

        compute, torch_type = self._config.compute, torch._C._get_accelerator().type
        device = self._accelerator.device.type
        for problem, is_found, hint in (
            (f"fsdp_version={plugin.fsdp_version}: its flat parameters can't be saved in parts",
             plugin.fsdp_version != FSDP2, 'set fsdp_version=2; for a Trainer, fsdp_config={"version": 2}'),
            ("cpu_offload: a resume with parameters on the CPU and training on a GPU is untested",
             isinstance(plugin.cpu_offload, CPUOffloadPolicy), "leave it out"),
            ("fp16, whose GradScaler sees a shard of the gradient",
             self._accelerator.mixed_precision == "fp16", 'compute.mixed_precision = "bf16"'),
            (f"{compute.invariance}: the ranks then sum gradients in a different order",
             compute.is_rank_invariant, 'use run.wrap(model) and compute.parallel = "fsdp" instead of the plugin'),
            (f"the ranks train on {device}, and accelerate would shard the model over {torch_type}",
             device != torch_type, 'hide the GPUs from the run: CUDA_VISIBLE_DEVICES=""'),
        ):  # fmt: skip
            if is_found:
                raise RecipeError(f"FullyShardedDataParallelPlugin: {problem}", hint=hint)

    def check(self) -> None:
        """Raise RecipeError if accelerate ignores a plugin of one of the loop's accelerators.

        An accelerator with a plugin sets an environment variable, from which this method knows of the plugin.
        """
        if self._accelerator.num_processes == 1:
            return
        found = self._accelerator.distributed_type.value
        for name, argument in IGNORED.items():
            if found != name and parse_flag_from_env(f"ACCELERATE_USE_{name}"):
                raise RecipeError(
                    f"Accelerator({argument}=...): the ranks have an accelerator already, so accelerate ignores the "
                    f"plugin and prepares models for {found}",
                    hint="use Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)) in the loop, or "
                    'compute.parallel = "fsdp" and run.wrap(model)',
                )
        if self.is_fsdp:
            self._refuse(self._accelerator.state.fsdp_plugin)
            # Reduce the gradient of each micro-batch at once. Otherwise FSDP2 would keep an unreduced sum outside the
            # parameters' gradients, and no checkpoint would contain this sum.
            self._accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def check_trained(self, trained: Mapping[str, nn.Module]) -> None:
        """Raise RecipeError if the plugin hasn't sharded all parameters of a trained module."""
        for name, module in trained.items() if self.is_fsdp else ():
            if whole := list_whole(module):
                raise RecipeError(
                    f"{name} is trained, and Accelerator(fsdp_plugin=...) has left {shorten(whole, SHOWN_NAMES)} "
                    "unsharded: nothing would average its gradient",
                    hint=f"call accelerator.prepare({name}, optimizer), with a plugin without ignored_modules",
                )

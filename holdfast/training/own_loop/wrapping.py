"""The models that `Run.wrap` prepares for a user's loop, and the check that several ranks can train them."""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from holdfast.config import RunConfig
from holdfast.errors import RecipeError
from holdfast.training.data_ranks import DataRanks, gather_data_ranks, separate
from holdfast.training.devices import moves_model, required_of_ddp
from holdfast.training.optimizers import refuse_partitioned
from holdfast.training.own_loop.plugins import Plugins
from holdfast.training.sharded.model import (
    Parallelize,
    cut_model,
    find_data_ranks,
    is_cut,
    list_fsdp_modules,
    match_parameters,
)


class DataParallel:
    """The data ranks of a loop, from ``compute.mesh`` or from the mesh that the loop has set.

    Attributes:
        known: the data ranks; None if each rank trains different samples.
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        self.known = find_data_ranks(config, accelerator)
        self._is_used = False

    @property
    def ranks(self) -> DataRanks:
        """Return the data ranks."""
        return self.known or separate(self._accelerator)

    def use(self) -> int:
        """Return this rank's data rank, to be used in a seed. After this call `set_mesh` raises RecipeError."""
        self._is_used = True
        return self.ranks.number

    def set_mesh(self, mesh: Any) -> None:
        """Set the mesh whose ranks train different samples; see `Run.data_parallel`."""
        if self.known is not None or self._is_used:
            when = "after run.generator(...)" if self._is_used else "after the data ranks were fixed"
            raise RecipeError(
                f"run.data_parallel(...) was called {when}",
                hint="call it once, before run.generator(...); with compute.mesh don't call it",
            )
        self.known = gather_data_ranks(mesh, self._accelerator)


class Wrapping:
    """The models that a loop has wrapped, and the loop's data ranks.

    Attributes:
        data: the data ranks.
        plugins: the plugins of the accelerators that the loop creates.
        sharded: those modules of the kept models that FSDP2 shards; empty before the loop begins.
    """

    def __init__(self, config: RunConfig, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        self.data = DataParallel(config, accelerator)
        self.plugins = Plugins(config, accelerator)
        self.sharded: list[Any] = []
        self._placed: list[nn.Module] = []
        self._replaced: list[nn.Parameter] = []  # parameters that `wrap` has replaced by shards

    def wrap(self, model: nn.Module, parallelize: Parallelize | None) -> nn.Module:
        """Move a model to its device, and wrap or shard it; see `Run.wrap`."""
        before = dict(model.named_parameters(remove_duplicate=False))
        cut_model(self._config, model, self._accelerator, parallelize)
        replaced = match_parameters(before, model)
        self._replaced += [each for each in before.values() if id(each) in replaced]
        self._placed.append(model)
        is_bare = self._config.compute.is_rank_invariant or is_cut(self._config, self._accelerator)
        # DDP refuses a model, such as a teacher, in which no parameter requires a gradient.
        is_bare |= not any(each.requires_grad for each in model.parameters())
        if self.plugins.is_fsdp and not is_bare:
            raise RecipeError(
                "run.wrap(model): the script also has Accelerator(fsdp_plugin=...), so accelerate shards the models",
                hint="in place of run.wrap: model, optimizer = accelerator.prepare(model, optimizer)",
            )
        is_moved = moves_model(self._accelerator, model)
        wrapped = self._accelerator.prepare_model(model, device_placement=is_moved, evaluation_mode=is_bare)
        assert isinstance(wrapped, nn.Module)
        return wrapped

    def check_kept(self, objects: Mapping[str, Any]) -> None:
        """Raise RecipeError if a kept optimizer or DistributedDataParallel doesn't fit the models from `wrap`."""
        replaced = {id(each) for each in self._replaced}
        compute, required = self._config.compute, required_of_ddp(self._accelerator.num_processes)
        for name, each in objects.items():
            refuse_partitioned(f"run.keep({name}=...)", each)
            groups = each.param_groups if isinstance(each, optim.Optimizer) else []
            if any(id(parameter) in replaced for group in groups for parameter in group["params"]):
                raise RecipeError(
                    f"the optimizer {name!r} was built before run.wrap(model), so it still has the model's old "
                    "parameters",
                    hint="build the optimizer from the model that run.wrap returns",
                )
            if compute.is_rank_invariant and isinstance(each, DistributedDataParallel):
                raise RecipeError(
                    f"{compute.invariance}: {name!r} is a DistributedDataParallel, which sums gradients "
                    f"in a different order",
                    hint=f"use {name} = run.wrap({name}) instead",
                )
            if isinstance(each, DistributedDataParallel) and (lacking := _list_lacking(each, required)):
                raise RecipeError(
                    f"{name!r} is a DistributedDataParallel without {lacking}: with more than 2 ranks, it would sum "
                    "the gradients in a different order after a resume",
                    hint=f"use {name} = run.wrap(...) instead of DistributedDataParallel(...)",
                )

    def check_trained(self, trained: Mapping[str, nn.Module]) -> None:
        """Raise RecipeError if a trained module isn't sharded: its gradients would not be summed over the ranks."""
        self.plugins.check_trained(trained)
        compute = self._config.compute
        is_needed = compute.is_rank_invariant and is_cut(self._config, self._accelerator)
        for name, module in trained.items() if is_needed else ():
            if not any(module is each for each in self._placed) and not list_fsdp_modules(module):
                raise RecipeError(
                    f"{compute.invariance}: {name!r} is trained, and run.wrap has not sharded it",
                    hint=f"call {name} = run.wrap({name}) before you build the optimizer",
                )


def _list_lacking(model: DistributedDataParallel, required: Mapping[str, bool]) -> str:
    """Return the required options that a DistributedDataParallel lacks, written as arguments; empty if it has all."""
    return ", ".join(f"{name}={value}" for name, value in required.items() if getattr(model, name) != value)

"""The models that `Run.wrap` prepares for a user's loop, and the check that several ranks can train them."""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from holdfast.config import RunConfig
from holdfast.errors import RecipeError
from holdfast.training.devices import required_of_ddp
from holdfast.training.sharded.model import cut_model, is_cut


class Wrapping:
    """The models of one loop."""

    def __init__(self, config: RunConfig, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        self._placed: list[nn.Module] = []
        self._replaced: list[nn.Parameter] = []  # the parameters before `wrap`, which shards have replaced

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move a model to its device, and wrap or shard it; see `Run.wrap`.

        Raises:
            RecipeError: the model is on the meta device, and a module has no ``reset_parameters``.
        """
        before = list(model.parameters())
        cut_model(self._config, model, self._accelerator)
        now = {id(each) for each in model.parameters()}
        self._replaced += [each for each in before if id(each) not in now]
        self._placed.append(model)
        is_bare = bool(self._config.compute.virtual_ranks) or is_cut(self._config, self._accelerator)
        is_bare |= not any(each.requires_grad for each in model.parameters())  # a teacher, say: DDP refuses it
        wrapped = self._accelerator.prepare_model(model, evaluation_mode=is_bare)
        assert isinstance(wrapped, nn.Module)
        return wrapped

    def check_kept(self, objects: Mapping[str, Any]) -> None:
        """Raise RecipeError if kept objects don't fit the models as they are now."""
        replaced = {id(each) for each in self._replaced}
        shares, required = self._config.compute.virtual_ranks, required_of_ddp(self._accelerator.num_processes)
        for name, each in objects.items():
            groups = each.param_groups if isinstance(each, optim.Optimizer) else []
            if any(id(parameter) in replaced for group in groups for parameter in group["params"]):
                raise RecipeError(
                    f"the optimizer {name!r} was built before run.wrap(model), which gave the model other parameters",
                    hint="build it from the model that run.wrap returns",
                )
            if shares and isinstance(each, DistributedDataParallel):
                raise RecipeError(
                    f"compute.virtual_ranks = {shares}: {name!r} is a DistributedDataParallel, which sums gradients in "
                    "an order of its own",
                    hint=f"{name} = run.wrap({name}) in its place",
                )
            if isinstance(each, DistributedDataParallel) and (lacking := _list_lacking(each, required)):
                raise RecipeError(
                    f"{name!r} is a DistributedDataParallel without {lacking}: with more than 2 ranks, a resumed run "
                    "would sum its gradients in another order",
                    hint=f"{name} = run.wrap(...) in place of DistributedDataParallel(...)",
                )

    def check_trained(self, trained: Mapping[str, nn.Module]) -> None:
        """Raise RecipeError if virtual ranks can't sum the gradients of a module: it has no blocks of `wrap`."""
        shares = self._config.compute.virtual_ranks
        for name, module in trained.items() if shares and is_cut(self._config, self._accelerator) else ():
            if not any(module is each for each in self._placed):
                raise RecipeError(
                    f"compute.virtual_ranks = {shares}: {name!r} is trained, and run.wrap has not sharded it",
                    hint=f"{name} = run.wrap({name}) before its optimizer is built",
                )


def _list_lacking(model: DistributedDataParallel, required: Mapping[str, bool]) -> str:
    """Return the options that a model lacks, as its maker would write them; empty if it lacks none."""
    return ", ".join(f"{name}={value}" for name, value in required.items() if getattr(model, name) != value)

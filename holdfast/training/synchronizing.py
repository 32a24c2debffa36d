"""The synchronization of modules that no DDP wraps: the model of ``Recipe(step=...)``, and extras.

Gradients are averaged before an optimizer steps, and each step begins with the main rank's buffers, as in DDP.
`holdfast.training.program` wraps all other models in DDP.
"""

import torch
from torch import nn

from holdfast.errors import RecipeError
from holdfast.recipe import Recipe
from holdfast.training.cooperation import Cooperation
from holdfast.training.optimizers import complete_hooks, list_stepped, parts_of


class Synchronized:
    """The modules that several ranks train together without DDP. With one rank, nothing is synchronized.

    Attributes:
        modules: the modules.
    """

    def __init__(self, recipe: Recipe, ranks: Cooperation) -> None:
        """
        Raises:
            RecipeError: ``synchronized`` names an extra that is no module; or the recipe's optimizer steps an extra
                that ``synchronized`` doesn't name.
        """
        extras = {name: each for name, each in recipe.extras.items() if isinstance(each, nn.Module)}
        for name in recipe.synchronized:
            if name not in extras:
                raise RecipeError(f"Recipe(synchronized=...): there is no module {name!r} in Recipe(extras=...)")
        self.modules: list[nn.Module] = [extras[name] for name in recipe.synchronized]
        if recipe.step is not None:
            self.modules.append(recipe.model)
        self._ranks = ranks
        if ranks.number == 1:
            return
        self._own = {id(each) for module in self.modules for each in module.parameters()}
        stepped = {id(each) for each in list_stepped(recipe.optimizer)}
        for name, module in extras.items():
            if name not in recipe.synchronized and any(id(each) in stepped for each in module.parameters()):
                raise RecipeError(
                    f"the recipe's optimizer trains the extra {name!r}, but nothing averages its gradients over the "
                    "ranks",
                    hint=f'set Recipe(synchronized=["{name}"]), which averages them',
                )
        others = [each for each in recipe.extras.values() if isinstance(each, torch.optim.Optimizer)]
        for optimizer in (*parts_of(recipe.optimizer), *others):
            complete_hooks(optimizer)
            optimizer.register_step_pre_hook(self._average)

    def share_buffers(self) -> None:
        """Copy the main rank's buffers to all ranks; see `Cooperation.share_buffers`."""
        for module in self.modules:
            self._ranks.share_buffers(module)

    def _average(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Average an optimizer's gradients over the ranks. This hook is called before the optimizer's ``step()``."""
        own = [each for each in list_stepped(optimizer) if id(each) in self._own and each.requires_grad]
        for kind in dict.fromkeys((each.dtype, each.device) for each in own):
            self._average_alike([each for each in own if (each.dtype, each.device) == kind])

    def _average_alike(self, parameters: list[nn.Parameter]) -> None:
        # A parameter may have a gradient in only some of the ranks. So `flat` ends with a flag for each parameter. The
        # flag's mean is the fraction of the ranks with a gradient.
        has = torch.tensor([each.grad is not None for each in parameters], device=parameters[0].device)
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
        flat = torch.cat([*(each.flatten() for each in grads), has.to(grads[0].dtype)])
        flat = self._ranks.accelerator.reduce(flat, "mean")
        means = flat.split([*(each.numel() for each in grads), len(parameters)])
        for parameter, mean, share in zip(parameters, means[:-1], means[-1].tolist(), strict=True):
            if share:
                parameter.grad = mean.view_as(parameter).clone()

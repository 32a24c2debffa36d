"""The modules that steps change and that no checkpoint contains, such as an average of the weights.

Such a module is a product of the training, even if no step reads it: an evaluation or the code after the loop does. So
a run warns of it at its first save.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from holdfast.checkpoint.found import Found
from holdfast.recipe import Recipe
from holdfast.state import is_sharded, local_of
from holdfast.state.checksum import checksum_together
from holdfast.training.forgotten_state.search import find_modules

# Checksums of modules, by the modules' names.
Sums = Mapping[str, int]


def sum_unkept(recipe: Recipe) -> Sums:
    """Return a checksum of each module that the program can reach and that no checkpoint contains."""
    return {found.name: sums for found, module in _list_modules(recipe) if (sums := _sum_up(module))}


def describe_products(recipe: Recipe, before: Sums) -> list[str]:
    """Return a warning for each module outside of checkpoints that has changed.

    Args:
        before: the result of `sum_unkept` before the first step.
    """
    changed = [
        found
        for found, module in (_list_modules(recipe) if before else ())
        if found.name in before and _sum_up(module) != before[found.name]
    ]
    return [
        f"{found.place}steps change {found.name} ({found.kind}), and no checkpoint contains it, so a resumed run would "
        f"continue with another one: {found.remedy}"
        for found in changed
    ]


def _list_modules(recipe: Recipe) -> list[tuple[Found, nn.Module]]:
    try:
        return find_modules(recipe)
    except Exception:  # an error of the user's objects that only a search meets must not end a run
        return []


def _sum_up(module: nn.Module) -> int:
    """Return a checksum of a module's tensors; 0 if there is none, or if they can't be read."""
    try:
        own = [local_of(each) if is_sharded(each) else each for each in (*module.parameters(), *module.buffers())]
        return checksum_together([each.detach() for each in own if _is_readable(each)])
    except Exception:  # a lazy parameter, or a tensor of the user's class
        return 0


def _is_readable(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > 0

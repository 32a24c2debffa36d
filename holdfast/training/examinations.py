"""Examinations of a built training: which values can its program reach that no checkpoint contains?

They search the program's functions and objects (`forgotten_state`). The search is imported only when it has something
to find or to compare: most runs never need it.
"""

import gc
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from holdfast.recipe import Recipe
from holdfast.training.kept import list_contained

if TYPE_CHECKING:
    from holdfast.checkpoint.found import Found
    from holdfast.training.forgotten_state.search import Searched

# named as text and imported late; see above
SEARCH = "holdfast.training.forgotten_state.search"
PRODUCTS = "holdfast.training.forgotten_state.products"


def examine_recipe(recipe: Recipe) -> "Searched":
    """Search for the values that a recipe or a loop can reach and that no checkpoint contains. Return them."""
    searched: Searched = pkgutil.resolve_name(f"{SEARCH}:find_forgotten")(recipe)
    return searched


def examine_parameter(recipe: Recipe, parameter: Tensor) -> "Found | None":
    """Return the module that contains a parameter, if no checkpoint contains that module; otherwise None."""
    found: Found | None = pkgutil.resolve_name(f"{SEARCH}:find_holder")(recipe, parameter)
    return found


def sum_outside_modules(recipe: Recipe) -> Mapping[str, int]:
    """Return a checksum of each module that the program can reach and that no checkpoint contains, by its name."""
    if not _has_outside_modules(recipe):
        return {}
    sums: Mapping[str, int] = pkgutil.resolve_name(f"{PRODUCTS}:sum_unkept")(recipe)
    return sums


def compare_outside_modules(recipe: Recipe, before: Mapping[str, int]) -> list[str]:
    """Return a warning for each module that no checkpoint contains and that steps have changed.

    Args:
        before: the result of `sum_outside_modules` before the first step.
    """
    warnings: list[str] = pkgutil.resolve_name(f"{PRODUCTS}:describe_products")(recipe, before) if before else []
    return warnings


def _has_outside_modules(recipe: Recipe) -> bool:
    """Return whether this process has a module with tensors that are in none of the recipe's own modules."""
    contained = (recipe.model, *recipe.extras.values(), *list_contained(recipe).values())
    own = {id(tensor) for each in contained if isinstance(each, nn.Module) for tensor in _list_tensors(each)}
    return any(id(tensor) not in own for each in _list_modules() for tensor in _list_tensors(each, recurse=False))


def _list_modules() -> list[nn.Module]:
    """Return all modules of this process."""
    # `gc.get_objects` leaves out frozen objects, and a rank freezes the objects that its recipe has built.
    is_frozen, is_enabled = gc.get_freeze_count() > 0, gc.isenabled()
    gc.disable()  # a garbage collection that includes all of them would take 0.2 s
    gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    if is_enabled:
        gc.enable()
    # Look at the class and not at `isinstance`, which runs code of objects that stand for others.
    kinds = {kind for kind in {*map(type, found)} if issubclass(kind, nn.Module)}
    return [each for each in found if type(each) in kinds]


def _list_tensors(module: nn.Module, *, recurse: bool = True) -> list[Any]:
    try:
        return [*module.parameters(recurse), *module.buffers(recurse)]
    except Exception:  # a module of the user's that isn't finished, or has methods of its own: leave it to the search
        return [module]

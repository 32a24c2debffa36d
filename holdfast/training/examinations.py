"""Examinations of a built training: which values can its program reach that no checkpoint contains?

They search the program's functions and objects (`forgotten_state`). The search is imported only when it has something
to find or to compare: most runs never need it.
"""

import gc
import pkgutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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


@dataclass
class OutsideCopies:
    """The copies of the weights that the program can reach and that no checkpoint contains, such as an average.

    Attributes:
        before: a checksum of each copy before the first step, by the copy's name, without those that were warned of.
        saves: the number of saves since then.
    """

    before: dict[str, int] = field(default_factory=dict)
    saves: int = 0

    def warn(self, recipe: Recipe) -> list[str]:
        """Return a warning for each copy that steps have changed. Call it at each save; it warns of a copy once.

        A copy may change in few steps only. Reading all of them takes time, so that happens at the saves 1, 2, 4, 8 and
        so on.
        """
        self.saves += 1
        if not self.before or self.saves & (self.saves - 1):
            return []
        found: dict[str, str] = pkgutil.resolve_name(f"{PRODUCTS}:describe_products")(recipe, self.before)
        self.before = {name: checksum for name, checksum in self.before.items() if name not in found}
        return [*found.values()]


def find_outside_copies(recipe: Recipe) -> OutsideCopies:
    """Return the copies of the weights that the program can reach and that no checkpoint contains."""
    if not _has_outside_copies(recipe):
        return OutsideCopies()
    return OutsideCopies({**pkgutil.resolve_name(f"{PRODUCTS}:sum_unkept")(recipe)})


def _has_outside_copies(recipe: Recipe) -> bool:
    """Return whether this process may have a copy of the recipe's weights that is in none of the recipe's own modules.

    Such a copy is a module with tensors, or tensors with the shapes of all parameters of a module.
    """
    contained = (recipe.model, *recipe.extras.values(), *list_contained(recipe).values())
    modules = [each for each in contained if isinstance(each, nn.Module)]
    own = {id(tensor) for each in modules for tensor in _list_tensors(each)}
    found = _list_objects((nn.Module, Tensor))
    if any(id(tensor) not in own for each in found[nn.Module] for tensor in _list_tensors(each, recurse=False)):
        return True
    outside = _count_shapes(each for each in found[Tensor] if id(each) not in own)
    wanted = [[each for each in module.parameters() if each.requires_grad] for module in modules]
    return any(len(each) > 1 and _count_shapes(each) <= outside for each in wanted)


def _count_shapes(tensors: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(each.shape) for each in tensors if not is_lazy(each))


def _list_objects(kinds: tuple[type, ...]) -> dict[type, list[Any]]:
    """Return all objects of this process that are instances of a class, for each of some classes."""
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
    classes = {*map(type, found)}
    chosen = {kind: {each for each in classes if issubclass(each, kind)} for kind in kinds}
    return {kind: [each for each in found if type(each) in chosen[kind]] for kind in kinds}


def _list_tensors(module: nn.Module, *, recurse: bool = True) -> list[Any]:
    try:
        return [*module.parameters(recurse), *module.buffers(recurse)]
    except Exception:  # a module of the user's that isn't finished, or has methods of its own: leave it to the search
        return [module]

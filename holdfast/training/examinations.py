"""Examinations of a built training: which values can its program reach that no checkpoint contains?

They search the program's functions and objects (`forgotten_state`). The search is imported only in a rank that trains.
"""

import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from holdfast.recipe import Recipe

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

    def find_changed(self, recipe: Recipe) -> dict[str, str]:
        """Return a warning for each copy that steps have changed, by the copy's name. Call it at each save.

        Each copy is returned once.

        A copy may change in few steps only. Reading all of them takes time, so that happens at the saves 1, 2, 4, 8 and
        so on.
        """
        self.saves += 1
        if not self.before or self.saves & (self.saves - 1):
            return {}
        found: dict[str, str] = pkgutil.resolve_name(f"{PRODUCTS}:describe_products")(recipe, self.before)
        self.before = {name: checksum for name, checksum in self.before.items() if name not in found}
        return found


def find_outside_copies(recipe: Recipe) -> OutsideCopies:
    """Return the copies of the weights that the program can reach and that no checkpoint contains."""
    return OutsideCopies({**pkgutil.resolve_name(f"{PRODUCTS}:sum_unkept")(recipe)})

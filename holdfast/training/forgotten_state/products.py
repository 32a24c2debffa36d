"""The copies of weights that steps change and that no checkpoint contains, such as an average of the weights.

Such a copy is a module, or a list or dict of tensors with the shapes of the model's parameters. It is a product of the
training, even if no step reads it: an evaluation or the code after the loop does. So a run warns of it at its first
save.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from holdfast.checkpoint.found import Found
from holdfast.recipe import Recipe
from holdfast.state import is_sharded, local_of
from holdfast.state.checksum import checksum_together
from holdfast.training.forgotten_state.search import find_copies

# Checksums of copies, by the copies' names.
Sums = Mapping[str, int]


def sum_unkept(recipe: Recipe) -> Sums:
    """Return a checksum of each copy that the program can reach and that no checkpoint contains."""
    return {found.name: sums for found, tensors in _list_copies(recipe) if (sums := _sum_up(tensors))}


def describe_products(recipe: Recipe, before: Sums) -> dict[str, str]:
    """Return a warning for each copy outside of checkpoints that has changed, by the copy's name.

    Args:
        before: the result of `sum_unkept` before the first step.
    """
    return {
        found.name: found.warning
        for found, tensors in _list_copies(recipe)
        if found.name in before and _sum_up(tensors) != before[found.name]
    }


def _list_copies(recipe: Recipe) -> Sequence[tuple[Found, Iterable[Tensor]]]:
    try:
        return find_copies(recipe)
    except Exception:  # an error of the user's objects that only a search meets must not end a run
        return []


def _sum_up(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of tensors; 0 if there is none, or if they can't be read."""
    try:
        own = [local_of(each) if is_sharded(each) else each for each in tensors]
        return checksum_together([each.detach() for each in own if _is_readable(each)])
    except Exception:  # a lazy parameter, or a tensor of the user's class
        return 0


def _is_readable(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.untyped_storage().nbytes() > 0

"""The only module that uses torchdata: its ``StatefulDataLoader``, which can save its position, and its nodes.

torchdata 0.11, its newest release, was made for torch 2.6. Its maintainers want to move the saved position into torch's
own `DataLoader`: https://github.com/pytorch/pytorch/issues/166732. When the oldest torch in pyproject.toml has a
`DataLoader` that saves its position, make these changes:

- Let `make_loader` in `holdfast.data.workers` make torch's `DataLoader`, and let `is_begun` check that class.
- Remove torchdata from the dependencies, from `VERSIONS` in `holdfast.provenance.recorded`, from the environment and
  its contract, and from pytest's filter of the warning of `set_vital`. A saved environment that names torchdata stays
  readable.
- Keep the functions about nodes, without an import of torchdata, for users who have torchdata installed.
"""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import RecipeError

__all__ = ["StatefulDataLoader", "is_begun", "restart_never", "walk_nodes"]

# The private attributes of a StatefulDataLoader: its iterator, and whether a read of the state has created the
# iterator.
ITERATOR, IS_OF_STATE = "_iterator", "_initial_iter_for_state_dict"


def is_begun(loader: Any) -> bool:
    """Return whether an iteration over a StatefulDataLoader has begun; False for any other value.

    A read of a StatefulDataLoader's state creates an iterator, too, which the next ``iter`` uses; it doesn't count as
    begun.

    Raises:
        RecipeError: in this version of torchdata the loader lacks the attributes that show whether an iteration has
            begun.
    """
    if isinstance(loader, StatefulDataLoader) and not (hasattr(loader, ITERATOR) and hasattr(loader, IS_OF_STATE)):
        raise RecipeError(
            f"torchdata {version('torchdata')}: its StatefulDataLoader has no {ITERATOR} or no {IS_OF_STATE}, so "
            f"Holdfast can't tell whether its iterator was made before the loop",
            hint="install torchdata 0.11",
        )
    return getattr(loader, ITERATOR, None) is not None and not getattr(loader, IS_OF_STATE, True)


def walk_nodes(node: Any) -> Iterator[Any]:
    """Yield all nodes in a graph of torchdata's nodes. The given loader or node comes first."""
    if type(node).__module__.startswith("torchdata.nodes"):
        yield node
        for inner in vars(node).values():
            yield from walk_nodes(inner)


def restart_never(data: Any) -> None:
    """Keep a ``torchdata.nodes.Loader`` from restarting at the end of a pass.

    With restarts the loader would begin the next pass before a batch is requested. If a run resumed at the end of a
    pass, the loader's state would then never change.
    """
    if hasattr(data, "restart_on_stop_iteration"):
        data.restart_on_stop_iteration = False

"""The only module that uses torchdata: its loader, whose state is its position, and facts about loaders and nodes.

torchdata 0.11, its newest release, was made for torch 2.6. Its maintainers want this state in torch's own `DataLoader`:
https://github.com/pytorch/pytorch/issues/166732. Once the oldest torch in pyproject.toml has that, these change:

- `make_loader` in `holdfast.data.workers` makes torch's `DataLoader`, and `is_begun` looks at that one.
- torchdata leaves the dependencies, `VERSIONS` in `holdfast.provenance.recorded`, the environment and its contract, and
  pytest's filter of the warning of `set_vital`. A saved environment that names it stays readable.
- What stands here of nodes stays, without an import, for users who have torchdata themselves.
"""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import RecipeError

__all__ = ["StatefulDataLoader", "is_begun", "restart_never", "walk_nodes"]

# The private attributes of a StatefulDataLoader: its iterator, and whether reading the state has made the iterator.
ITERATOR, IS_OF_STATE = "_iterator", "_initial_iter_for_state_dict"


def is_begun(loader: Any) -> bool:
    """Return whether an iteration over a StatefulDataLoader has begun; False for any other value.

    Reading a StatefulDataLoader's state makes an iterator, too, which the next ``iter`` takes.

    Raises:
        RecipeError: this version of torchdata doesn't tell.
    """
    if isinstance(loader, StatefulDataLoader) and not (hasattr(loader, ITERATOR) and hasattr(loader, IS_OF_STATE)):
        raise RecipeError(
            f"torchdata {version('torchdata')}: its StatefulDataLoader has no {ITERATOR} or no {IS_OF_STATE}, so nobody"
            " can tell whether its iterator was made before the loop",
            hint="install torchdata 0.11",
        )
    return getattr(loader, ITERATOR, None) is not None and not getattr(loader, IS_OF_STATE, True)


def walk_nodes(node: Any) -> Iterator[Any]:
    """Yield the nodes of a graph of torchdata's nodes, from its loader on."""
    if type(node).__module__.startswith("torchdata.nodes"):
        yield node
        for inner in vars(node).values():
            yield from walk_nodes(inner)


def restart_never(data: Any) -> None:
    """Keep torchdata's ``Loader`` of nodes from restarting at the end of a pass.

    It would begin the next pass before anybody asks; after a resume exactly there, its state then never changes.
    """
    if hasattr(data, "restart_on_stop_iteration"):
        data.restart_on_stop_iteration = False

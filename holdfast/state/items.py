"""The form in which the items of a kept container (an argument of `run.keep`) are saved.

`holdfast.state.reading` produces this form, and `holdfast.state.writing` restores the items from it.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from holdfast.errors import StateError
from holdfast.state.classes import FACTORIES
from holdfast.state.originals import Path

# The classes of containers that are saved with their class's name. A resume creates a container of the saved class
# if it can't restore the container in place.
KINDS: dict[str, Callable[[], Any]] = {"OrderedDict": OrderedDict, "Counter": Counter}
PLAIN_KINDS = (dict, list, deque, defaultdict, OrderedDict, Counter)
# An item that refers to a tensor of a kept module is saved as a dict of one of these keys and the tensor's name. SAME:
# the item is this tensor. DETACHED: the item is another tensor with the same memory.
SAME, DETACHED = "same", "detached"
# If an item differs from the original at its place, a dict with these two keys is saved: the item, and the differences.
# An original is an object that the container had when the loop began.
ITEM, HOW = "item", "how"
# The differences of a saved item from the original at its place. NEW: the item replaces the original. MOVED: the item
# is the original of another place or container. AGAIN: the item is an object that this save has already read at another
# place. VIEW: the item is a view of another value. LEARNS: the item is a tensor that requires a gradient. CLASS: the
# item is a parameter. DEVICE: the item is on another device. SWITCHES: the item is a new module with
# its own switches; see `forms.read_switches`. MAKE: the item is a new generator of a different kind than the original,
# or at a place without an original; see `generators.name_generator`.
NEW, MOVED, AGAIN, VIEW, LEARNS, CLASS, DEVICE = "new", "moved", "again", "view", "learns", "class", "device"
SWITCHES, MAKE = "switches", "make"


def sort_keys(keys: list[Any]) -> list[Any]:
    """Return the keys of a mapping, sorted, so that the order doesn't depend on the mapping's own order."""
    return sorted(keys, key=lambda key: (type(key).__name__, str(key)))


def inside(path: Path | None, key: Any) -> Path | None:
    return None if path is None else (*path, key)


def remake(value: Any, items: Iterable[Any]) -> Any:
    """Return a tuple with these items, of the same class as ``value``: plain or named."""
    return tuple(items) if type(value) is tuple else value._make(items)


def describe_kind(container: Any) -> dict[str, Any]:
    """Return the properties of a container that are saved besides its items, such as a deque's ``maxlen``."""
    if isinstance(container, deque):
        return {"maxlen": container.maxlen}
    if isinstance(container, defaultdict):
        return {"factory": getattr(container.default_factory, "__name__", None)}
    return {"kind": type(container).__name__} if type(container).__name__ in KINDS else {}


def kind_in(state: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in state.items() if key != "value"} | {"is": isinstance(state["value"], dict)}


def make_container(state: dict[str, Any]) -> Any:
    """Return an empty container of the kind that was saved."""
    if "maxlen" in state:
        return deque(maxlen=state["maxlen"])
    if isinstance(state["value"], list):
        return []
    if "factory" in state:
        if state["factory"] is not None and state["factory"] not in FACTORIES:
            raise StateError(
                f"a kept container has a new defaultdict that calls {state['factory']}, which a resume couldn't make "
                "again",
                hint="make the defaultdict before run.keep, or use a plain dict with setdefault",
            )
        return defaultdict(FACTORIES.get(state["factory"] or ""))
    return KINDS.get(state.get("kind", ""), dict)()


def overlaps(value: Any) -> bool:
    """Return whether elements of a tensor or an array share memory with each other, as after ``expand``."""
    strides = value.stride() if isinstance(value, Tensor) else value.strides
    return any(not stride and size > 1 for stride, size in zip(strides, value.shape, strict=True))


def can_make(container: Any) -> bool:
    """Return whether `make_container` makes an empty container of the same kind."""
    make = getattr(container, "default_factory", None)
    return type(container) in PLAIN_KINDS and (make is None or FACTORIES.get(getattr(make, "__name__", "")) is make)

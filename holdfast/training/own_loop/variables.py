"""The variables of the functions that are running a user's loop."""

import gc
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import RecipeError
from holdfast.training.forgotten_state.carried import find_carried, find_constants
from holdfast.training.forgotten_state.digests import is_iterator
from holdfast.training.kept import Variable

# The frames of the functions that are running a loop, innermost first.
Frames = Sequence[types.FrameType]


def list_carried(frames: Frames) -> Iterator[Variable]:
    """Yield the variables that a function's loop leaves to its next iteration; outside of a loop, all variables."""
    for frame in frames:
        carried = find_carried(frame)
        for name, value in frame.f_locals.items():
            if carried is None or name in carried:
                yield Variable(name, value, _describe_place(frame, carried[name]) if carried else "")


def list_iterators(frames: Frames, given: Mapping[str, Iterator[Any]], roots: Mapping[str, str]) -> Iterator[Variable]:
    """Yield the built-in iterators, such as ``enumerate``, that the loop has put around the run's iterators.

    Leave out an ``enumerate`` in a loop that reads `Run.batch_number`: after a resume it begins with this number.

    Args:
        given: the iterators that the run has returned, by the names of the methods of `Run` that returned them.
        roots: by the same names, the `Variable.root` to set for an iterator around the run's iterator.
    """
    place = _describe_place(frames[0], frames[0].f_lineno) if frames else ""
    is_numbered = any("batch_number" in frame.f_code.co_names for frame in frames)
    for each in filter(is_iterator, gc.get_referrers(*given.values())):
        if is_numbered and isinstance(each, enumerate):
            continue
        inside = {id(inner) for inner in gc.get_referents(each)}
        method = next(method for method, iterator in given.items() if id(iterator) in inside)
        yield Variable(f"{type(each).__name__}(run.{method}(...))", each, place, roots[method])


def read_constants(frames: Frames) -> dict[str, Any]:
    """Return the values that the loop reads and never assigns, by name."""
    return {name: each.f_locals[name] for each in frames for name in sorted(find_constants(each) & {*each.f_locals})}


class Holders:
    """The variables and attributes of a loop whose value was a kept object when the loop began."""

    def __init__(self, frames: Frames, kept: Iterable[Any]) -> None:
        known = {id(each) for each in kept}
        self._found = [
            (variable, frame)
            for frame in frames
            for name, line in (find_carried(frame) or {}).items()
            if id((variable := Variable(name, _read(frame, name), _describe_place(frame, line))).value) in known
        ]

    def check(self, step: int) -> None:
        """Raise RecipeError if a step has assigned a new object to a variable that held a kept object.

        No checkpoint contains the new object.
        """
        for variable, frame in self._found:
            name = variable.name
            if _read(frame, name) is not variable.value:
                raise RecipeError(
                    f"{variable.place}{name} is kept, and step {step} has put another object in its place, which no "
                    "checkpoint would have",
                    hint=f"change it in place, for example {name}[:] = ... or {name}.copy_(...); or keep a "
                    "dict that holds it",
                )


def _read(frame: types.FrameType, name: str) -> Any:
    """Return the value of a running function's variable, or of an attribute such as ``self.best``; None if missing."""
    variable, _, attribute = name.partition(".")
    value = frame.f_locals.get(variable)
    return vars(value).get(attribute) if attribute and hasattr(value, "__dict__") else None if attribute else value


def _describe_place(frame: types.FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line}: "

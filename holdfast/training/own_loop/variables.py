"""The variables of the functions that are running a user's loop."""

import gc
import inspect
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
        for name, value in read_locals(frame).items():
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
    found = [(each, read_locals(each)) for each in frames]
    return {name: values[name] for each, values in found for name in sorted(find_constants(each) & {*values})}


def read_locals(frame: types.FrameType) -> dict[str, Any]:
    """Return a running function's variables, by name.

    Before Python 3.13 a frame keeps the dict that it returns, and so the values, such as a step's batch and loss, until
    somebody asks again. So empty that dict. (The dict of a module's or class's body is the variables themselves.)
    """
    own, found = frame.f_locals, dict(frame.f_locals)
    if isinstance(own, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        own.clear()
    return found


class Holders:
    """The variables and attributes of a loop whose value was a kept object when the loop began."""

    def __init__(self, frames: Frames, kept: Iterable[Any]) -> None:
        self._checked = 0
        known = {id(each) for each in kept}
        self._found = [
            (variable, frame)
            for frame in frames
            for name, line in (find_carried(frame) or {}).items()
            if id((variable := Variable(name, _read(frame, name), _describe_place(frame, line))).value) in known
        ]

    def check(self, step: int) -> None:
        """Raise RecipeError if a step since the last check has assigned a new object to a variable with a kept object.

        No checkpoint contains the new object.

        Args:
            step: the step that was trained last.
        """
        first, self._checked = min(step, self._checked + 1) if self._checked else step, step
        for variable, frame in self._found:
            name = variable.name
            if _read(frame, name) is not variable.value:
                steps = f"step {step}" if first == step else f"one of the steps {first} to {step}"
                raise RecipeError(
                    f"{variable.place}{name} is kept, but {steps} has replaced it with a different object, which no "
                    "checkpoint would contain",
                    hint=f"change the kept object in place, for example {name}[:] = ... or {name}.copy_(...); or keep "
                    "a dict that contains it",
                )


def _read(frame: types.FrameType, name: str) -> Any:
    """Return the value of a running function's variable, or of an attribute such as ``self.best``; None if missing."""
    variable, _, attribute = name.partition(".")
    value = read_locals(frame).get(variable)
    return vars(value).get(attribute) if attribute and hasattr(value, "__dict__") else None if attribute else value


def _describe_place(frame: types.FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line}: "

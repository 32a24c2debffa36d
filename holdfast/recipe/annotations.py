"""The annotations of a run's function: which of its parameters Holdfast itself passes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]
# The classes of the parameters that Holdfast passes itself, by module. They are not imported here, because that would
# import torch.
RUN, DEVICE = "Run", "device"
OWN = (("holdfast.training.own_loop.run", RUN), ("torch", DEVICE))


def takes_run(function: Function) -> bool:
    """Return whether a callable has a parameter that is annotated as a `Run`."""
    return RUN in own_parameters(function).values()


def own_parameters(function: Function) -> dict[str, str]:
    """Return the parameters that Holdfast itself passes, by name, each with `RUN` or `DEVICE`. They aren't settings."""
    if isinstance(function, type):
        return {}
    inner = find_inner(function)
    annotations: dict[str, Any] = getattr(inner, "__annotations__", {})
    own = {}
    for name, annotation in annotations.items():
        found = resolve(annotation, inner)
        for module, kind in OWN if name != "return" else ():
            is_class = isinstance(found, type) and (found.__module__, found.__name__) == (module, kind)
            if is_class or (isinstance(found, str) and is_last_part(found, kind)):
                own[name] = kind
    return own


def find_inner(function: Any) -> Any:
    """Return the function that a `functools.partial`, a decorated function or an object with ``__call__`` wraps."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if inspect.isroutine(function) else type(function).__call__


def resolve(annotation: Any, function: Any) -> Any:
    """Return the object that an annotation names; the annotation itself if only a type checker can resolve it."""
    found = annotation
    try:
        # evaluate twice, because a quoted annotation in a module with postponed annotations is quoted twice
        for _ in range(2):
            if isinstance(found, str):
                found = eval(found, getattr(function, "__globals__", {}))
    except Exception:
        return str(found)
    return found


def is_last_part(annotation: str, name: str) -> bool:
    return annotation.strip("'\"").rpartition(".")[2] == name

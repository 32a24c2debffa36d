"""Flows that a person also calls from Python, and that then have the same temporary server as the commands."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext, TaskRunContext

from tasks.server import server

P = ParamSpec("P")
R = TypeVar("R")


def served_flow(**options: Any) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Declare a flow, as Prefect's ``@flow(...)`` does, that starts `tasks.server` when no API is configured.

    Prefect would start a server of its own, which it leaves behind when the process is killed.
    """
    return lambda function: SERVED(function, **options)


def call_served(flow: Flow[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a flow in the block of `server`; inside another flow run, with the server of that run."""
    if FlowRunContext.get() or TaskRunContext.get():
        return Flow.__call__(flow, *args, **kwargs)
    with server():
        return Flow.__call__(flow, *args, **kwargs)


# Python looks a call up on the type, so that a function can't be put on the flow itself.
SERVED: Any = type("Served", (Flow,), {"__call__": call_served})

"""Flows for calls from Python: without a configured server, they get the same temporary server as the commands."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext, TaskRunContext

from tasks.server import server

P = ParamSpec("P")
R = TypeVar("R")


def served_flow(**options: Any) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Declare a flow, as Prefect's ``@flow(...)`` does, that starts `tasks.server` if no API is configured.

    Prefect would start a server of its own, which survives when the process is killed.
    """
    return lambda function: SERVED(function, **options)


def call_served(flow: Flow[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a flow with a server: that of the surrounding flow run, or else one from `tasks.server.server`."""
    if FlowRunContext.get() or TaskRunContext.get():
        return Flow.__call__(flow, *args, **kwargs)
    with server():
        return Flow.__call__(flow, *args, **kwargs)


# Python looks `__call__` up on the type, so setting it on the flow itself has no effect.
SERVED: Any = type("Served", (Flow,), {"__call__": call_served})

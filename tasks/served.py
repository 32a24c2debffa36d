"""Flows to call from Python: if no server is configured, they use the same temporary server as the commands."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import ObjectNotFound

from holdfast.errors import RunStopped
from tasks.server import server

P = ParamSpec("P")
R = TypeVar("R")


def served_flow(**options: Any) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Declare a flow as Prefect's ``@flow(...)`` does. Its call starts `tasks.server` if no API is configured.

    Prefect itself would start its own temporary server, which survives when the process is killed.
    """
    return lambda function: SERVED(function, **options)


def call_served(flow: Flow[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a flow with the server of the surrounding flow run; if there is none, with `tasks.server.server`.

    Raises:
        RunStopped: the server forgot the flow run while it ran.
    """
    if FlowRunContext.get() or TaskRunContext.get():
        return Flow.__call__(flow, *args, **kwargs)
    with server(), _remembered():
        return Flow.__call__(flow, *args, **kwargs)


@contextlib.contextmanager
def _remembered() -> Iterator[None]:
    """Raise RunStopped in place of Prefect's error about a flow run that the server doesn't know."""
    try:
        yield
    except ObjectNotFound as error:
        raise RunStopped(
            "Prefect's server no longer knows this flow run: its database was lost, or a person deleted the flow run",
            hint="start the same command again, which continues the run; make up makes a new database on this machine",
        ) from error


# Python looks `__call__` up on the type, so setting it on the flow itself has no effect.
SERVED: Any = type("Served", (Flow,), {"__call__": call_served})

"""Flows that a person also calls from Python, and that then have the same temporary server as the commands."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext, TaskRunContext

from tasks.server import server

P = ParamSpec("P")
R = TypeVar("R")


class Served(Flow[P, R]):
    """A flow that starts the temporary server of `tasks.server` when it is called where no API is configured.

    Prefect would start one of its own, which it leaves behind when the process is killed. Inside another flow run the
    server of that run is used.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if FlowRunContext.get() or TaskRunContext.get():
            return super().__call__(*args, **kwargs)
        with server():
            return super().__call__(*args, **kwargs)


def served_flow(**options: Any) -> Callable[[Callable[P, R]], Served[P, R]]:
    """Declare a `Served` flow, as Prefect's ``@flow(...)`` does, and with the same options."""
    return lambda function: Served(function, **options)

"""`python -m tasks.engine`: the process of a flow run, as `python -m prefect.engine`, for pools of processes.

Prefect searches the current folder first while it imports a flow. That folder may hold runs, where others can put
modules. So this process searches it last: it finds your own flows there, and no module in place of an installed one.

Prefect logs a traceback of its own code, 'Engine execution exited with unexpected exception', if a flow returns a state
such as Cancelled, and a second time the traceback of a flow that has raised. So this process asks for the final state.
"""

import functools
import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType

import tasks.untracked  # noqa: F401

from prefect import flow_engine
from prefect.utilities import importtools


def load_module(module_name: str) -> ModuleType:
    """Import a flow's module; search the current folder last."""
    current = str(Path.cwd())
    if current in sys.path:
        return importlib.import_module(module_name)
    sys.path.append(current)
    try:
        return importlib.import_module(module_name)
    finally:
        sys.path.remove(current)


if __name__ == "__main__":
    importtools.load_module = load_module
    flow_engine.run_flow = functools.partial(flow_engine.run_flow, return_type="state")
    runpy.run_module("prefect.engine", run_name="__main__")

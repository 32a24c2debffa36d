"""Flows and commands of flows/, forked from a process that has imported Prefect; see `tests.support.lives`."""

import atexit
import functools
import importlib
import os
from typing import Any

import tasks.untracked  # noqa: F401

import prefect.context
from cyclopts import App

import flows.audit
import flows.command
import flows.evaluate
import flows.prune
import flows.train
from holdfast.attempt.progress import log_plain_lines
from holdfast.machine import faults
from holdfast.rank.launching import Ranks
from holdfast.terminal.command import run_app
from tests.support.device import ON_GPUS
from tests.support.forked import spawn_from
from tests.support.lives import fork_server, ranks_of


def run(module: str, arguments: list[str]) -> int:
    """Run ``python -m`` with a module of flows/."""
    found = flows.command if module == "flows.train" else importlib.import_module(module)
    return _run(found.app, arguments)


def call(name: str, parameters: dict[str, Any]) -> int:
    """Call a flow of flows/ as a program of the user's does. Print what it returns, or its error as commands do."""
    flow, app = getattr(importlib.import_module(f"flows.{name}"), name), App()
    app.default(lambda: print(flow(**parameters)))
    log_plain_lines()
    return _run(app, [])


def _run(app: App, arguments: list[str]) -> int:
    """Run a command."""
    prepare()
    try:
        return run_app(app, arguments)
    finally:
        atexit._run_exitfuncs()  # Prefect sends its last logs


def prepare() -> None:
    """Let this process call flows. It forks their ranks from a process without Prefect's threads.

    On GPUs Python starts them: see `tests.support.lives`.
    """
    own = os.getpid()
    faults._other_side = lambda: [rank.pid for rank in ranks_of(own)] if os.getpid() == own else [own]
    if not ON_GPUS:
        Ranks.spawn = staticmethod(functools.partial(spawn_from, fork_server()))
    prefect.context.refresh_global_settings_context()  # Prefect read another environment when it was imported

"""Commands of flows/ in processes that are forked from one which has imported Prefect; see `tests.support.lives`."""

import atexit
import functools
import importlib
import os

import tasks.untracked  # noqa: F401

import prefect.context

import flows.audit
import flows.evaluate
import flows.prune
import flows.train  # noqa: F401
from holdfast.machine import faults
from holdfast.rank.launching import Ranks
from holdfast.terminal.command import run_app
from tests.support.device import ON_GPUS
from tests.support.forked import spawn_from
from tests.support.lives import fork_server, ranks_of


def run(module: str, arguments: list[str]) -> int:
    """Run ``python -m`` with a module of flows/. Fork its ranks from a process without Prefect's threads.

    On GPUs Python starts them: see `tests.support.lives`.
    """
    own = os.getpid()
    faults._other_side = lambda: [rank.pid for rank in ranks_of(own)] if os.getpid() == own else [own]
    if not ON_GPUS:
        Ranks.spawn = staticmethod(functools.partial(spawn_from, fork_server()))
    prefect.context.refresh_global_settings_context()  # Prefect read another environment when it was imported
    try:
        return run_app(importlib.import_module(module).app, arguments)
    finally:
        atexit._run_exitfuncs()  # Prefect sends its last logs

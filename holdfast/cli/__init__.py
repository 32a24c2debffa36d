"""The command line ``holdfast``: train, inspect and check runs, and keep their checkpoints."""

from holdfast.cli import (
    accounting,
    comparing,
    differences,
    earlier,
    importing,
    keeping,
    looking,
    machine,
    planning,
    proving,
    reporting,
    starting,
    stores,
    training,
    watching,
)
from holdfast.cli.app import app, main
from holdfast.terminal.command import EXIT_CODES, run_app

__all__ = [
    "EXIT_CODES",
    "accounting",
    "app",
    "comparing",
    "differences",
    "earlier",
    "importing",
    "keeping",
    "looking",
    "machine",
    "main",
    "planning",
    "proving",
    "reporting",
    "run_app",
    "starting",
    "stores",
    "training",
    "watching",
]

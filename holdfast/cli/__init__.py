"""The command line ``holdfast``: train, inspect and check runs, and keep their checkpoints."""

from holdfast.cli.app import app, main
from holdfast.terminal.command import EXIT_CODES, run_app

__all__ = ["EXIT_CODES", "app", "main", "run_app"]

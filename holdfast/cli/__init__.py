"""``holdfast``: a person's view of a store."""

from holdfast.cli import keeping, looking
from holdfast.cli.app import EXIT_CODES, app, main, run_app

__all__ = ["EXIT_CODES", "app", "keeping", "looking", "main", "run_app"]

"""Training that holds: resumable chunks, verified checkpoints, bit-exact resume.

Importing it imports neither torch nor Prefect.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import holdfast.terminal.interrupt  # noqa: F401
from holdfast.config import RunConfig, load_config
from holdfast.distribution import warn_of_other
from holdfast.errors import ConfigDrift, HoldfastError
from holdfast.provenance.fingerprint import fingerprint, validate_fingerprint
from holdfast.recipe import Recipe
from holdfast.recipe.anneal import Anneal
from holdfast.recipe.probe import Limits
from holdfast.schedule import Schedule

if TYPE_CHECKING:
    from holdfast.training.own_loop.loop import Step
    from holdfast.training.own_loop.run import Run

__version__ = "0.2.0"

__all__ = [
    "Anneal",
    "ConfigDrift",
    "HoldfastError",
    "Limits",
    "Recipe",
    "Run",
    "RunConfig",
    "Schedule",
    "Step",
    "fingerprint",
    "load_config",
    "validate_fingerprint",
]

warn_of_other(Path(__file__).parents[1])


def __getattr__(name: str) -> Any:
    """Return `Run` or `Step`, whose module imports torch, when they are first asked for."""
    if name not in ("Run", "Step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import holdfast.training.own_loop.run

    return getattr(holdfast.training.own_loop.run, name)

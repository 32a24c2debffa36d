"""Training that holds: resumable chunks, verified checkpoints, bit-exact resume.

Say what to train in a function that returns a `Recipe`, or in a function that takes a `Run` and has its own loop.
``holdfast new NAME`` writes an example of either function, with its configuration. Train it from a shell, or from
Python::

    holdfast train my_model.toml

    from holdfast import live, load_config
    live(load_config("my_model.toml"))

Under torchrun, ``accelerate launch`` or srun call `attach` in the script that they start.

You may import the names in ``holdfast.__all__``, and names that the documentation imports from ``holdfast.adapters``,
``attempt``, ``config``, ``errors``, ``extending``, ``looking.sinks``, ``recipes``, ``schedule``, ``store`` and
``testing``. All other names are private and may change in any version.

``import holdfast`` imports neither torch, nor Prefect, nor a cloud's SDK: some names are imported at their first use.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import holdfast.terminal.interrupt  # noqa: F401
from holdfast.config import RunConfig, load_config
from holdfast.errors import ConfigDrift, HoldfastError
from holdfast.provenance.fingerprint import fingerprint, validate_fingerprint
from holdfast.recipe import Recipe
from holdfast.recipe.probe import Limits
from holdfast.schedule import Schedule
from holdfast.terminal.distribution import warn_of_other

if TYPE_CHECKING:
    from holdfast.attempt import AttemptView, CheckpointVerdict, Observer, live
    from holdfast.attempt.attaching import attach
    from holdfast.journal import Commit
    from holdfast.ledger.standing import Outcome
    from holdfast.rank.messages import Progress
    from holdfast.recipe.anneal import Anneal
    from holdfast.training.own_loop.loop import Step
    from holdfast.training.own_loop.run import Run

__version__ = "0.2.0"

__all__ = [
    "Anneal",
    "AttemptView",
    "CheckpointVerdict",
    "Commit",
    "ConfigDrift",
    "HoldfastError",
    "Limits",
    "Observer",
    "Outcome",
    "Progress",
    "Recipe",
    "Run",
    "RunConfig",
    "Schedule",
    "Step",
    "attach",
    "fingerprint",
    "live",
    "load_config",
    "validate_fingerprint",
]

# Names that are imported when they are first used, each with its module, because `Run` and `Step` import torch.
_LATER = {
    "Anneal": "holdfast.recipe.anneal",
    "AttemptView": "holdfast.attempt",
    "CheckpointVerdict": "holdfast.attempt",
    "Commit": "holdfast.journal",
    "Observer": "holdfast.attempt",
    "Outcome": "holdfast.ledger.standing",
    "Progress": "holdfast.rank.messages",
    "Run": "holdfast.training.own_loop.run",
    "Step": "holdfast.training.own_loop.loop",
    "attach": "holdfast.attempt.attaching",
    "live": "holdfast.attempt",
}

warn_of_other(Path(__file__).parents[1])


def __getattr__(name: str) -> Any:
    """Import and return an object of `_LATER` when its name is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion and `dir`."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]

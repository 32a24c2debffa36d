"""Training that holds: resumable chunks, verified checkpoints, bit-exact resume.

Importing it imports neither torch nor Prefect.
"""

import holdfast.interrupt  # noqa: F401
from holdfast.anneal import Anneal
from holdfast.config import RunConfig, load_config
from holdfast.errors import ConfigDrift, HoldfastError
from holdfast.fingerprint import fingerprint, validate_fingerprint
from holdfast.probe import Limits
from holdfast.recipe import Recipe
from holdfast.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "Anneal",
    "ConfigDrift",
    "HoldfastError",
    "Limits",
    "Recipe",
    "RunConfig",
    "Schedule",
    "fingerprint",
    "load_config",
    "validate_fingerprint",
]

"""A run's configuration, which a person writes in TOML, changes with ``--set`` or fills into a form."""

from holdfast.config.fields import (
    DEFAULT_SEED,
    DEFAULT_STORE,
    PART_BYTES,
    Checkpoint,
    ChunkLength,
    Compute,
    Determinism,
    InitFrom,
    KeepBest,
    Log,
    ProofSettings,
    Resume,
    Retention,
    RunConfig,
    Section,
    Supervision,
)
from holdfast.config.loading import did_you_mean, load_config, parse_config, set_field

__all__ = [
    "DEFAULT_SEED",
    "DEFAULT_STORE",
    "PART_BYTES",
    "Checkpoint",
    "ChunkLength",
    "Compute",
    "Determinism",
    "InitFrom",
    "KeepBest",
    "Log",
    "ProofSettings",
    "Resume",
    "Retention",
    "RunConfig",
    "Section",
    "Supervision",
    "did_you_mean",
    "load_config",
    "parse_config",
    "set_field",
]

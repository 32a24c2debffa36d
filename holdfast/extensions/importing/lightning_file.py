"""The reader of a Lightning checkpoint, a ``.ckpt`` file."""

from pathlib import Path
from typing import Any

from holdfast.extensions.importing.foreign import ForeignCheckpoint, as_count
from holdfast.extensions.importing.torch_file import sort_file
from holdfast.training.moving.files import as_weights, load_torch

MARK = "pytorch-lightning_version"
# The values under these keys are restored by Holdfast's adapter of Lightning.
FRAMEWORK = ("loops", "callbacks", "epoch", "global_step")
# All keys that Lightning itself writes. Some of them are not read, because no step depends on them. Any other key was
# added by a hook of the user's.
KNOWN = {
    MARK, "state_dict", "optimizer_states", "lr_schedulers", "hparams_name", "hyper_parameters", "hparams_type",
    "datamodule_hparams_name", "datamodule_hyper_parameters", *FRAMEWORK,
}  # fmt: skip


def is_lightning(path: Path) -> bool:
    """Return whether a file's name is that of a Lightning checkpoint."""
    return path.is_file() and path.suffix == ".ckpt"


def read_lightning(path: Path, rank: int) -> ForeignCheckpoint:
    """Read a file's module, optimizers, schedulers and loops. Lightning saves no random generators.

    Raises:
        ConfigError: the file can't be read without running code.
    """
    values = load_torch(path)
    if not isinstance(values, dict) or MARK not in values:
        return sort_file(path, values)
    imported = ForeignCheckpoint(
        "lightning",
        modules={"module": as_weights(values.get("state_dict"), path)},
        step=as_count(values.get("global_step")),
    )
    imported.optimizers = _number("optimizer", values.get("optimizer_states", []))
    imported.schedulers = _number("scheduler", values.get("lr_schedulers", []))
    imported.framework = {name: values[name] for name in FRAMEWORK if name in values}
    loop: dict[str, Any] = values.get("loops", {}).get("fit_loop", {})
    batches = loop.get("epoch_loop.batch_progress", {}).get("total", {}).get("ready")
    imported.batches = int(batches) if isinstance(batches, int) else None
    imported.framework["added"] = {name: each for name, each in values.items() if name not in KNOWN}
    return imported


def _number(name: str, states: list[Any]) -> dict[str, Any]:
    return {f"{name}_{number}" if len(states) > 1 else name: each for number, each in enumerate(states)}

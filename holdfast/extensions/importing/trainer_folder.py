"""The reader of a ``checkpoint-N`` folder of transformers' Trainer."""

from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.extensions.importing.foreign import ForeignCheckpoint, as_count
from holdfast.provenance.model_files import find_model_files
from holdfast.training.moving.files import load_json, load_torch, load_weights

STATE = "trainer_state.json"


def is_trainer(path: Path) -> bool:
    """Return whether a folder is a Trainer's checkpoint."""
    return (path / STATE).is_file()


def read_trainer(path: Path, rank: int) -> ForeignCheckpoint:
    """Read a folder's model, optimizer, scheduler and Trainer's state, and this rank's random generators.

    ``training_args.bin``, a pickle of the Trainer's arguments, isn't read, because the run's own Trainer has arguments.

    Raises:
        ConfigError: a file is missing, or can't be read without running code.
    """
    state = load_json(path / STATE)
    weights = find_model_files(path)
    if weights is None:
        has_adapters = any(path.glob("adapter_model.*"))
        raise ConfigError(
            f"{path} has {'only the weights of adapters' if has_adapters else 'no weights'}",
            hint="merge the adapters into the model, and begin a run with it (init_from)"
            if has_adapters
            else "expected model.safetensors; save_only_model=False makes a Trainer write everything that a run needs",
        )
    imported = ForeignCheckpoint(
        "trainer", modules={"model": load_weights(weights)}, step=as_count(state.get("global_step"))
    )
    imported.are_ordered = weights.suffix == ".bin"
    for name, found in (("optimizer", imported.optimizers), ("scheduler", imported.schedulers)):
        if (path / f"{name}.pt").is_file():
            found[name] = load_torch(path / f"{name}.pt")
    if (path / "scaler.pt").is_file():
        imported.others["scaler"] = load_torch(path / "scaler.pt")
    for file in (path / "rng_state.pth", path / f"rng_state_{rank}.pth"):
        if file.is_file():
            imported.generators["rng"] = load_torch(file)
    imported.framework["trainer_state"] = state
    return imported

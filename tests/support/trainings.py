"""Trainings in the tests' own process, which lacks a rank's environment."""

from pathlib import Path
from typing import Any

from holdfast import RunConfig, checkpoint
from holdfast.checkpoint import Metadata, Payload
from holdfast.config import DEFAULT_SEED, Determinism
from holdfast.store.local import LocalStore
from holdfast.training import Training, begin_save, train

Saved = tuple[Payload, Metadata]


def make(folder: Path, recipe: str, seed: int = DEFAULT_SEED, **settings: Any) -> Training:
    """Build a training at step 0."""
    config = RunConfig(
        recipe=recipe, run="trained", store=str(folder), epochs=9, settings=settings, seed=seed,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip
    return Training(config)


def train_to(training: Training, stop: int) -> None:
    train(training, stop, lambda: False, lambda *done: None)


def save_step(training: Training, store: LocalStore) -> checkpoint.Saved:
    """Save a checkpoint and return it once it is durable."""
    begin_save(training, store, "f" * 64, {})
    saved = training.saver.wait()
    assert saved is not None
    return saved


def save_state(training: Training, folder: Path) -> Saved:
    """Save a checkpoint and read its payload back."""
    store = LocalStore(str(folder / "run"))
    saved = save_step(training, store)
    return checkpoint.read_saved(store, saved), saved.metadata

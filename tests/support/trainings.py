"""Trainings in the tests' own process, which lacks a rank's environment."""

import contextlib
import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from holdfast import RunConfig, checkpoint
from holdfast.checkpoint import Metadata, Payload
from holdfast.checkpoint.found import Found, find_suspects
from holdfast.config import DEFAULT_SEED, Determinism
from holdfast.errors import GateTripped
from holdfast.store.local import LocalStore
from holdfast.training import (
    Gate,
    SaveRequest,
    Training,
    begin_save,
    examine_recipe,
    repeat_last_step,
    resume,
    resume_weights,
    run_program,
    steps,
)
from holdfast.training.loop import Report, train_step

Saved = tuple[Payload, Metadata]


def make(folder: Path, recipe: str, seed: int = DEFAULT_SEED, **settings: Any) -> Training:
    """Build a training at step 0."""
    config = RunConfig(
        recipe=recipe, run="trained", store=str(folder), epochs=9, settings=settings, seed=seed,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip
    return Training(config)


def train_to(
    training: Training,
    stop: int,
    is_stopping: Callable[[], bool] = lambda: False,
    report: Report = lambda *done: None,
) -> None:
    """Train a recipe until the run has ``stop`` completed steps, or ``is_stopping`` returns True; see `steps`."""
    for _ in steps(training, stop, is_stopping, report):
        training.record.trained = train_step(training)


def save_step(training: Training, store: LocalStore) -> checkpoint.Saved:
    """Save a checkpoint and return it once it is durable."""
    begin_save(training, SaveRequest(store, "f" * 64, {}))
    saved = training.saver.wait()
    assert saved is not None
    return saved


def save_state(training: Training, folder: Path) -> Saved:
    """Save a checkpoint and read its payload back."""
    store = LocalStore(str(folder / "run"))
    saved = save_step(training, store)
    return checkpoint.read_saved(store, saved), saved.metadata


def live(
    config: RunConfig, stop: int, saved: Saved | None = None, *, saves_first: bool = False
) -> tuple[Saved, Training]:
    """Train a program from a checkpoint, or from its beginning, to a step. Return the checkpoint there.

    Args:
        saves_first: whether to save before a loop's code at an epoch's end, as ranks do that have to stop at once.
    """
    found: list[tuple[Saved, Training]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        if saved is not None:
            restore = functools.partial(resume, training, *saved, Gate("exact"), lambda *skipped: None)
            restore()
            training.record.ends.restore_weights = functools.partial(resume_weights, training, saved[0])
            yield from repeat_last_step(training, restore)
        training.record.ends.saves_first = lambda end: saves_first and end >= stop
        yield from steps(training, stop, lambda: False)
        found.append((save_state(training, Path(config.store)), training))

    run_program(config, serve)
    return found[0]


def find_lost(config: RunConfig, at: int = 3) -> list[Found]:
    """Return what a program loses if it is resumed after so many steps, as the search of two processes finds it."""
    saved: list[Saved] = []
    found: list[list[Found]] = []

    def lived(training: Training) -> Generator[None, None, None]:
        yield from steps(training, at, lambda: False)
        found.append(examine_recipe(training.recipe).found)
        saved.append(save_state(training, Path(config.store)))

    def restored(training: Training) -> Generator[None, None, None]:
        with contextlib.suppress(GateTripped):
            resume(training, *saved[0], Gate("exact"), lambda *skipped: None)
        found.append(examine_recipe(training.recipe).found)
        yield from steps(training, at + 1, lambda: False)

    run_program(config, lived)
    run_program(config, restored)
    return find_suspects(*found)


def live_in_chunks(config: RunConfig, stop: int, steps: int) -> str:
    """Train a program to a step with a new training after every chunk of so many steps. Return the content id."""
    saved = None
    for each in range(steps, stop + steps, steps):
        saved, _ = live(config, min(each, stop), saved)
    assert saved is not None
    return content_id(saved)


def content_id(saved: Saved) -> str:
    return saved[1].checkpoint_sha256

"""The import of another program's checkpoint into a training of this process, and the steps that follow."""

from collections.abc import Generator, Mapping
from pathlib import Path

from torch import Tensor

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.extensions.importing.taking_over import TakenOver, move_in
from holdfast.training import Gate, Training, resume, run_program, steps
from holdfast.training.recording import read_lines
from tests.support.trainings import Saved, save_state


def make_config(folder: Path, function: str, epochs: int = 4, **settings: object) -> RunConfig:
    recipe = function if ":" in function else f"tests.support.movers:{function}"
    return RunConfig(
        recipe=recipe, run="r", store=str(folder), epochs=epochs, settings=settings,
        determinism=Determinism(mode="fast"), compute=Compute(device="cpu"),
    )  # fmt: skip


def go_on(
    config: RunConfig, source: Path, step: int | None = None, names: Mapping[str, str] = {}
) -> tuple[TakenOver, list[float]]:
    """Import a checkpoint and train to the end; return what was taken over, and the losses. See `train_on`."""
    taken, losses, _ = train_on(config, source, step, names)
    return taken, losses


def train_on(
    config: RunConfig, source: Path, step: int | None = None, names: Mapping[str, str] = {}
) -> tuple[TakenOver, list[float], dict[str, Tensor]]:
    """Import a checkpoint, save, resume what was saved in a training of its own, and train to the end.

    Returns:
        What was taken over, the losses of the steps after it, and the weights in the end.
    """
    taken: list[TakenOver] = []
    saved: list[Saved] = []
    losses: list[float] = []
    weights: dict[str, Tensor] = {}

    def moves_in(training: Training) -> Generator[None, None, None]:
        taken.append(move_in(training, str(source), step, names))
        saved.append(save_state(training, Path(config.store)))
        yield from ()

    def goes_on(training: Training) -> Generator[None, None, None]:
        resume(training, *saved[0], Gate("exact"), lambda *skipped: None)
        yield from steps(training, training.total_steps, lambda: False)
        losses.extend(line["loss"] for line in read_lines(training))
        weights.update({name: each.clone() for name, each in training.recipe.model.state_dict().items()})

    run_program(config, moves_in)
    run_program(config, goes_on)
    return taken[0], losses, weights

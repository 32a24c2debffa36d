"""Lightning's own loop as a run, in this process: stopped and resumed anywhere it ends on the same bytes."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from holdfast.config import Determinism, RunConfig
from holdfast.errors import RecipeError
from holdfast.training import Gate, Training, find_unregistered, resume, run_program, steps
from tests.support import lit
from tests.support.trainings import Saved, save_state

# Lightning warns of few workers, of a missing logger and the like.
pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 3


def make_config(folder: Path, program: str, **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.lit:{program}", run="r", store=str(folder), epochs=EPOCHS, settings=settings,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


def live(config: RunConfig, stop: int = 0, saved: Saved | None = None) -> tuple[Saved, Training]:
    """Train a program from a checkpoint, or from its beginning, to a step or to the end. Return the checkpoint there."""
    found: list[tuple[Saved, Training]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        if saved is not None:
            resume(training, *saved, Gate("exact"), lambda *skipped: None)
        yield from steps(training, stop or training.total_steps, lambda: False)
        found.append((save_state(training, Path(config.store)), training))

    run_program(config, serve)
    return found[0]


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    lit.SEEN.clear()


def content_id(saved: Saved) -> str:
    return saved[1].checkpoint_sha256


PROGRAMS = [("automatic", how) for how in lit.HOWS] + [("manual", "")]


@pytest.mark.parametrize(("program", "how"), PROGRAMS, ids=lambda value: value)
def test_a_cut_at_every_step_ends_on_the_same_bytes(tmp_path: Path, program: str, how: str) -> None:
    """What callbacks and loggers see is the same, too."""
    settings = {"how": how, "files": str(tmp_path / "files")} if program == "automatic" else {}
    config = make_config(tmp_path, program, **settings)
    straight, training = live(config)
    seen = [*lit.SEEN]
    lit.SEEN.clear()
    saved = None
    for stop in range(1, training.total_steps + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(straight)
    assert lit.SEEN == seen

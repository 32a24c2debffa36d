"""Code at an epoch's end belongs to the epoch: stopped at any step, a loop of epochs ends on the same bytes."""

import functools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Determinism, RunConfig
from holdfast.training import Gate, Training, repeat_last_step, resume, run_program, set_skipped, steps
from holdfast.training.recording import read_lines
from tests.support import epoch_loops
from tests.support.epoch_loops import EPOCH_LOOPS
from tests.support.trainings import Saved, content_id, live

EPOCHS, PER_EPOCH = 3, 6
TOTAL = EPOCHS * PER_EPOCH


def make_config(folder: Path, loop: str, **more: Any) -> RunConfig:
    return RunConfig(
        recipe=f"{epoch_loops.__name__}:{loop}", run="r", store=str(folder), epochs=EPOCHS,
        determinism=Determinism(mode="fast"), **more,
    )  # fmt: skip


@pytest.mark.parametrize("loop", EPOCH_LOOPS)
def test_stopped_anywhere_it_ends_on_the_same_bytes(tmp_path: Path, loop: str) -> None:
    config = make_config(tmp_path, loop)
    straight = content_id(live(config, TOTAL)[0])
    for cut, saves_first in [(2, False), (PER_EPOCH - 1, False), (PER_EPOCH, True), (PER_EPOCH, False), (9, False)]:
        saved, training = live(config, cut, saves_first=saves_first)
        assert training.progress.has_ended_epoch is (cut == PER_EPOCH and not saves_first)
        assert content_id(live(config, TOTAL, saved)[0]) == straight, (cut, saves_first)


def read_trail(config: RunConfig, stop: int, saved: Saved | None = None) -> list[dict[str, Any]]:
    """Train to a step. Return the lines of the trail, without the training's own save."""
    found: list[dict[str, Any]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        if saved is not None:
            restore = functools.partial(resume, training, *saved, Gate("exact"), lambda *skipped: None)
            restore()
            yield from repeat_last_step(training, restore)
        yield from steps(training, stop, lambda: False)
        found.extend(read_lines(training))

    run_program(config, serve)
    return found


def test_numbers_of_the_epochs_end_belong_to_the_epochs_last_step(tmp_path: Path) -> None:
    config = make_config(tmp_path, "average")
    lines = read_trail(config, PER_EPOCH + 1)
    losses = [line["loss"] for line in lines]
    assert ["mean" in line.get("logged", {}) for line in lines] == [False] * 5 + [True, False]
    assert lines[5]["loss"] != lines[5]["logged"]["mean"], "the step's own loss stays"
    assert len({*losses}) == len(losses)


def test_numbers_of_code_that_runs_after_the_save_belong_to_the_next_step(tmp_path: Path) -> None:
    config = make_config(tmp_path, "average")
    straight = read_trail(config, PER_EPOCH + 1)
    (line,) = read_trail(config, PER_EPOCH + 1, live(config, PER_EPOCH, saves_first=True)[0])
    assert "mean" in line.pop("logged")
    assert line == straight[-1]


def test_an_index_counts_the_batches_of_its_epoch(tmp_path: Path) -> None:
    config = make_config(tmp_path, "numbers")
    (line, *_) = read_trail(config, TOTAL, live(config, PER_EPOCH + 2)[0])
    assert line["logged"]["index"] == 2


def test_skipped_steps_at_an_epochs_end_come_after_its_code(tmp_path: Path) -> None:
    """The index counts only the batches that the loop gets."""
    config = make_config(tmp_path, "numbers", skip="2,5-6")

    def serve(training: Training) -> Generator[None, None, None]:
        set_skipped(training, config.skip)
        yield from steps(training, PER_EPOCH + 1, lambda: False)
        lines.extend(read_lines(training))

    lines: list[dict[str, Any]] = []
    run_program(config, serve)
    logged = [line.get("logged", {}) for line in lines]
    assert [each.get("index") for each in logged] == [0, None, 1, 2, None, None, 0]
    assert [each.get("last") for each in logged] == [None, None, None, 2, None, None, None]

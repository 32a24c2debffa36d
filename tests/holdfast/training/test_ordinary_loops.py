"""Loops of kinds that people know by name: a cut changes no byte, and what is not kept is named."""

from collections.abc import Generator
from pathlib import Path

import pytest

from holdfast.config import Determinism, RunConfig
from holdfast.errors import RecipeError
from holdfast.store.local import LocalStore
from holdfast.training import Training, begin_save, run_program, steps
from tests.conftest import Engine
from tests.support.odd_loops import ODD_LOOPS
from tests.support.ordinary_loops import ORDINARY_LOOPS, PER_EPOCH
from tests.support.trainings import content_id, live

TOTAL = 3 * PER_EPOCH
LOOPS = "tests.support.ordinary_loops"


def configure(folder: Path, loop: str) -> RunConfig:
    return RunConfig(
        recipe=loop if ":" in loop else f"{LOOPS}:{loop}", run="r", store=str(folder), epochs=3,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


def notice(folder: Path, loop: str) -> list[str]:
    """Train a loop, with saves after steps 3 and 6. Return the lines about what changes and is not kept."""
    lines: list[str] = []

    def serve(training: Training) -> Generator[None, None, None]:
        assert training.kept is not None
        lines.extend(map(str, training.kept.carried))
        for stop in (3, 6):
            yield from steps(training, stop, lambda: False)
            begin_save(training, LocalStore(str(folder / "run")), "f" * 64, {})
            lines.extend(training.unkept.take())
            training.saver.wait()

    run_program(configure(folder, loop), serve)
    return lines


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # at an epoch's end, right after a resume
@pytest.mark.parametrize("loop", ORDINARY_LOOPS)
def test_a_cut_at_every_step_ends_on_the_same_bytes(tmp_path: Path, loop: str) -> None:
    config = configure(tmp_path, loop)
    straight, _ = live(config, TOTAL)
    saved = None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(straight)
    for cut in (4, 13):
        assert content_id(live(config, TOTAL, live(config, cut)[0])[0]) == content_id(straight), cut


@pytest.mark.parametrize("loop", [*ORDINARY_LOOPS, *(f"tests.support.odd_loops:{each}" for each in ODD_LOOPS)])
def test_nothing_is_said_of_what_is_kept(tmp_path: Path, loop: str) -> None:
    assert notice(tmp_path, loop) == []


@pytest.mark.parametrize(
    ("loop", "names", "remedy"),
    [
        ("forgets_the_datasets_stage", ["pool.stage"], "run.keep(pool=vars(pool))"),
        ("forgets_samples", ["pool.items"], "run.keep(items=pool.items)"),
        ("forgets_the_transforms_strength", ["loader.dataset.transform.strength"], "vars(loader.dataset.transform)"),
        ("forgets_the_memory", ["memory.items"], "run.keep(items=memory.items)"),
        ("forgets_an_average", ["average"], "run.keep(average=average)"),
        ("forgets_a_ring", ["ring"], "run.keep(ring=ring)"),
        ("forgets_the_hidden_state", ["model.hidden"], 'register_buffer("hidden", ...)'),
        ("forgets_the_trainers_best", ["self.best"], "in a dict"),
        ("forgets_the_place_in_a_cycle", ["batches"], ""),
    ],
)
def test_a_value_that_changes_and_is_not_kept_is_named_with_its_line(
    tmp_path: Path, loop: str, names: list[str], remedy: str
) -> None:
    lines = notice(tmp_path, loop)
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == names, lines
    for line in lines:
        file, number = line.split(": ")[0].rsplit(":", 1)
        assert names[0].rpartition(".")[2] in Path(file).read_text().splitlines()[int(number) - 1], line
        assert remedy in line


@pytest.mark.slow
def test_a_command_warns_once_of_a_value_that_is_not_kept(engine: Engine) -> None:
    done = engine.run(f"recipe={LOOPS}:forgets_the_datasets_stage", "settings={}", "epochs=2", "chunk.steps=2")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in (done.stdout + done.stderr).splitlines() if "no checkpoint has it" in line)
    assert "warning: " in line
    assert ": pool.stage has changed since the loop began" in line


def test_an_error_in_the_search_ends_no_run_and_is_named(tmp_path: Path) -> None:
    (line,) = notice(tmp_path, f"{LOOPS}:cannot_be_read")
    assert ": RuntimeError: the items are on another machine; values that change" in line


def test_a_carried_attribute_is_named_once(tmp_path: Path) -> None:
    (line,) = notice(tmp_path, "tests.support.loops:forgets_attributes")
    assert line.endswith(": self.hidden")


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("grows", "the model has other tensors than when the loop began: 1.bias, 1.weight"),
        (
            "has_a_league",
            r"after the first step: run.keep\(league=...\): it has 2 objects with a state_dict now, and had 1",
        ),
    ],
)
def test_a_save_is_refused_that_no_resume_could_restore(tmp_path: Path, loop: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        notice(tmp_path, loop)

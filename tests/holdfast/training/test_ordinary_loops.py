"""Loops of kinds that people know by name: a cut changes no byte, and state that is not kept has a name."""

from pathlib import Path

import pytest

from holdfast.config import Determinism, RunConfig
from holdfast.errors import RecipeError
from tests.conftest import Engine
from tests.support.odd_loops import ODD_LOOPS
from tests.support.ordinary_loops import ORDINARY_LOOPS, PER_EPOCH
from tests.support.trainings import content_id, find_lost, live

TOTAL = 3 * PER_EPOCH
LOOPS = "tests.support.ordinary_loops"


def configure(folder: Path, loop: str) -> RunConfig:
    return RunConfig(
        recipe=loop if ":" in loop else f"{LOOPS}:{loop}", run="r", store=str(folder), epochs=3,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


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


# Arrays that each step fills anew, item by item: the search doesn't see that.
REFILLED = {"fills_a_rollout": ["seen", "values"]}


@pytest.mark.parametrize("loop", [*ORDINARY_LOOPS, *(f"tests.support.odd_loops:{each}" for each in ODD_LOOPS)])
def test_a_loop_that_keeps_its_state_loses_nothing(tmp_path: Path, loop: str) -> None:
    assert [each.name for each in find_lost(configure(tmp_path, loop))] == REFILLED.get(loop, [])


@pytest.mark.parametrize(
    ("loop", "name", "remedy"),
    [
        ("forgets_the_datasets_stage", "pool.stage", "run.keep(pool=vars(pool))"),
        ("forgets_samples", "pool.items", "run.keep(items=pool.items)"),
        (
            "forgets_the_transforms_strength",
            "loader.dataset.transform.strength",
            "run.keep(transform=vars(loader.dataset.transform))",
        ),
        ("forgets_the_memory", "memory.items", "run.keep(items=memory.items)"),
        ("forgets_an_average", "average", "run.keep(average=average)"),
        ("forgets_a_ring", "ring", "run.keep(ring=ring)"),
        ("forgets_the_hidden_state", "model.hidden", 'self.register_buffer("hidden", torch.zeros('),
        ("forgets_the_trainers_best", "self.best", 'use state["best"] in place of self.best'),
        ("forgets_the_place_in_a_cycle", "batches", "the loader"),
    ],
)
def test_state_that_a_resume_loses_is_named_with_its_line(tmp_path: Path, loop: str, name: str, remedy: str) -> None:
    (found,) = find_lost(configure(tmp_path, loop))
    assert found.name == name
    file, number = found.place.removesuffix(": ").rsplit(":", 1)
    assert name.rpartition(".")[2] in Path(file).read_text().splitlines()[int(number) - 1], found
    assert remedy in found.remedy


@pytest.mark.slow
def test_a_run_warns_of_nothing_that_only_a_search_has_found(engine: Engine) -> None:
    done = engine.run(f"recipe={LOOPS}:forgets_the_datasets_stage", "settings={}", "epochs=2", "chunk.steps=2")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stdout + done.stderr


def test_an_error_in_an_object_of_the_users_ends_no_search(tmp_path: Path) -> None:
    assert find_lost(configure(tmp_path, "cannot_be_read")) == []


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("grows", "the model has different tensors than when the loop began: 1.bias, 1.weight"),
        ("rounds_its_weights", "after step 2 0.weight is torch.bfloat16, and was torch.float32 when the loop began"),
        ("grows_in_a_list", r"different tensors than when the loop began: extras.models\[0\].1.bias, extras.models"),
        ("regroups_in_a_list", r"after step 2 optimizers\[0\] has different parameter groups than when the loop began"),
        (
            "replaces_a_loss",
            r"state\['object'\] has become a new L1Loss, and a resume would load its state into the MSELoss",
        ),
        ("replaces_a_layer", r"has become a new Conv1d, whose stride differs from the one when the loop began"),
        (
            "replaces_an_optimizer",
            "has become a new Adam, and a resume would load its state into the Adam that was there",
        ),
        (
            "replaces_a_scheduler",
            "has become a new CosineAnnealingLR, and a resume would load its state into the LinearLR",
        ),
        (
            "has_a_league",
            r"after the first step: run.keep\(league=...\): the container has 2 objects with a state_dict now, and had",
        ),
    ],
)
def test_a_save_is_refused_that_no_resume_could_restore(tmp_path: Path, loop: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        live(configure(tmp_path, loop), 3)

"""Ordinary code is not refused, and ends on the same bytes wherever it is cut."""

import json
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from holdfast.config import Determinism, RunConfig
from holdfast.data import samplers
from holdfast.errors import RecipeError
from holdfast.store.local import LocalStore
from holdfast.training import Training, run_program, steps
from tests.conftest import COMMAND_WITHIN_S
from tests.support.accepted import PER_EPOCH
from tests.support.trainings import content_id, live, save_step

EPOCHS = 3
TOTAL = EPOCHS * PER_EPOCH


def make_config(folder: Path, name: str, epochs: int = EPOCHS, **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.accepted:{name}", run="r", store=str(folder), epochs=epochs, settings=settings,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


def assert_same_wherever_it_is_cut(config: RunConfig) -> None:
    straight, saved = content_id(live(config, TOTAL)[0]), None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == straight


@pytest.mark.parametrize("probes", [False, True])
def test_an_evaluation_may_swap_weights_in_if_it_puts_the_same_bits_back(tmp_path: Path, probes: bool) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, "swaps", probes=probes))


@pytest.mark.parametrize("how", ["forgets", "data"])
def test_an_evaluation_that_leaves_other_weights_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(RecipeError, match=r"the parameter 0\.weight changed while the model was evaluated"):
        live(make_config(tmp_path, "swaps", how=how), TOTAL)


def read_trail(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
    store = LocalStore(str(folder / "run"))
    lines: list[dict[str, Any]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        yield from steps(training, training.total_steps, lambda: False)
        saved = save_step(training, store)
        lines.extend(map(json.loads, store.read(f"{saved.path}/metrics.jsonl").splitlines()))

    run_program(config, serve)
    return lines


def test_what_an_epochs_end_logs_is_recorded_in_every_epoch(tmp_path: Path) -> None:
    lines = read_trail(make_config(tmp_path, "logs_at_the_end"), tmp_path)
    found = [(line["step"], line["logged"]["held_out"]) for line in lines if "held_out" in line.get("logged", {})]
    assert found == [(PER_EPOCH, 0.5), (2 * PER_EPOCH, 1.5), (TOTAL, 2.5)]


@pytest.mark.filterwarnings("ignore:Detected call of")  # of torch: a resumed process may begin with the scheduler
def test_code_at_an_epochs_end_is_in_the_checkpoint_of_that_end(tmp_path: Path) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, "logs_at_the_end"))
    _, training = live(make_config(tmp_path, "logs_at_the_end"), TOTAL)
    assert training.schedulers[0].last_epoch == EPOCHS


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_complete_run_that_is_made_longer_ends_on_the_same_bytes(tmp_path: Path) -> None:
    longer = make_config(tmp_path, "logs_at_the_end", epochs=EPOCHS + 2)
    complete, _ = live(make_config(tmp_path, "logs_at_the_end"), TOTAL)
    end = (EPOCHS + 2) * PER_EPOCH
    assert content_id(live(longer, end, complete)[0]) == content_id(live(longer, end)[0])


def test_what_accelerate_is_to_checkpoint_is_kept(tmp_path: Path) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, "registers"))


@pytest.mark.parametrize("how", ["optimizer", "object"])
def test_an_optimizer_may_be_kept_beside_its_wrapper(tmp_path: Path, how: str) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, "keeps_a_wrapper_and_its_optimizer", how=how))


def test_the_objects_inside_a_kept_environment_are_restored(tmp_path: Path) -> None:
    assert_same_wherever_it_is_cut(make_config(tmp_path, "acts_in_a_wrapped_environment"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unreadable", r"run\.keep\(env=\.\.\.\): the state of env\.data, a builtins\.list_iterator, can't be read"),
        (
            "elsewhere",
            r"env\.data is a multiprocessing\.\w+\.SimpleQueue, whose state is partly in other processes",
        ),
        ("unseeded", r"a step has made env\.env\.second_random with a seed from the operating system"),
        (
            "turns",
            r"run\.keep\(env=\.\.\.\): env\.env\.facing was a different object, or None, when run.keep was called",
        ),
        (
            "grows",
            r"run\.keep\(env=\.\.\.\): env\.env\.second was a different object, or None, when run.keep was called",
        ),
    ],
)
def test_an_environment_whose_objects_cannot_be_restored_is_refused(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        live(make_config(tmp_path, "acts_in_a_wrapped_environment", how=how), 3)


def test_the_parts_of_a_kept_algorithm_are_restored(tmp_path: Path) -> None:
    config = make_config(tmp_path, "keeps_an_algorithm")
    assert_same_wherever_it_is_cut(config)
    _, training = live(config, 1)
    assert [*training.recipe.extras] == ["algorithm", "modes", "gradients", "accumulation"]
    assert [each["lr"] for each in training.recipe.optimizer.param_groups] == [0.1, 0.01]  # each optimizer once


def test_a_sampler_without_an_end_is_drawn_as_it_is_used(tmp_path: Path) -> None:
    """A list of the order would take hundreds of gigabytes."""
    assert_same_wherever_it_is_cut(make_config(tmp_path, "draws_without_end"))


def test_a_long_pass_has_the_order_of_the_loader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(50))
    for sampler in (
        RandomSampler(data),
        RandomSampler(data, replacement=True, num_samples=90),
        SequentialSampler(data),
    ):
        loader: DataLoader[Any] = DataLoader(data, 4, sampler=sampler)
        monkeypatch.setattr(samplers, "MOST_LISTED", 49)
        assert samplers.is_long(loader)
        torch.manual_seed(3)
        drawn = samplers.LongPass(loader)
        torch.rand(9)  # what a step draws changes nothing
        found = list(drawn)
        torch.manual_seed(3)
        assert loader.batch_sampler is not None
        assert found == [list(each) for each in loader.batch_sampler]
        assert len(drawn) == len(found)


SEEDS = """
import torch
from holdfast.config import RunConfig
from holdfast.training import run_program

def serve(training):
    print("notes:", *training.notes, sep="\\n")
    return
    yield

run_program(RunConfig(recipe="seeding:recipe", run="r", store="s", epochs=1, determinism={"mode": "fast"}), serve)
"""
SEEDING = """
import torch
from holdfast import Recipe
%s
def recipe() -> Recipe:
    torch.manual_seed(7)
    model = torch.nn.Linear(1, 1)
    return Recipe(model=model, data=[torch.ones(1)], optimizer=torch.optim.SGD(model.parameters(), 1.0), batch_size=1,
                  loss=lambda model, x: model(x).sum())
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "torch.manual_seed(3407)",
            "importing the recipe's module calls torch.manual_seed; the run's seed 1234",
        ),
        ("import random; random.seed(1)", "importing the recipe's module calls random.seed;"),
        ("torch.manual_seed(1234)", ""),
        ("", ""),
    ],
)
def test_a_seed_that_the_runs_seed_replaces_is_said(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "seeding.py").write_text(SEEDING % line)
    done = subprocess.run(
        [sys.executable, "-c", SEEDS], cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("notes:\n")[2].strip()
    assert notes.startswith(said) if said else not notes

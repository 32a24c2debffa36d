"""Recipes with several optimizers, steps of their own, or batches as data: in any chunks they end on the same bytes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast import Recipe, Schedule
from holdfast.checkpoint import read_payload
from holdfast.config import Compute, Determinism, Log, RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.journal import Journal
from holdfast.proof.result import Proof
from holdfast.store import open_store
from holdfast.training import Gate, Training, examine_recipe, resume
from holdfast.training.capturing import decode
from holdfast.training.program import build_program
from tests.conftest import IN_SOAK
from tests.support import composed
from tests.support.composed import PER_EPOCH, fit
from tests.support.lives import Lives
from tests.support.trainings import live, live_in_chunks
from tests.support.varied import Points

EPOCHS = 2
TOTAL = EPOCHS * PER_EPOCH
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("adversarial", {}),
    "accumulating step": ("accumulating", {}),
    "two optimizers, one loss": ("two_rates", {}),
    "pruning step": ("pruned", {}),
    "loader": ("batched", {}),
    "loader with a generator": ("batched", {"how": "own order"}),
    "stateful loader": ("batched", {"how": "stateful"}),
    "stream of batches": ("batched", {"how": "stream"}),
    "module among the extras": ("criticized", {"has_own": True}),
    "settings and device": ("validated", {"width": 3}),
}


def make_config(folder: Path, recipe: str, settings: dict[str, Any], **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "recipe": f"tests.support.composed:{recipe}", "run": "r", "store": str(folder), "epochs": EPOCHS,
        "settings": settings, "determinism": Determinism(mode="fast"),
    }  # fmt: skip
    return RunConfig.model_validate(values | changes)


@pytest.mark.parametrize("name", RECIPES)
def test_chunks_of_any_length_end_on_the_same_bytes(tmp_path: Path, name: str) -> None:
    config = make_config(tmp_path, *RECIPES[name])
    straight = live_in_chunks(config, TOTAL, TOTAL)
    for steps in (1, 4):
        assert live_in_chunks(config, TOTAL, steps) == straight, steps


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_unregistered(tmp_path: Path, name: str) -> None:
    _, training = live(make_config(tmp_path, *RECIPES[name]), 2)
    assert all(each.is_plain for each in examine_recipe(training.recipe).found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "two optimizers, one loss", "loader", "stream of batches"])
def test_it_is_proved(tmp_path: Path, nursery: Lives, name: str) -> None:
    assert prove(nursery, make_config(tmp_path, *RECIPES[name])).is_proved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("adversarial", {}),
        pytest.param("criticized", {"synchronized": ["critic"]}, marks=IN_SOAK),
        ("criticized", {"synchronized": ["critic"], "has_own": True}),
        pytest.param("batched", {}, marks=IN_SOAK),
    ],
)
def test_two_ranks_are_proved(tmp_path: Path, nursery: Lives, recipe: str, settings: dict[str, Any]) -> None:
    config = make_config(tmp_path, recipe, settings, compute=Compute(ranks=2, device="cpu"))
    proof = prove(nursery, config)
    assert proof.is_proved, str(proof)


def prove(nursery: Lives, config: RunConfig) -> Proof:
    config = config.model_copy(update={"log": Log(every=1, folder=f"{config.store}/logs")})
    done = nursery.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 9, 1, 5)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return Proof.model_validate_json(done.stdout.splitlines()[-1])


def test_the_rates_of_all_groups_are_recorded(tmp_path: Path) -> None:
    _, training = live(make_config(tmp_path, "adversarial", {"lr": 0.01, "rate": 0.1}), 1)
    assert training.lrs == [pytest.approx(0.01 * (1 - 1 / 18)), 0.1]
    assert training.scheduler_type == "linear+StepLR"
    live_on = live(make_config(tmp_path / "on", "adversarial", {}), 4)[1]
    assert live_on.lrs[1] == 0.05


def test_the_numbers_of_a_step_are_in_the_trail(tmp_path: Path) -> None:
    _, training = live(make_config(tmp_path, "adversarial", {}), 2)
    folder = next((tmp_path / "run").rglob("metrics.jsonl"))
    lines = [json.loads(line) for line in folder.read_text("utf-8").splitlines()]
    assert [sorted(line["logged"]) for line in lines] == [["critic_loss"]] * 2
    assert training.progress.recent_losses == [line["loss"] for line in lines]


def test_several_optimizers_of_one_loss_step_as_one_with_groups(tmp_path: Path) -> None:
    """The same rule for both layers gives the weights of a single optimizer with two groups."""
    _, several = live(make_config(tmp_path / "several", "two_sgds", {}), 7)
    _, one = live(make_config(tmp_path / "one", "two_sgds", {"is_one": True}), 7)
    pairs = zip(several.model.parameters(), one.model.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_a_step_has_the_batches_that_a_loss_has(tmp_path: Path) -> None:
    lines = []
    for name in ("two_sgds", "accumulating"):
        live(make_config(tmp_path / name, name, {}), 3)
        folder = next((tmp_path / name / "run").rglob("metrics.jsonl"))
        lines.append([json.loads(line)["samples"] for line in folder.read_text("utf-8").splitlines()])
    assert lines[0] == lines[1]


def test_moments_are_saved_under_the_parameters_names(tmp_path: Path) -> None:
    saved, _ = live(make_config(tmp_path, "adversarial", {}), 1)
    names = {name for name in saved[0].tensors if name.startswith("optimizer.")}
    assert "optimizer.state.generator.0.weight.exp_avg" in names
    assert "optimizer.state.critic.0.weight.momentum_buffer" in names


def test_gradients_that_a_step_leaves_are_saved(tmp_path: Path) -> None:
    config = make_config(tmp_path, "accumulating", {})
    assert any("gradients" in name for name in live(config, 2)[0][0].tensors)
    assert not any("gradients" in name for name in live(config, 3)[0][0].tensors)


def test_settings_of_a_pydantic_model_are_the_fingerprints(tmp_path: Path) -> None:
    _, training = live(make_config(tmp_path, "validated", {"width": 3}), 1)
    assert training.settings == {"width": 3, "optimizer": composed.Settings.Optimizer(lr=0.01)}
    assert training.lrs == [0.01]
    _, other = live(make_config(tmp_path / "other", "validated", {"optimizer": {"lr": 0.5}}), 1)
    assert other.lrs == [0.5]


def make(**parts: Any) -> Recipe:
    model = nn.Linear(8, 1)
    fields: dict[str, Any] = {
        "model": model, "data": Points(noise=False), "optimizer": torch.optim.SGD(model.parameters()), "loss": fit,
    }  # fmt: skip
    return Recipe(**(fields | parts))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"loss": None}, "the recipe has neither loss nor step"),
        ({"step": fit}, "the recipe has a loss and a step"),
        ({"loss": None, "step": fit, "grad_accum": 2}, "grad_accum = 2 has no effect"),
        ({"loss": None, "step": fit, "clip_norm": 1.0}, r"clip_norm = 1\.0 has no effect"),
        ({"data": DataLoader(Points(noise=False)), "batch_size": 8}, "a DataLoader, which yields batches already"),
        ({"data": DataLoader(Points(noise=False)), "collate": list}, r"Recipe\(collate=...\) has no effect"),
        ({"extras": {"seen": torch.zeros(1)}}, r"extras\['seen'\] is of Tensor, without state_dict"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make(**parts)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("adversarial", {"how": "nothing"}, "the recipe's step returned None"),
        ("adversarial", {"how": "vector"}, r"the step's loss: expected a number, found a Tensor of shape \(2,\)"),
        ("batched", {"how": "list"}, "a resume can't restore the position of a list"),
        (
            "criticized",
            {"synchronized": ["nobody"]},
            r"Recipe\(synchronized=...\): there is no module 'nobody' in Recipe\(extras=...\)",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, recipe: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        live(make_config(tmp_path, recipe, settings), 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule("linear"), "a single Schedule doesn't say for which it is"),
        ({"bdoy": Schedule("linear")}, "there is no optimizer 'bdoy'"),
    ],
)
def test_a_schedule_names_its_optimizer(tmp_path: Path, schedule: Any, message: str) -> None:
    config = make_config(tmp_path, "two_rates", {})
    with pytest.raises(RecipeError, match=message):
        Training(config, program_of(config, schedule=schedule))


def test_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "two_rates", {})
    one = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(RecipeError, match="the optimizers 'a' and 'b' step the same parameter"):
        Training(config, program_of(config, optimizer={"a": one, "b": one}, schedule=None))


def program_of(config: RunConfig, **changes: Any) -> Any:
    program = build_program(config)
    program.recipe = dataclasses.replace(program.recipe, **changes)
    return program


def test_a_loader_without_a_batch_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, "two_rates", {})
    data = DataLoader(Points(noise=False), batch_size=10_000, drop_last=True)
    with pytest.raises(RecipeError, match="the loader yields 0 batches in a pass, but one step takes 2"):
        Training(config, program_of(config, data=data, batch_size=None, collate=None))


def test_fp16_with_a_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, "adversarial", {})
    program = program_of(config)
    monkeypatch.setattr(program.accelerator, "scaler", object())
    with pytest.raises(ConfigError, match=r"fp16.*: one GradScaler can't serve"):
        Training(config, program)


@pytest.mark.slow
def test_ranks_that_would_train_an_extra_alone_are_refused(tmp_path: Path, nursery: Lives) -> None:
    config = make_config(tmp_path, "criticized", {}, compute=Compute(ranks=2, device="cpu"))
    done = nursery.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 9, 1, 5)
    assert (
        "the recipe's optimizer trains the extra 'critic', but nothing averages its gradients over the ranks"
        in done.stdout
    )


@pytest.mark.slow
def test_ranks_that_train_an_extra_together_have_the_same(tmp_path: Path, nursery: Lives) -> None:
    settings = {"synchronized": ["critic"], "has_own": True}
    config = make_config(tmp_path, "criticized", settings, epochs=1, compute=Compute(ranks=2, device="cpu"))
    config = config.model_copy(update={"log": Log(every=1, folder=f"{tmp_path}/logs")})
    done = nursery.call("tests.support.forked:train_chunks", config.model_dump(mode="json"), 9)
    assert done.returncode == 0, done.stdout + done.stderr
    journal = Journal(open_store(config.store), config.run)
    newest = journal.newest()
    assert newest is not None
    critics = [each["critic"] for each in decode(read_payload(journal.store, newest))["extras"]]
    assert len(critics) == 2, "the statistics are each rank's own"
    for name in ("0.weight", "2.weight"):
        assert torch.equal(critics[0][name], critics[1][name])


def test_changed_rates_of_one_of_several_optimizers_are_taken_over(tmp_path: Path) -> None:
    saved, _ = live(make_config(tmp_path, "adversarial", {}), 5)
    training = Training(make_config(tmp_path / "new", "adversarial", {"lr": 0.02}))
    taken = resume(training, *saved, Gate("record"), lambda *skipped: None).taken_over
    assert taken == ["optimizer.0.initial_lr", "optimizer.0.lr"]
    assert training.lrs == [pytest.approx(0.02 * (1 - 5 / 18)), 0.05]

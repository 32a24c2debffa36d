"""Every hyperparameter that a recipe builds is recorded by name; values of a process or a machine are left out."""

import argparse
import dataclasses
import functools
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from holdfast import Anneal, Recipe, Schedule
from holdfast.provenance.fingerprint import canonical_json
from holdfast.provenance.recorded import compare_built
from holdfast.training.built import describe_built

LIMIT = 1.0


def describe(schedule: Any = None, **parts: Any) -> dict[str, Any]:
    """Return the record of a recipe with these parts."""
    model = parts.pop("model", None) or nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    optimizer = parts.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.1)
    schedulers = [schedule(optimizer)] if schedule and not isinstance(schedule, Schedule) else []
    recipe = Recipe(
        model=model, data=[0], optimizer=optimizer, schedule=schedule if isinstance(schedule, Schedule) else schedulers,
        **{"loss": lambda model, batch: model(batch).sum()} | parts,
    )  # fmt: skip
    built = describe_built(SimpleNamespace(recipe=recipe, steps_per_epoch=5, schedulers=schedulers, kept=None))  # type: ignore[arg-type]
    canonical_json(built)
    return built


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {change.name.removeprefix("built.") for change in compare_built(one, other, is_upgraded=False)}


class Scaled(nn.Module):
    """A module with hyperparameters, and with values of a process."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 4)
        self.act: Any = F.relu
        self.made = time.time()
        self.path = str(Path.cwd())
        self.name = uuid.uuid4().hex
        self.where = torch.device("cpu")
        vars(self).update(values)


@dataclasses.dataclass
class Config:
    dropout: float = 0.1
    sizes: tuple[int, ...] = (1, 2)
    folder: Path = Path("/x")


@dataclasses.dataclass(slots=True)
class Slotted:
    dropout: float = 0.1
    inner: Config = dataclasses.field(default_factory=Config)


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({}, {}, set()),
        ({}, {"clip_norm": 0.5}, {"clip_norm"}),
        ({}, {"batch_size": 4, "grad_accum": 2}, {"batch_size", "grad_accum"}),
        (
            {"model": nn.BatchNorm1d(4)},
            {"model": nn.BatchNorm1d(4, eps=1e-3, momentum=None)},
            {"model.eps", "model.momentum"},
        ),
        ({"model": nn.Linear(1, 1)}, {"model": nn.Sequential(nn.Linear(1, 1))}, None),
        (
            {"model": nn.GroupNorm(2, 4)},
            {"model": nn.GroupNorm(4, 4)},
            {"model.num_groups"},
        ),
        ({"model": Scaled()}, {"model": Scaled()}, set()),
        ({"model": Scaled(scale=1.0)}, {"model": Scaled(scale=2.0)}, {"model.scale"}),
        ({"model": Scaled(act=F.relu)}, {"model": Scaled(act=F.gelu)}, {"model.act"}),
        ({"model": Scaled(config=Config())}, {"model": Scaled(config=Config(0.2))}, {"model.config.dropout"}),
        (
            {"model": Scaled(config=Config())},
            {"model": Scaled(config=Config(sizes=(1, 3), folder=Path("/y")))},
            {"model.config.sizes"},
        ),
        ({"model": Scaled(config=Slotted())}, {"model": Scaled(config=Slotted())}, set()),
        (
            {"model": Scaled(config=Slotted())},
            {"model": Scaled(config=Slotted(0.2, Config(sizes=(1, 3))))},
            {"model.config.dropout", "model.config.inner.sizes"},
        ),
        (
            {"model": Scaled(options=argparse.Namespace(p=1), table={"a": 1})},
            {"model": Scaled(options=argparse.Namespace(p=2), table={"a": 2})},
            {"model.options.p", "model.table.a"},
        ),
        ({"optimizer": torch.optim.SGD}, {"optimizer": torch.optim.Adam}, None),
        (
            {"optimizer": functools.partial(torch.optim.AdamW, betas=(0.9, 0.99))},
            {"optimizer": functools.partial(torch.optim.AdamW, betas=(0.9, 0.95))},
            {"optimizer.0.betas"},
        ),
        (
            {"schedule": Schedule("linear", 3, warmup_steps=1)},
            {"schedule": Schedule("linear", 3, warmup_steps=2)},
            {"schedule.warmup_steps"},
        ),
        (
            {"anneals": {"t": Anneal(1.0, 0.0, epochs=3)}},
            {"anneals": {"t": Anneal(1.0, 0.5, epochs=3)}},
            {"anneals.t.final"},
        ),
        (
            {"extras": {"average": nn.Dropout(0.1)}},
            {"extras": {"average": nn.Dropout(0.2)}},
            {"extras.average.p"},
        ),
    ],
)  # fmt: skip
def test_every_changed_hyperparameter_is_named(
    one: dict[str, Any], other: dict[str, Any], names: set[str] | None
) -> None:
    found = differing(describe(**one), describe(**other))
    assert found == names if names is not None else found


def make_loss(scale: float = 1.0, criterion: Any = None, helper: Any = None, path: str | None = None) -> Any:
    def loss(model: Any, batch: Any, weight: float = scale) -> Any:
        found = criterion(model(batch), batch) if criterion else model(batch).sum() * LIMIT
        return helper(found) if helper and not path else found

    return loss


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (make_loss(), make_loss(), set()),
        (make_loss(path="/a"), make_loss(path=None), set()),
        (make_loss(1.0), make_loss(2.0), {"loss.defaults.0"}),
        (
            make_loss(criterion=nn.CrossEntropyLoss()),
            make_loss(criterion=nn.CrossEntropyLoss(label_smoothing=0.1)),
            {"loss.captured.criterion.label_smoothing"},
        ),
        (
            make_loss(helper=functools.partial(F.dropout, p=0.1)),
            make_loss(helper=functools.partial(F.dropout, p=0.2)),
            {"loss.captured.helper.keywords.p"},
        ),
    ],
)  # fmt: skip
def test_values_that_the_loss_captured_are_recorded(one: Any, other: Any, names: set[str]) -> None:
    assert differing(describe(loss=one), describe(loss=other)) == names


@pytest.mark.parametrize(
    "loss", [make_loss(), lambda model, batch: [model(each) * LIMIT for each in batch], lambda *_: (lambda: LIMIT)()]
)
def test_a_global_that_the_loss_reads_is_recorded(monkeypatch: pytest.MonkeyPatch, loss: Any) -> None:
    before = describe(loss=loss)
    monkeypatch.setitem(globals(), "LIMIT", 0.5)
    assert differing(before, describe(loss=loss)) == {"loss.captured.LIMIT"}


def test_a_function_may_name_an_undefined_variable() -> None:
    def loss(model: Any, batch: Any) -> Any:
        return later

    assert "loss" in describe(loss=loss)
    later = 1


def test_weights_are_not_recorded() -> None:
    """They are in the state. On another machine the initial weights may differ in their last bits."""
    built = describe(model=Scaled(mean={"bias": torch.rand(1)}, scale=torch.tensor(0.5)))
    assert not any(name.startswith(("model.mean", "model.scale")) for name in built)
    assert not compare_built({"lr": 0.1}, {"lr": 0.1 + 1e-16}, is_upgraded=False)
    assert compare_built({"lr": 0.1}, {"lr": 0.1 + 1e-9}, is_upgraded=False)


SCHEDULERS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step),
    ),
    (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 * step),
    ),
    (
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    ),
    (
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
        ),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.8)], [2]
        ),
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("number", range(len(SCHEDULERS)))
def test_schedulers_and_their_functions_are_recorded(number: int) -> None:
    one, other = SCHEDULERS[number]
    assert not differing(describe(one), describe(one))
    found = differing(describe(one), describe(other))
    assert found
    assert all(name.startswith(("scheduler.0.", "optimizer.")) for name in found), found


def test_frozen_parameters_are_recorded() -> None:
    model = nn.Linear(2, 2)
    before = describe(model=model)
    model.bias.requires_grad_(False)
    assert differing(before, describe(model=model)) == {"model.bias.requires_grad"}


@pytest.mark.parametrize(
    "value",
    [
        time.time(), time.time_ns(), "/home/someone", "~/x", "https://host/x", str(uuid.uuid4()), "cuda:0",
        "2026-01-01T10:00:00", repr(object()), torch.device("cpu"), Path("x"), object(), os.environ,
    ],
    ids=[
        "seconds", "nanoseconds", "path", "home", "URL", "UUID", "GPU", "time", "address", "device", "Path", "object",
        "environment",
    ],
)  # fmt: skip
def test_values_of_a_process_are_left_out(value: Any) -> None:
    assert "model.value" not in describe(model=Scaled(value=value))


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ][32:]:  # a short environment, as in a container
        monkeypatch.delenv(name)
    monkeypatch.setenv("OWN_SECRET", "hunter2")
    monkeypatch.setitem(globals(), "LIMIT", os.environ)
    built = describe(loss=make_loss(), model=Scaled(api_key="hunter2", value=os.environ, table={"token": "hunter2"}))
    assert "hunter2" not in str(built)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**30, -1.5, "gelu", True, None, [1, 2], torch.float16])
def test_every_plain_value_is_recorded(value: Any) -> None:
    assert "model.value" in describe(model=Scaled(value=value))


def test_after_an_upgrade_only_common_names_count() -> None:
    saved, current = {"a": 1, "b": 1, "gone": 1}, {"a": 1, "b": 2, "new": 1}
    assert [each.name for each in compare_built(saved, current, is_upgraded=True)] == ["built.b"]
    assert [each.name for each in compare_built(saved, current, is_upgraded=False)] == [
        "built.b", "built.gone", "built.new",
    ]  # fmt: skip

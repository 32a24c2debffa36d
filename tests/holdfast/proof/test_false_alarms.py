"""Recipes that register their state are proved: neither the search nor the gate refuses them.

Each optimizer and each scheduler is proved at least once; with ``make soak`` every pair of them is proved.
"""

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Compute, Log, RunConfig
from holdfast.proof.result import Proof
from tests.conftest import IN_SOAK, IS_SOAK
from tests.support.lives import Lives
from tests.support.ordinary import OPTIMIZERS, SCHEDULERS

pytestmark = pytest.mark.slow

ALL = list(itertools.product(OPTIMIZERS, SCHEDULERS))
PAIRS = ALL if IS_SOAK else list(zip(OPTIMIZERS, itertools.cycle(SCHEDULERS), strict=False))
RECIPES = ("tied", "normed", "lazy", "swa", "target", "adversarial", "streamed")


NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a compiler"
)


def prove(nursery: Lives, folder: Path, recipe: str, kills: int = 3 if IS_SOAK else 2, **settings: str) -> Proof:
    return prove_config(nursery, make_config(folder, recipe, settings), kills)


def make_config(folder: Path, recipe: str, settings: Mapping[str, str | bool], **fields: Any) -> RunConfig:
    logs = Log(folder=str(folder / "logs"))
    return RunConfig(
        recipe=recipe, run="ordinary", store=str(folder), settings=dict(settings), log=logs, **fields
    )  # fmt: skip


def prove_config(nursery: Lives, config: RunConfig, kills: int) -> Proof:
    done = nursery.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 12, kills, 9)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return Proof.model_validate_json(done.stdout)


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_every_optimizer_and_scheduler_is_proved(
    nursery: Lives, tmp_path: Path, optimizer: str, scheduler: str
) -> None:
    proof = prove(nursery, tmp_path, "tests.support.ordinary:trained", optimizer=optimizer, scheduler=scheduler)
    assert proof.is_proved, str(proof)
    assert not proof.unchanged


@pytest.mark.parametrize("recipe", [*(f"ordinary:{name}" for name in RECIPES), "varied:streamed", "varied:timed"])
def test_ordinary_recipes_are_proved(nursery: Lives, tmp_path: Path, recipe: str) -> None:
    proof = prove(nursery, tmp_path, f"tests.support.{recipe}")
    assert proof.is_proved, str(proof)
    assert not proof.unchanged


@IN_SOAK
@NEEDS_COMPILER
def test_a_compiled_model_is_proved(nursery: Lives, tmp_path: Path) -> None:
    proof = prove(nursery, tmp_path, "tests.support.ordinary:compiled", kills=1)
    assert proof.is_proved, str(proof)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"recomputes": True}, id="gradient checkpointing"),
        pytest.param({"compiles": True, "recomputes": True}, id="compiled blocks", marks=NEEDS_COMPILER),
    ][: 2 if IS_SOAK else 1],
)
def test_a_loop_in_bf16_with_a_fused_optimizer_is_proved(
    nursery: Lives, tmp_path: Path, settings: dict[str, bool]
) -> None:
    compute = Compute(mixed_precision="bf16")
    config = make_config(tmp_path, "tests.support.loops:tuned", settings, compute=compute)
    proof = prove_config(nursery, config, kills=1)
    assert proof.is_proved, str(proof)
    assert not proof.unchanged


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert (len(OPTIMIZERS), len(SCHEDULERS)) == (14, 12)
    assert {name for pair in PAIRS for name in pair} == {*OPTIMIZERS, *SCHEDULERS}

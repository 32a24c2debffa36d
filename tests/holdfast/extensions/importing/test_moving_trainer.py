"""A run that goes on from a Trainer's own checkpoint ends on the weights of the Trainer that never stopped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from accelerate.state import AcceleratorState

from tests.support import hugging
from tests.support.hugging import EPOCHS, PER_EPOCH, TOTAL
from tests.support.moved import make_config, train_on

pytestmark = pytest.mark.extras("transformers")

VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
    "sequential": {"train_sampling_strategy": "sequential", "eval_strategy": "no"},
    "sgd": {"optim": "sgd"},
}
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1}
# The numbers of a log that don't depend on the machine's speed.
STEADY = ("loss", "learning_rate", "grad_norm", "epoch")


@pytest.fixture(autouse=True)
def fresh(same_process: None) -> Iterator[None]:
    torch.set_num_threads(1)
    hugging.seen.clear()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train_alone(trainer: Any) -> Any:
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    return trainer


def read_logs(after: int) -> list[tuple[int, dict[str, float]]]:
    """Return the steps and numbers of the logs that callbacks have seen after a step, and forget them."""
    found = [(step, each) for event, step, each in hugging.seen if event == "log" and step > after and "loss" in each]
    hugging.seen.clear()
    return [(step, {name: each[name] for name in STEADY}) for step, each in found]


@pytest.mark.parametrize("step", [PER_EPOCH + 2, TOTAL - 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_inside_an_epoch_it_ends_on_the_same_weights_and_logs_the_same(tmp_path: Path, step: int, variant: str) -> None:
    arguments = EVERY_STEP | VARIANTS[variant]
    alone = train_alone(hugging.make(str(tmp_path / "alone"), arguments))
    logged = read_logs(step)
    settings = {"output_dir": str(tmp_path / "out"), "arguments": arguments | {"save_strategy": "no"}}
    config = make_config(tmp_path, "tests.support.hugging:train", EPOCHS, **settings)
    taken, _, weights = train_on(config, tmp_path / "alone" / f"checkpoint-{step}")
    assert (taken.origin.form, taken.origin.step) == ("trainer", step)
    assert taken.origin.lacks == ["the callback Recorder"]
    assert read_logs(step) == logged
    assert len(logged) == TOTAL - step
    assert_equal(weights, alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_at_an_epochs_end_it_ends_on_the_same_weights(tmp_path: Path, variant: str) -> None:
    arguments = VARIANTS[variant]
    alone = train_alone(hugging.make_plain(str(tmp_path / "alone"), arguments | {"save_strategy": "epoch"}))
    settings = {"output_dir": str(tmp_path / "out"), "arguments": arguments}
    config = make_config(tmp_path, "tests.support.hugging:train_plain", EPOCHS, **settings)
    taken, _, weights = train_on(config, tmp_path / "alone" / f"checkpoint-{PER_EPOCH}")
    assert taken.origin.lacks == ["the sum of losses since step 3, for the Trainer's next log"]
    assert hugging.seen[-1] == ("history", TOTAL, {"logs": len(alone.state.log_history)})
    assert_equal(weights, alone)


def assert_equal(weights: dict[str, torch.Tensor], alone: Any) -> None:
    for name, each in alone.model.state_dict().items():
        assert torch.equal(each, weights[name]), name

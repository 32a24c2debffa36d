"""A run that goes on from Lightning's own checkpoint ends on the weights of the Trainer that never stopped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lightning")

import torch
from accelerate.state import AcceleratorState

from tests.support import lit
from tests.support.lit import PER_EPOCH
from tests.support.moved import make_config, train_on

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.extras("lightning")]

EPOCHS = 3
GENERATORS = [f"generator of {name}" for name in ("python", "numpy", "torch")]
LOGGED = "the numbers and metrics that this epoch has logged so far"


@pytest.fixture(autouse=True)
def fresh(same_process: None) -> Iterator[None]:
    torch.set_num_threads(1)
    lit.SEEN.clear()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("how", "saved", "step", "lacks"),
    [
        ("", "epoch-1", PER_EPOCH, []),
        ("", "batch-8", PER_EPOCH + 2, [LOGGED]),
        ("step", "epoch-2", 2 * PER_EPOCH, []),
        ("accumulates", "epoch-1", PER_EPOCH, []),
    ],
)
def test_it_ends_on_the_same_weights(tmp_path: Path, how: str, saved: str, step: int, lacks: list[str]) -> None:
    trainer, module, data = lit.build_ordered(how)
    trainer.callbacks.append(lit.Saver(str(tmp_path)))  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=data)
    counted = [(each[0], *each[1:4]) for each in lit.SEEN if each[0] in ("batch end", "validated", "epoch end")]
    lit.SEEN.clear()
    config = make_config(tmp_path, "tests.support.lit:ordered", EPOCHS, how=how)
    taken, _, weights = train_on(config, tmp_path / f"{saved}.ckpt")
    assert (taken.origin.form, taken.origin.step) == ("lightning", step)
    assert sorted(taken.origin.lacks) == sorted([*lacks, *GENERATORS])
    for name, each in module.state_dict().items():
        assert torch.equal(each, weights[name]), name
    again = [(each[0], *each[1:4]) for each in lit.SEEN if each[0] in ("batch end", "validated", "epoch end")]
    assert again == counted[len(counted) - len(again) :], "the hooks see the same epochs, steps and callback's counts"
    assert len([each for each in again if each[0] == "batch end"]) == EPOCHS * PER_EPOCH - step


def test_a_step_that_follows_lightnings_save_is_named(tmp_path: Path) -> None:
    trainer, module, data = lit.build_ordered("plateau")
    trainer.callbacks.append(lit.Saver(str(tmp_path)))  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=data)
    config = make_config(tmp_path, "tests.support.lit:ordered", EPOCHS, how="plateau")
    taken, _, _ = train_on(config, tmp_path / "epoch-1.ckpt")
    assert "the step of ReduceLROnPlateau at the end of epoch 1" in taken.origin.lacks

"""The explanation of a step whose loss has jumped."""

import math
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import live
from holdfast.checkpoint.observed import SampleLoss, Update
from holdfast.cli.app import app
from holdfast.config import DEFAULT_SEED, ChunkLength, Compute, Log, Retention, RunConfig
from holdfast.data import Order
from holdfast.errors import WrongUse
from holdfast.extensions.explain.explanation import Explanation, explain_step
from holdfast.journal import Journal, Origin
from holdfast.journal.spikes import UsualLoss, make_usual
from holdfast.recipe.trust import Trust
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from tests.conftest import IS_SOAK
from tests.support.makers import make_line, save_next
from tests.support.spiking import BATCH, POISONED, SAMPLES, SPIKE_STEP

STEP = 20


def make_explanation(**known: Any) -> Explanation:
    """An explanation of step 20, whose loss was about 1 in the steps before."""
    losses = known.pop("losses", [])
    before = known.pop("before", [1.0] * 4)
    samples = [
        SampleLoss(step=step, rank=0, index=place, content="", loss=loss)
        for step, found in ((STEP - 1, before), (STEP, losses))
        for place, loss in enumerate(found)
    ]
    usual = UsualLoss(median=1.0, deviation=0.1, count=64)
    known = {"loss": 30.0, "grad_norm": None, "usual": usual, "unpromised": []} | known
    return Explanation(
        run="r", step=STEP, commit=2, start=10, samples=samples, updates=[], activations=[], notes=[], **known
    )


@pytest.mark.parametrize(
    ("cause", "known"),
    [
        ("bits", {"first_step": 15, "losses": [90.0, 1.0]}),
        ("data", {"losses": [90.0, 1.0, 1.0, 1.0]}),
        ("data", {"losses": [math.nan, 1.0, 1.0, 1.0], "loss": None}),
        ("data", {"losses": [90.0, 1.0, 1.0, 1.0], "usual": None}),
        ("dynamics", {"losses": [30.0] * 4, "before": [29.0] * 4}),
        ("dynamics", {"losses": [math.nan] * 4, "before": [math.nan] * 4, "loss": None}),
        ("none", {"losses": [90.0, 1.0, 1.0, 1.0], "loss": 1.9}),
        ("unknown", {"losses": [1.0] * 4}),
        ("unknown", {"before": []}),
        # Equal bits aren't promised: the difference says nothing about the machine.
        ("data", {"first_step": 15, "unpromised": ["torch: 2.8 -> 2.9"], "losses": [90.0, 1.0]}),
    ],
)
def test_the_cause(cause: str, known: dict[str, Any]) -> None:
    assert make_explanation(**known).cause == cause


def test_equal_losses_have_a_least_deviation() -> None:
    usual = make_usual([1.0] * 10)
    assert usual is not None
    assert not usual.is_far(1.05)
    assert usual.is_far(1.2)
    assert usual.is_far(math.nan)
    assert make_usual([1.0, 2.0]) is None


def train(folder: Path, recipe: str, settings: dict[str, Any], skip: str = "", **fields: Any) -> tuple[Journal, Trust]:
    config = RunConfig(
        recipe=recipe, run="r", store=str(folder / "runs"), epochs=5, chunk=ChunkLength(steps=10), settings=settings,
        retention=Retention(keep_last=9), skip=skip, compute=Compute(device="cpu", **fields),
        log=Log(folder=str(folder / "logs")),
    )  # fmt: skip
    assert live(config).complete
    return Journal(open_store(config.store), "r"), Trust(config=config)


def find_poisoned_step(journal: Journal) -> int:
    """Return the last step that has trained the poisoned sample."""
    newest = journal.newest()
    assert newest is not None
    order = Order(SAMPLES, BATCH, 1, DEFAULT_SEED)
    return max(step for step in range(1, newest.step + 1) if POISONED in order.step_indices(step - 1))


def test_a_step_that_this_run_has_not_trained_is_refused(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    origin = Origin(form="torch", source="model.pt", sha256="0" * 64, step=10, lacks=[])
    line.commit(save_next(line, origin=origin), "imported")
    with pytest.raises(WrongUse, match="step 3 of run 'run' was not trained here: it was imported from "):
        explain_step(line.journal, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
class TestWithRanks:
    @pytest.mark.parametrize("fields", [{}, *[{"ranks": 2}] * IS_SOAK, {"ranks": 2, "virtual_ranks": 4}], ids=str)
    def test_a_sample_is_named(self, fields: dict[str, Any], tmp_path: Path) -> None:
        journal, trust = train(tmp_path, "tests.support.spiking:spike", {"cause": "data"}, **fields)
        step = find_poisoned_step(journal)
        found = explain_step(journal, step, 3, trust)
        assert (found.cause, found.first_step) == ("data", None)
        worst, *others = found.list_far()
        assert worst.index == POISONED
        assert len(others) == BATCH - 1
        assert worst.grad_norm is not None
        assert worst.loss > 100 * others[0].loss
        assert [each.grad_norm is None for each in others].count(False) >= 2
        assert f"  {POISONED} " in found.describe(3)

    def test_an_update_is_named(self, tmp_path: Path) -> None:
        journal, trust = train(tmp_path, "tests.support.spiking:spike", {"cause": "dynamics"})
        found = explain_step(journal, SPIKE_STEP, 3, trust)
        assert found.cause == "dynamics"
        assert found.start < SPIKE_STEP - 8
        updates = {step: max(each.size for each in found.updates if each.step == step) for step in (20, 21)}
        assert updates[20] > 5 * updates[21]
        assert isinstance(found.updates[0], Update)
        assert found.activations[0].layer == "first"
        assert explain_step(journal, SPIKE_STEP - 3, 3, trust).cause == "none"

    def test_a_machine_that_computed_wrongly_is_told_from_data(self, tmp_path: Path) -> None:
        flips = tmp_path / "flips"
        flips.touch()
        journal, trust = train(tmp_path, "tests.support.spiking:spike", {"cause": "", "flips": str(flips)})
        flips.unlink()
        found = explain_step(journal, SPIKE_STEP, 3, trust)
        assert (found.cause, found.first_step) == ("bits", SPIKE_STEP)
        assert "the machine or the program" in found.describe(3)

    def test_a_loop_of_ones_own_has_no_losses_of_samples(self, tmp_path: Path) -> None:
        journal, trust = train(tmp_path, "tests.support.spiking:spike_in_loop", {})
        found = explain_step(journal, 15, 3, trust)
        assert found.first_step is None
        assert not found.samples
        assert found.updates
        assert found.notes == ["no losses of single samples: the program has no loss function that takes a batch"]

    def test_steps_that_cannot_be_explained(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        journal, trust = train(tmp_path, "tests.support.spiking:spike", {"cause": ""}, skip="7")
        with pytest.raises(WrongUse, match="step 7 of run 'r' was skipped"):
            explain_step(journal, 7, trust=trust)
        for step in (0, 41):
            with pytest.raises(
                WrongUse, match=f"step {step} of run 'r' is not committed: its newest commit has step 40"
            ):
                explain_step(journal, step, 3, trust)
        with pytest.raises(WrongUse, match="--most 0"):
            app(["explain", str(tmp_path / "runs/r"), "3", "--most", "0"], exit_on_error=False)
        with pytest.raises(SystemExit) as ended:
            app(["explain", str(tmp_path / "runs/r"), "30", "--recipe", trust.recipe])
        assert ended.value.code == 0
        assert "cause: the loss of this step is not far" in capsys.readouterr().out

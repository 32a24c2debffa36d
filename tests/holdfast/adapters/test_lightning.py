"""Lightning's own loop as a run, in this process: stopped and resumed anywhere it ends on the same bytes."""

import dataclasses
import importlib
import inspect
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning.pytorch
from accelerate.state import AcceleratorState
from lightning.pytorch.loops.fit_loop import RestartStage
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Accuracy, MetricCollection

from holdfast.adapters import lightning_state
from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import RecipeError
from holdfast.machine.processes import LONGEST_EPOCH_VARIABLE
from holdfast.training import Gate, Training, resume, run_program, set_skipped, steps
from holdfast.training.recording import read_lines
from tests.support import lit, lit_wrong
from tests.support.trainings import Saved, find_lost, save_state

# Lightning warns of few workers, of a missing logger and the like.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.extras]
EPOCHS = 3


def make_config(folder: Path, program: str, **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.{program}", run="r", store=str(folder), epochs=EPOCHS, settings=settings,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


def live(config: RunConfig, stop: int = 0, saved: Saved | None = None) -> tuple[Saved, Training]:
    """Train a program from a checkpoint or from its beginning to a step or to the end. Return the checkpoint there."""
    found: list[tuple[Saved, Training]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        if saved is not None:
            resume(training, *saved, Gate("exact"), lambda *skipped: None)
        set_skipped(training, config.skip)
        yield from steps(training, stop or training.total_steps, lambda: False)
        found.append((save_state(training, Path(config.store)), training))

    run_program(config, serve)
    return found[0]


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    lit.SEEN.clear()


def content_id(saved: Saved) -> str:
    return saved[1].checkpoint_sha256


PROGRAMS = [("automatic", how) for how in lit.HOWS] + [("manual", "")]


def make_settings(folder: Path, program: str, how: str) -> dict[str, Any]:
    return {"how": how, "files": str(folder / "files")} if program == "automatic" else {}


@pytest.mark.parametrize(("program", "how"), [*PROGRAMS, ("stateful", "")], ids=lambda value: value)
def test_cut_at_many_steps_it_ends_on_the_same_bytes(tmp_path: Path, program: str, how: str) -> None:
    """What callbacks and loggers see is the same, too."""
    config = make_config(tmp_path, f"lit:{program}", **make_settings(tmp_path, program, how))
    straight, training = live(config)
    seen = [*lit.SEEN]
    lit.SEEN.clear()
    length, saved = training.steps_per_epoch, None
    for stop in (1, 2, length - 1, length, length + 1, 2 * length, 3 * length - 1, 0):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(straight)
    assert seen == lit.SEEN


@pytest.mark.parametrize(("program", "how"), [*PROGRAMS, ("stateful", "")], ids=lambda value: value)
def test_a_complete_run_that_is_extended_ends_on_the_same_bytes(tmp_path: Path, program: str, how: str) -> None:
    if how == "step":
        pytest.skip("its schedule has the run's length, so that a longer run is refused as drift")
    config = make_config(tmp_path, f"lit:{program}", **make_settings(tmp_path, program, how))
    straight, _ = live(config)
    saved, _ = live(config.model_copy(update={"epochs": EPOCHS - 1}))
    saved, _ = live(config, saved=saved)
    assert content_id(saved) == content_id(straight)


@pytest.mark.parametrize(("program", "how"), PROGRAMS, ids=lambda value: value)
def test_it_trains_as_lightning_alone(tmp_path: Path, program: str, how: str) -> None:
    """Weights are equal bit for bit, and callbacks and loggers see the same."""
    if program == "automatic":
        trainer, module, data = lit.build(how, str(tmp_path / "alone"))
        trainer.fit(module, datamodule=data)
    else:
        trainer, module, loader = lit.build_adversaries()
        trainer.fit(module, loader)
    seen = [*lit.SEEN]
    lit.SEEN.clear()
    _, training = live(make_config(tmp_path, f"lit:{program}", **make_settings(tmp_path, program, how)))
    assert seen == lit.SEEN
    trained = training.model.state_dict()
    for name, each in module.state_dict().items():
        assert torch.equal(each, trained[name]), name


def test_numbers_that_are_logged_are_in_the_trail(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        yield from steps(training, lit.PER_EPOCH, lambda: False)
        lines.extend(read_lines(training))

    run_program(make_config(tmp_path, "lit:automatic"), serve)
    first, *_, last = lines
    assert first["loss"] == first["logged"]["train_loss"] == first["logged"]["train_loss_step"]
    assert {"val_loss", "val_f1", "train_loss_epoch", "f1", "mean", "largest"} <= last["logged"].keys()
    assert last["loss"] == last["logged"]["train_loss"] != last["logged"]["train_loss_epoch"]
    assert "val_loss" not in first["logged"]


def test_what_a_callback_forgets_is_found_and_what_is_restored_is_not(tmp_path: Path) -> None:
    """The module's numbers are public and plain, so that they are restored with it."""
    lost = {each.name: each for each in find_lost(make_config(tmp_path, "lit_wrong:forgets"), at=2)}
    assert lost.keys() == {"Averages.steps", "Averages.average"}
    assert lost["Averages.average"].kind == "AveragedModel"
    assert "on_save_checkpoint" in lost["Averages.steps"].remedy


@pytest.mark.parametrize(("program", "how"), [("automatic", ""), ("automatic", "averages"), ("manual", "")])
def test_a_program_that_keeps_all_has_nothing_unregistered(tmp_path: Path, program: str, how: str) -> None:
    assert not find_lost(make_config(tmp_path, f"lit:{program}", **make_settings(tmp_path, program, how)), at=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fast_dev_run": True}, r"Trainer\(fast_dev_run=\.\.\.\)"),
        ({"overfit_batches": 2}, r"Trainer\(overfit_batches=\.\.\.\)"),
        ({"max_steps": 5}, r"Trainer\(max_steps=\.\.\.\)"),
        ({"max_time": "00:00:01:00"}, "the callback Timer ends training by the clock"),
        ({"reload_dataloaders_every_n_epochs": 1}, r"Trainer\(reload_dataloaders_every_n_epochs"),
        ({"val_check_interval": "00:00:00:10"}, r"Trainer\(val_check_interval=\.\.\.\)"),
        ({"devices": 2}, "the Trainer uses DDPStrategy"),
        ({"strategy": "ddp"}, "the Trainer uses DDPStrategy"),
        ({"limit_train_batches": 0}, "an epoch has no batch"),
    ],
)
def test_a_setting_that_cannot_be_exact_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        live(make_config(tmp_path, "lit_wrong:with_options", options=options))
    assert refused.value.message.startswith(line_of(lit_wrong.with_options, "held.fit"))
    assert refused.value.hint


@pytest.mark.parametrize(
    ("how", "at", "message"),
    [
        ("timer", "held.fit(run, trainer, module, loader)", "the callback Timer ends training by the clock"),
        ("checkpoint", 'ckpt_path="last"', r"fit\(ckpt_path='last'\): a run resumes from its own last checkpoint only"),
        ("several loaders", "[loader, loader]", "a resume can't restore the position of several loaders"),
        ("stream", "Endless()", "the loader has no length"),
        ("no trainer", "module, module", r"expected a lightning\.pytorch\.Trainer, found a tests\.support\.lit"),
        ("twice", "**quiet()), module", r"run\.steps\(\.\.\.\) was called twice"),
        ("skips", "held.fit(run, trainer, module, loader)", "Lightning left an epoch of 6 batches early, in step 4"),
    ],
)
def test_a_mistake_is_one_line_with_the_users_file_and_line(tmp_path: Path, how: str, at: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        live(make_config(tmp_path, "lit_wrong:wrong", how=how))
    assert refused.value.message.startswith(line_of(lit_wrong.wrong, at))
    assert refused.value.hint


def test_steps_to_skip_are_refused_by_name(tmp_path: Path) -> None:
    config = make_config(tmp_path, "lit:automatic", **make_settings(tmp_path, "automatic", "")).with_skip("3")
    with pytest.raises(RecipeError, match=r"step 3 can't be skipped: a Lightning Trainer counts its steps and batches"):
        live(config)


def test_mixed_precision_of_the_configuration_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, "lit:automatic").model_copy(update={"compute": Compute(mixed_precision="bf16")})
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate has one precision for each process
    try:
        with pytest.raises(RecipeError, match=r"compute\.mixed_precision = 'bf16' has no effect on Lightning's loop"):
            live(config)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_another_or_no_lightning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "holdfast.adapters.lightning"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(lightning.pytorch, "__version__", "2.7.0")
    with pytest.raises(ImportError, match=r"needs Lightning 2\.6: found 2\.7\.0"):
        importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r"needs Lightning 2\.6: .*pip install 'holdfast-train\[lightning\]'"):
        importlib.import_module(name)


def line_of(function: Any, text: str) -> str:
    """Return the file and line of the last statement of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    number = max(number for number, line in enumerate(lines, first) if text in line)
    return f"{lit_wrong.__file__}:{number}: "


def test_an_early_stop_says_how_to_end_the_run_there(tmp_path: Path) -> None:
    config = make_config(tmp_path, "lit_wrong:stopping")
    with pytest.raises(
        RecipeError, match="the Trainer stopped early, after step 12 of 18: Monitored metric"
    ) as refused:
        live(config)
    assert refused.value.hint == "set epochs = 2 in the configuration to end the run after this step"
    assert live(config.model_copy(update={"epochs": 2}))[1].progress.step == 12


def test_an_early_stop_in_an_epoch_says_how_to_stop_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the Trainer stopped early, after step 4 of 18") as refused:
        live(make_config(tmp_path, "lit_wrong:stopping", interval=0.34))
    assert "check_on_train_epoch_end=True" in refused.value.hint


def test_the_configuration_says_how_many_epochs(tmp_path: Path) -> None:
    config = make_config(tmp_path, "lit:automatic").model_copy(update={"epochs": 4})
    assert live(config)[1].progress.step == 4 * lit.PER_EPOCH


def test_a_proof_may_cut_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LONGEST_EPOCH_VARIABLE, "4")
    config = make_config(tmp_path, "lit:automatic", how="step")
    straight, training = live(config)
    assert training.progress.step == EPOCHS * 4
    assert content_id(live(config, 0, live(config, 5)[0])[0]) == content_id(straight)


def test_a_signal_does_not_end_lightnings_loop(tmp_path: Path) -> None:
    """Lightning ends its loop with an error on SIGTERM; the run's own handler is in force instead."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))

    def serve(training: Training) -> Generator[None, None, None]:
        for _ in steps(training, training.total_steps, lambda: False):
            if training.progress.step == 2:
                signal.raise_signal(signal.SIGTERM)
            yield

    try:
        run_program(make_config(tmp_path, "lit:automatic"), serve)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert sum(each[0] == "batch end" for each in lit.SEEN) == EPOCHS * lit.PER_EPOCH


# What the adapter names of Lightning's and torchmetrics' private parts, by the object that has it.
PRIVATE: list[tuple[Any, str]] = [
    (lambda trainer: trainer, "_logger_connector _signal_connector _val_check_time_interval"),
    (lambda trainer: trainer._logger_connector, " ".join(lightning_state.LOGGED + lightning_state.CONNECTOR)),
    (lambda trainer: trainer._signal_connector, "teardown received_sigterm register_signal_handlers"),
    (lambda trainer: trainer.strategy, "_lightning_optimizers root_device"),
    (
        lambda trainer: trainer.fit_loop,
        "_combined_loader _data_fetcher _data_source _restart_stage "
        "setup_data on_run_start on_advance_start on_run_end",
    ),
    (
        lambda trainer: trainer.fit_loop.epoch_loop,
        "_results val_loop automatic_optimization manual_optimization batch_progress",
    ),
    (lambda trainer: trainer.fit_loop.epoch_loop.val_loop, "_results _has_run _seen_batches_per_dataloader"),
    *((lambda trainer, name=name: getattr(trainer.fit_loop.epoch_loop, name), " ".join(lightning_state.RESTARTING))
      for name in ("val_loop", "automatic_optimization", "manual_optimization")),
    (lambda trainer: Accuracy(task="binary"), "_defaults " + " ".join(lightning_state.METRIC)),
    (lambda trainer: MetricCollection([Accuracy(task="binary")]), " ".join(lightning_state.COLLECTION)),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(PRIVATE)))
def test_private_names_of_lightning_are_there(row: int) -> None:
    """A version of Lightning without one of these names fails here first."""
    find, names = PRIVATE[row]
    owner = find(lit.build()[0])
    assert [name for name in names.split() if not hasattr(owner, name)] == []


def test_logged_values_have_the_fields_that_are_kept() -> None:
    fields = {each.name for each in dataclasses.fields(_Metadata)}
    assert fields == {*lightning_state.META, "reduce_fx", "_sync"}
    assert {each.name for each in dataclasses.fields(_Sync)} == {"fn", "_should", "rank_zero_only", "_op", "_group"}
    assert RestartStage.RESTARTED_MID_EPOCH
    assert [*inspect.signature(_ResultMetric).parameters] == ["metadata", "is_tensor"]

"""Metadata and metrics describe epochs in the same way, whatever the run's chunks and attempts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Anneal, Recipe, Schedule
from holdfast.checkpoint import Metadata
from holdfast.checkpoint.departure import compute_mean_loss
from holdfast.store.local import LocalStore
from holdfast.training import Gate, Training, resume
from holdfast.training.recording import read_lines
from tests.support import trainings
from tests.support.makers import METADATA_FIELDS, make_commit, make_line, train
from tests.support.trainings import save_state, save_step, train_to
from tests.support.varied import Points

pytestmark = pytest.mark.usefixtures("same_process")

STEPS_PER_EPOCH = 6
EPOCHS = 3
# 1e-3 to half of it over three epochs.
FIRST_RATES = [[pytest.approx(rate)] for rate in (0.001, 0.001 * 5 / 6, 0.001 * 4 / 6)]


def scheduled(schedule: str = "linear") -> Recipe:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    temperature = Anneal(1.0, 0.0, epochs=1)

    def loss(model: nn.Module, batch: Any) -> Any:
        return temperature.value * (model(batch[0]) - batch[1]).square().mean()

    return Recipe(
        model=model, data=Points(noise=False), optimizer=optimizer, loss=loss, batch_size=4, grad_accum=1,
        steps_per_epoch=STEPS_PER_EPOCH, anneals={"temperature": temperature},
        schedule=Schedule("linear", epochs=EPOCHS, final_lr_scale=0.5) if schedule == "linear" else None,
    )  # fmt: skip


def make(folder: Path, **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:scheduled", **settings)


def resumed(folder: Path, saved: trainings.Saved) -> Training:
    """Return a fresh training with the saved state."""
    training = make(folder)
    resume(training, *saved, Gate(), lambda done, total: None)
    return training


@pytest.mark.parametrize(("step", "of_epoch"), [(1, 1), (5, 5), (6, 6), (7, 1), (12, 6)])
def test_an_epochs_end_counts_all_steps_of_the_epoch(tmp_path: Path, step: int, of_epoch: int) -> None:
    training = make(tmp_path)
    train_to(training, step)
    _, metadata = save_state(training, tmp_path)
    assert (metadata.optimizer_steps_epoch, metadata.is_at_epoch_end) == (of_epoch, of_epoch == STEPS_PER_EPOCH)


def test_zero_steps_in_an_earlier_versions_metadata_are_an_epochs_end() -> None:
    parts = {"checkpoint_sha256": "0" * 64, "checkpoint_size_bytes": 1}
    assert Metadata(**METADATA_FIELDS | parts | {"optimizer_steps_epoch": 0}).is_at_epoch_end


def test_a_commit_at_an_epochs_end_has_the_epochs_metrics(tmp_path: Path) -> None:
    line = make_line(LocalStore(str(tmp_path)))
    within = train(line, 4, metrics={"score": 1.0}, optimizer_steps_epoch=4)
    end = train(line, 6, metrics={"score": 2.0}, optimizer_steps_epoch=10)
    assert "score" not in within.metrics
    assert end.metrics["score"] == 2.0


def test_a_chunk_has_the_mean_loss_of_its_own_steps(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 3)
    save_state(training, tmp_path)
    train_to(training, STEPS_PER_EPOCH - 1)
    losses = [line["loss"] for line in read_lines(training)]
    assert len(losses) == STEPS_PER_EPOCH - 1 - 3
    _, metadata = save_state(training, tmp_path)
    assert metadata.loss == pytest.approx(sum(losses) / len(losses))
    assert metadata.loss != metadata.avg_loss, "that is the mean of the epoch so far"
    commit = make_commit(1, metrics={"avg_loss": 2.0, "score": 1.0}, loss=0.5)
    assert commit.shown_metrics == {"avg_loss": 0.5, "score": 1.0}
    assert make_commit(1, metrics={"avg_loss": 2.0}).shown_metrics == {"avg_loss": 2.0}, "an older commit"


@pytest.mark.parametrize("losses", [[], [1.0, float("nan")], [1e308, 1e308]])
def test_a_mean_that_is_not_finite_is_none(losses: list[float]) -> None:
    assert compute_mean_loss([{"step": step, "loss": loss} for step, loss in enumerate(losses)]) is None


def test_a_state_tells_of_the_last_epochs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("holdfast.training.loop", "holdfast.training.saving", "holdfast.checkpoint.progress"):
        monkeypatch.setattr(f"{module}.EPOCHS_KEPT", 2)
    straight = make(tmp_path)
    train_to(straight, EPOCHS * STEPS_PER_EPOCH)
    assert len(straight.progress.history) == 2
    _, metadata = save_state(straight, tmp_path)
    assert metadata.learning_rate_history == FIRST_RATES[-2:]
    assert metadata.learning_rate_history_len == EPOCHS


def test_the_history_has_the_rate_of_each_epochs_first_step(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, EPOCHS * STEPS_PER_EPOCH)
    _, metadata = save_state(training, tmp_path)
    assert metadata.learning_rate_history == FIRST_RATES
    assert metadata.learning_rate_history_len == EPOCHS


@pytest.mark.parametrize("cuts", [[3], [6], [7, 11], [1, 2, 6, 12, 17]])
def test_a_resumed_run_has_the_same_history(tmp_path: Path, cuts: list[int]) -> None:
    training = make(tmp_path)
    for cut in cuts:
        train_to(training, cut)
        training = resumed(tmp_path, save_state(training, tmp_path))
    train_to(training, EPOCHS * STEPS_PER_EPOCH)
    assert save_state(training, tmp_path)[1].learning_rate_history == FIRST_RATES


def test_a_resume_from_an_earlier_step_forgets_later_epochs(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 4)
    saved = save_state(training, tmp_path)
    train_to(training, 14)
    resume(training, *saved, Gate(), lambda done, total: None)
    train_to(training, EPOCHS * STEPS_PER_EPOCH)
    assert save_state(training, tmp_path)[1].learning_rate_history == FIRST_RATES


@pytest.mark.parametrize("step", [9, 12])
def test_an_earlier_versions_history_is_read_from_the_trail(tmp_path: Path, step: int) -> None:
    """An earlier version's metadata has the rates of last steps, and none of the epoch in progress."""
    training, folder = make(tmp_path), LocalStore(str(tmp_path / "trained"))
    lines: list[dict[str, Any]] = []
    for number, stop in enumerate((4, step), start=1):
        train_to(training, stop)
        lines = list(read_lines(training))
        payload, metadata = save_state(training, tmp_path)
        folder.replace(f"metrics/{number:08d}.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    last = [[9.0]] * (step // STEPS_PER_EPOCH)
    old = metadata.model_copy(update={"epoch_first_lrs": None, "learning_rate_history": last})
    training = resumed(tmp_path, (payload, old))
    train_to(training, EPOCHS * STEPS_PER_EPOCH)
    assert save_state(training, tmp_path)[1].learning_rate_history == FIRST_RATES


def test_an_earlier_versions_recorded_rates_stay_if_the_trail_is_lost(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 9)
    payload, metadata = save_state(training, tmp_path)
    old = metadata.model_copy(update={"epoch_first_lrs": None, "learning_rate_history": [[9.0]]})
    training = resumed(tmp_path, (payload, old))
    train_to(training, EPOCHS * STEPS_PER_EPOCH)
    history = save_state(training, tmp_path)[1].learning_rate_history
    assert (history[0], history[2], len(history)) == ([9.0], FIRST_RATES[2], EPOCHS)


def test_each_step_logs_the_anneals_that_it_used(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 8)
    used = [line["anneals"]["temperature"] for line in read_lines(training)]
    assert used == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0, 0.0])


def test_a_resume_summarizes_what_it_restored(tmp_path: Path) -> None:
    training = make(tmp_path)
    training.progress.anneal_offset = 20
    train_to(training, 6)
    saved = save_state(training, tmp_path)
    found = resume(make(tmp_path), *saved, Gate(), lambda done, total: None)
    assert found.summary == "lr 0.000833333, scheduler linear at step 6, anneal offset 20"


def test_a_resume_without_a_scheduler_says_so(tmp_path: Path) -> None:
    training = make(tmp_path, schedule="none")
    train_to(training, 2)
    saved = save_state(training, tmp_path)
    found = resume(make(tmp_path, schedule="none"), *saved, Gate(), lambda done, total: None)
    assert found.summary == "lr 0.001, no scheduler, anneal offset 0"


def test_a_trail_has_the_rates_of_every_step(tmp_path: Path) -> None:
    training, store = make(tmp_path), LocalStore(str(tmp_path / "run"))
    train_to(training, 7)
    saved = save_step(training, store)
    lines = [json.loads(text) for text in store.read(f"{saved.path}/metrics.jsonl").splitlines()]
    assert [line["lrs"][0] for line in lines] == pytest.approx([1e-3 * (1 - step / 36) for step in range(7)])

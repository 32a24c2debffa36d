"""A stream's first micro-batch outlives the process that read it, so that a resumed model is probed with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from holdfast import Recipe, state
from holdfast.errors import GateTripped
from holdfast.training import Gate, Training, measure_probe, resume
from holdfast.training.first_batch import LARGEST_BYTES, FirstBatch
from tests.support import trainings
from tests.support.trainings import save_state, train_to

pytestmark = pytest.mark.usefixtures("same_process")


class Stream:
    """Noise that can be read only once: a second iterator continues where the first one is."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.read += 1
            yield torch.randn(4, generator=torch.Generator().manual_seed(self.read))

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.read = saved["read"]


def streamed(scale: float = 1.0) -> Recipe:
    model = torch.nn.Linear(4, 4)

    def loss(model: Any, batch: Any) -> Any:
        given = batch.clone()
        batch.zero_()  # a loss may change its batch
        return F.mse_loss(model(given) * scale, given)

    return Recipe(
        model=model, data=Stream(), optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=loss, batch_size=8,
        steps_per_epoch=4,
    )  # fmt: skip


def make(folder: Path, **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:streamed", **settings)


def test_a_resumed_stream_is_probed_with_its_first_batch(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 3)
    payload, metadata = save_state(training, tmp_path)
    assert metadata.probe.sha256
    resumed = make(tmp_path)
    resume(resumed, payload, metadata, Gate(), lambda *skipped: None)
    assert measure_probe(resumed).sha256 == metadata.probe.sha256
    assert resumed.recipe.data.read == training.recipe.data.read  # type: ignore[attr-defined]
    # Each checkpoint's metadata hands it on to the next one's. It is not part of the state.
    train_to(resumed, 4)
    train_to(training, 4)
    (tmp_path / "again").mkdir()
    again = save_state(resumed, tmp_path / "again")[1]
    (tmp_path / "straight").mkdir()
    straight = save_state(training, tmp_path / "straight")[1]
    assert (again.first_batch, again.probe, again.checkpoint_sha256) == (
        metadata.first_batch, straight.probe, straight.checkpoint_sha256,
    )  # fmt: skip


def test_a_model_whose_code_has_changed_trips_the_gate(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 2)
    payload, metadata = save_state(training, tmp_path)
    with pytest.raises(GateTripped, match="the probe gives a different result"):
        resume(make(tmp_path, scale=1.5), payload, metadata, Gate(), lambda *skipped: None)


def test_a_checkpoint_without_the_batch_is_resumed_without_a_probe(tmp_path: Path) -> None:
    training = make(tmp_path)
    train_to(training, 2)
    payload, metadata = save_state(training, tmp_path)
    old = metadata.model_copy(update={"first_batch": "", "probe": metadata.probe.model_copy(update={"sha256": ""})})
    resumed = make(tmp_path)
    resume(resumed, payload, old, Gate(), lambda *skipped: None)
    train_to(resumed, 3)
    assert not measure_probe(resumed).sha256


@pytest.mark.parametrize("batch", [{"names": ["a", "b"], "x": torch.arange(3)}, [torch.ones(2), (1, 2.5, None)]])
def test_only_the_first_batch_is_kept_and_unchanged(batch: Any) -> None:
    before = state.digest_rng(state.capture_rng())
    first = FirstBatch()
    first.keep(batch, lambda value: [value])
    first.keep({"x": 0}, lambda value: [value])
    assert repr(first.read()) == repr(batch)
    assert first.read() is not first.read()
    assert state.digest_rng(state.capture_rng()) == before


@pytest.mark.parametrize("batch", [torch.zeros(LARGEST_BYTES, dtype=torch.uint8), [object()]])
def test_a_batch_that_is_too_large_or_needs_a_pickle_is_not_kept(batch: Any) -> None:
    first = FirstBatch()
    first.keep(batch, lambda value: [value])
    assert not first.text

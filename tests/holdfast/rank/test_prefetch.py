"""A rank's prefetch returns the checkpoint that the attempt restores, or nothing."""

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import RunConfig
from holdfast.attempt import Line
from holdfast.checkpoint import PAYLOAD, differences, read_payload
from holdfast.config import Compute
from holdfast.errors import CheckpointDamaged
from holdfast.journal import Journal
from holdfast.memory import WITHOUT_VARIABLE
from holdfast.rank import serving
from holdfast.rank.messages import Event, Restore
from holdfast.rank.prefetch import COMMIT_VARIABLE, CONFIG_VARIABLE, Prefetch
from holdfast.recipe.probe import Gate
from holdfast.store import open_store
from holdfast.training import Training, capturing
from tests.support.makers import commit_of, make_line, train
from tests.support.trainings import make, save_step, train_to


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Make a run of two commits, and the environment of a rank that will restore the second."""
    line = make_line(open_store(str(tmp_path)))
    for _ in range(2):
        train(line)
    config = RunConfig(recipe="m:f", run=line.journal.run, store=str(tmp_path))
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    monkeypatch.setenv(COMMIT_VARIABLE, "2")
    return line


def test_the_prefetched_state_is_returned_once(line: Line) -> None:
    commit = line.journal.read_commit(2)
    prefetch = Prefetch()
    payload = prefetch.take(commit)
    assert payload
    assert differences(payload, read_payload(line.journal.store, commit)) == []
    assert prefetch.take(commit) is None


def test_a_commit_that_was_not_prefetched_returns_none(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Prefetch().take(line.journal.read_commit(1)) is None
    for number in ("0", "7"):  # a fresh run; a commit that can't be read
        monkeypatch.setenv(COMMIT_VARIABLE, number)
        assert Prefetch().take(line.journal.read_commit(2)) is None
    monkeypatch.delenv(COMMIT_VARIABLE)
    assert Prefetch().take(line.journal.read_commit(2)) is None


def test_a_rank_with_a_share_of_the_state_reads_nothing_ahead(
    line: Line, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = RunConfig(recipe="m:f", run=line.journal.run, store=str(tmp_path))
    for ranks, reads in ((1, True), (2, False)):
        compute = Compute(ranks=ranks, parallel="fsdp")
        monkeypatch.setenv(CONFIG_VARIABLE, config.model_copy(update={"compute": compute}).model_dump_json())
        assert (Prefetch().take(line.journal.read_commit(2)) is not None) == reads


def test_prefetch_reads_no_state_if_turned_off(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "prefetch")
    assert Prefetch().take(line.journal.read_commit(2)) is None


def test_damage_is_raised_when_the_state_is_taken(line: Line) -> None:
    commit = line.journal.read_commit(2)
    line.journal.store.replace(f"{commit.path}/{PAYLOAD}", b"damaged")
    prefetch = Prefetch()
    with pytest.raises(CheckpointDamaged):
        prefetch.take(commit)
    assert prefetch.take(commit) is None  # a second caller reads the checkpoint itself


@pytest.mark.usefixtures("same_process")
def test_a_rank_collects_garbage_except_objects_from_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path, "tests.support.varied:varied_language").config
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    monkeypatch.setattr(serving, "Events", Heard)
    found = list[Any]()

    def serve(training: Training, *rest: object) -> Generator[None, None, None]:
        found.extend((gc.isenabled(), training))
        yield from ()

    monkeypatch.setattr(serving, "serve", serve)
    gc.disable()
    try:
        assert serving.main() == 0
        is_enabled, training = found
        assert is_enabled
        assert not any(training is each for each in gc.get_objects())
    finally:
        gc.enable()
        gc.unfreeze()


class Heard:
    """A stand-in for a rank's `Events` that notes their names."""

    def __init__(self) -> None:
        self.names = list[str]()

    def send(self, event: Event) -> None:
        self.names.append(type(event).__name__)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("is_kept", [False, True])
def test_saves_reuse_the_prefetched_memory_unless_a_tensor_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    training = make(tmp_path, "tests.support.varied:varied_language")
    journal = Journal(open_store(str(tmp_path)), training.config.run)
    journal.begin(training.config.recipe)
    train_to(training, 2)
    commit = commit_of(save_step(training, journal.store))
    journal.publish_commit(commit)
    monkeypatch.setenv(CONFIG_VARIABLE, training.config.model_dump_json())
    monkeypatch.setenv(COMMIT_VARIABLE, "1")
    prefetch, heard = Prefetch(), Heard()
    again = make(tmp_path, "tests.support.varied:varied_language")
    again.saver.buffers = prefetch.buffers
    load, kept, addresses = capturing.load, list[Tensor](), list[int]()

    def load_and_keep(name: str, target: Any, saved: Any) -> None:
        if name == "model":
            addresses.extend(tensor.data_ptr() for tensor in saved.values())
            kept.extend(saved.values() if is_kept else ())
        load(name, target, saved)

    monkeypatch.setattr(capturing, "load", load_and_keep)
    order = Restore(commit=commit, gate=Gate())
    serving.restore_commit(again, journal.store, order, heard, prefetch)  # type: ignore[arg-type]
    assert heard.names == ["Restored"]
    before = [tensor.clone() for tensor in kept]
    train_to(again, 4)
    saved = save_step(again, journal.store)
    assert all(tensor.equal(was) for tensor, was in zip(kept, before, strict=True))
    (part,) = saved.metadata.parts
    memory = again.saver.buffers.take(0, part.size_bytes)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert {first <= address < first + part.size_bytes for address in addresses} == {not is_kept}

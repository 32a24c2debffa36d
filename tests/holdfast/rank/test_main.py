"""One rank's process: its garbage, and the memory of its saves."""

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.journal import Journal
from holdfast.rank import restore, serving
from holdfast.rank.messages import Event, Restore
from holdfast.rank.process import CONFIG_VARIABLE
from holdfast.rank.service import RankService
from holdfast.recipe.probe import Gate
from holdfast.store import open_store
from holdfast.training import capturing
from tests.support.makers import commit_of
from tests.support.trainings import make, save_step, train_to


@pytest.mark.usefixtures("same_process")
def test_a_rank_collects_garbage_except_objects_from_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path, "tests.support.varied:varied_language").config
    monkeypatch.setenv(CONFIG_VARIABLE, config.model_dump_json())
    monkeypatch.setattr(serving, "Events", Heard)
    found = list[Any]()

    def serve(service: RankService) -> Generator[None, None, None]:
        found.extend((gc.isenabled(), service.training))
        yield from ()

    monkeypatch.setattr(RankService, "serve", serve)
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

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("is_kept", [False, True])
def test_saves_reuse_the_memory_of_a_restore_unless_a_tensor_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    training = make(tmp_path, "tests.support.varied:varied_language")
    journal = Journal(open_store(str(tmp_path)), training.config.run)
    journal.begin(training.config.recipe)
    train_to(training, 2)
    commit = commit_of(save_step(training, journal.store))
    journal.publish_commit(commit)
    heard = Heard()
    again = make(tmp_path, "tests.support.varied:varied_language")
    load, kept, addresses = capturing.load, list[Tensor](), list[int]()

    def load_and_keep(name: str, target: Any, saved: Any) -> None:
        if name == "model":
            addresses.extend(tensor.data_ptr() for tensor in saved.values())
            kept.extend(saved.values() if is_kept else ())
        load(name, target, saved)

    monkeypatch.setattr(capturing, "load", load_and_keep)
    order = Restore(commit=commit, gate=Gate())
    restore.restore_commit(again, journal.store, order, heard)  # type: ignore[arg-type]
    assert heard.names == ["Restored"]
    before = [tensor.clone() for tensor in kept]
    train_to(again, 4)
    saved = save_step(again, journal.store)
    assert all(tensor.equal(was) for tensor, was in zip(kept, before, strict=True))
    (part,) = saved.metadata.parts
    memory = again.saver.buffers.take(0, part.size_bytes)
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert {first <= address < first + part.size_bytes for address in addresses} == {not is_kept}

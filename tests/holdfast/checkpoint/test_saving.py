"""Saves run beside training, one at a time. None is visible half done, and each error is raised by the next call."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint import METADATA, CheckpointSave, Saved, Saver, differences
from holdfast.errors import StoreFull
from holdfast.state import to_payload
from holdfast.store import Writer
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PART_BYTES, PARTS, save


def test_training_continues_during_a_save(folder: LocalStore, gate: threading.Event) -> None:
    state = {"weight": torch.ones(PART_BYTES), "rest": torch.ones(3)}
    saver, durable = Saver(PART_BYTES), list[Saved]()
    before = to_payload({name: tensor.clone() for name, tensor in state.items()})
    saver.begin(CheckpointSave(folder, to_payload(state), METADATA_FIELDS, "", durable.append, is_urgent=False))
    for tensor in state.values():
        tensor.zero_()
    assert (saver.is_busy, durable, folder.list()) == (True, [], [])
    saver.check()
    gate.set()
    saved = saver.wait()
    assert saved is not None
    assert (saver.is_busy, durable) == (False, [saved])
    assert saved.save_s > 0
    assert differences(before, checkpoint.read_payload(folder, commit_of(saved))) == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_no_part_gets_its_name_before_the_first_part(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    creating, there = LocalStore.creating, list[str]()

    @contextlib.contextmanager
    def slowly(store: LocalStore, name: str) -> Iterator[Writer]:
        with creating(store, name) as writer:
            yield writer
            if name == f"epoch-0001/{PARTS[0]}":
                time.sleep(0.5)
                there.extend(store.list("epoch-0001"))
                if is_taken:
                    with creating(store, name) as other:
                        other.write(b"another writer's")

    monkeypatch.setattr(LocalStore, "creating", slowly)
    saved = save(folder)
    assert there == []
    assert saved.path == ("epoch-0001.2" if is_taken else "epoch-0001")
    assert checkpoint.verify(folder, commit_of(saved)) == []
    assert folder.list("epoch-0001") == (PARTS[:1] if is_taken else sorted([*PARTS, METADATA, "metrics.jsonl"]))


def test_a_save_waits_for_the_save_before(folder: LocalStore, gate: threading.Event) -> None:
    saver, durable = Saver(), list[int]()
    for step in (10, 20):
        if step == 20:
            threading.Timer(0.2, gate.set).start()
        fields = METADATA_FIELDS | {"optimizer_steps_total": step}
        saver.begin(
            CheckpointSave(folder, to_payload({"step": step}), fields, "", lambda saved: durable.append(saved.step))
        )
        assert durable == ([] if step == 10 else [10])
    saver.wait()
    assert durable == [10, 20]


@pytest.mark.parametrize("request_", ["list", "creating"])
def test_a_failed_saves_error_is_raised_by_the_next_call(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    def full(store: LocalStore, name: str) -> Any:
        raise StoreFull(f"can't write {name}")

    saver = Saver()
    monkeypatch.setattr(LocalStore, request_, full)
    saver.begin(CheckpointSave(folder, to_payload({}), METADATA_FIELDS, ""))
    for ask in (
        saver.wait,
        saver.check,
        lambda: saver.begin(CheckpointSave(folder, to_payload({}), METADATA_FIELDS, "")),
    ):
        with pytest.raises(StoreFull):
            ask()

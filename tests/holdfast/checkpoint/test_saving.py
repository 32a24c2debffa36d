"""Save beside training: one save at a time, no half of one under its name, and errors where they are asked for."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint import METADATA, Saved, Saver, differences
from holdfast.errors import StoreFull
from holdfast.state import to_payload
from holdfast.store import Writer
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PART_BYTES, PARTS, save


def test_training_goes_on_while_a_save_is_on_its_way(run: LocalStore, gate: threading.Event) -> None:
    state = {"weight": torch.ones(PART_BYTES), "rest": torch.ones(3)}
    saver, durable = Saver(PART_BYTES), list[Saved]()
    before = to_payload({name: tensor.clone() for name, tensor in state.items()})
    saver.begin(run, to_payload(state), METADATA_FIELDS, "", durable.append, is_urgent=False)
    for tensor in state.values():
        tensor.zero_()
    assert (saver.is_busy, durable, run.list()) == (True, [], [])
    saver.check()
    gate.set()
    saved = saver.wait()
    assert saved is not None
    assert (saver.is_busy, durable) == (False, [saved])
    assert saved.save_s > 0
    assert differences(before, checkpoint.read_payload(run, commit_of(saved))) == []


@pytest.mark.parametrize("is_taken", [False, True])
def test_no_part_has_its_name_before_the_first_one(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch, is_taken: bool
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
    saved = save(run)
    assert there == []
    assert saved.path == ("epoch-0001.2" if is_taken else "epoch-0001")
    assert checkpoint.verify(run, commit_of(saved)) == []
    assert run.list("epoch-0001") == (PARTS[:1] if is_taken else sorted([*PARTS, METADATA, "metrics.jsonl"]))


def test_one_save_at_a_time(run: LocalStore, gate: threading.Event) -> None:
    saver, durable = Saver(), list[int]()
    for step in (10, 20):
        if step == 20:
            threading.Timer(0.2, gate.set).start()
        fields = METADATA_FIELDS | {"optimizer_steps_total": step}
        saver.begin(run, to_payload({"step": step}), fields, "", lambda saved: durable.append(saved.step))
        assert durable == ([] if step == 10 else [10])
    saver.wait()
    assert durable == [10, 20]


@pytest.mark.parametrize("request_", ["list", "creating"])
def test_what_a_save_fails_with_is_raised_where_it_is_asked_for(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    def full(store: LocalStore, name: str) -> Any:
        raise StoreFull(f"can't write {name}")

    saver = Saver()
    monkeypatch.setattr(LocalStore, request_, full)
    saver.begin(run, to_payload({}), METADATA_FIELDS, "")
    for ask in (saver.wait, saver.check, lambda: saver.begin(run, to_payload({}), METADATA_FIELDS, "")):
        with pytest.raises(StoreFull):
            ask()

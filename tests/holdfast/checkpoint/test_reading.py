"""A checkpoint is hashed while it is read; errors are raised, and training goes first."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import checkpoint
from holdfast.checkpoint import differences, verifying
from holdfast.errors import CheckpointDamaged, StoreFull
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PARTS, STATE, save
from tests.support.waiting import WITHIN_S, await_equal


def test_a_failed_read_does_not_fill_the_buffer_afterwards(folder: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read uses the same memory."""
    commit, began, ended = commit_of(save(folder)), list[str](), list[str]()

    def fill(store: LocalStore, name: str, buffer: memoryview) -> Iterator[int]:
        if name.endswith(PARTS[0]):
            await_equal(lambda: bool(began), True)
            raise StoreFull("as it was told to")
        began.append(name)
        time.sleep(0.3)
        yield len(buffer)
        ended.append(name)

    monkeypatch.setattr(LocalStore, "fill", fill)
    with pytest.raises(StoreFull):
        checkpoint.read_payload(folder, commit)
    assert sorted(ended) == sorted(began)


def test_reading_does_not_wait_for_hashing(folder: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_of(checkpoint.save(folder, to_payload(STATE), METADATA_FIELDS, ""))
    fill, ended = LocalStore.fill, list[str]()

    def watched(store: LocalStore, name: str, buffer: memoryview) -> Iterator[int]:
        yield from fill(store, name, buffer)
        ended.append(name)

    class Late:
        def __init__(self) -> None:
            self._digest = hashlib.sha256()

        def update(self, data: memoryview) -> None:
            await_equal(lambda: ended, [f"{commit.path}/checkpoint.safetensors"])
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr(LocalStore, "fill", watched)
    monkeypatch.setattr(verifying, "hashlib", SimpleNamespace(sha256=Late))
    assert differences(to_payload(STATE), checkpoint.read_payload(folder, commit)) == []


def test_the_error_of_a_read_is_raised(folder: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if some of the part was already read and hashed."""
    commit = commit_of(save(folder))

    def fill(store: LocalStore, name: str, buffer: memoryview) -> Iterator[int]:
        yield len(buffer) // 2
        raise StoreFull("as it was told to")

    monkeypatch.setattr(LocalStore, "fill", fill)
    with pytest.raises(StoreFull):
        checkpoint.read_payload(folder, commit)


@pytest.mark.parametrize("verb", ["pieces", "fill"])
def test_a_file_that_is_deleted_after_its_size_was_read_is_missing(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    commit, read = commit_of(save(folder)), getattr(LocalStore, verb)

    def vanish(store: LocalStore, name: str, *arguments: Any) -> Iterator[Any]:
        store.delete(name)
        yield from read(store, name, *arguments)

    monkeypatch.setattr(LocalStore, verb, vanish)
    if verb == "pieces":
        assert {damage.found for damage in checkpoint.verify(folder, commit)} == {"missing"}
    else:
        with pytest.raises(CheckpointDamaged, match="is missing but was committed"):
            checkpoint.read_payload(folder, commit)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a thread has a priority of its own on Linux only")
def test_reading_back_has_a_low_priority_unless_it_is_urgent(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, hash_file = set[int](), checkpoint.hash_file

    def noting(*arguments: Any) -> Any:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return hash_file(*arguments)

    monkeypatch.setattr(verifying, "hash_file", noting)
    commit = commit_of(save(folder))
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert checkpoint.verify(folder, commit) == []
    assert seen == {usual}
    seen.clear()
    assert checkpoint.verify(folder, commit, is_urgent=False) == []
    assert seen == {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_stop_does_not_wait_for_running_reads(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch, is_urgent: bool
) -> None:
    reading = threading.Event()

    def hash_file(folder: LocalStore, path: str, name: str, watch: Any) -> Any:
        if name == PARTS[0]:
            raise KeyboardInterrupt
        assert reading.wait(WITHIN_S)

    commit = commit_of(save(folder))
    monkeypatch.setattr(verifying, "hash_file", hash_file)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.verify(folder, commit, is_urgent=is_urgent)
    reading.set()
    assert time.monotonic() - began < WITHIN_S

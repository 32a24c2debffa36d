"""A large state: several files, cut where its shapes say, and saved while training goes on."""

import contextlib
import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import checkpoint
from holdfast.checkpoint import (
    METADATA,
    Payload,
    Saved,
    Saver,
    Tensor,
    cut,
    deserialize,
    differences,
    in_memory,
    saving,
    serialize,
    verifying,
)
from holdfast.errors import CheckpointDamaged, StoreFull
from holdfast.memory import Buffers, Priority
from holdfast.memory.pinning import pinning
from holdfast.state import from_payload, tensors, to_payload
from holdfast.store import Writer
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of

PART_BYTES = 2**16
generator = torch.Generator().manual_seed(3)
STATE: dict[str, Any] = {
    "model": {
        "embedding": torch.arange(64_000.0).reshape(1000, 64),  # four parts
        "head": (torch.arange(64_000) % 256).to(torch.bfloat16).reshape(64, 1000),  # two
        "norm": torch.ones(64),
        "row": torch.arange(40_000.0).reshape(1, -1),  # one row is larger than a part
    },
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
    "rng": (torch.arange(5000) % 251).to(torch.uint8),
}
PARTS = [f"checkpoint-{number:05d}-of-00008.safetensors" for number in range(1, 9)]


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "run"))


def save(run: LocalStore, state: Any = STATE) -> Saved:
    return checkpoint.save(run, to_payload(state), METADATA_FIELDS, "", PART_BYTES)


def test_bytes_never_change(run: LocalStore) -> None:
    """Where a state is cut is part of the format: a changed hash means that other files have the same state."""
    saved = save(run)
    assert [part.name for part in saved.metadata.parts] == PARTS
    assert saved.metadata.checkpoint_sha256 == "ac03b2cf33f64cdd5b75581da28143cddaf656d4ec4dc2cffde0ffc135781293"


def test_the_content_id_is_that_of_the_listing(run: LocalStore) -> None:
    saved = save(run)
    listed, folder = "sha256sum checkpoint*.safetensors | sha256sum", run.root / saved.path
    printed = subprocess.run(["sh", "-c", listed], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == saved.metadata.checkpoint_sha256
    assert saved.metadata.checkpoint_size_bytes == sum(part.size_bytes for part in saved.metadata.parts)


def test_every_part_is_a_file_that_others_can_read(run: LocalStore) -> None:
    folder = run.root / save(run).path
    parts = [safetensors.torch.load_file(folder / name) for name in PARTS]
    rows: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            rows.setdefault(name, []).append(tensor)
    for name, tensor in STATE["model"].items():
        assert torch.equal(torch.cat(rows[f"model.{name}"]), tensor)
    held = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(held) == STATE["model"]["row"].nbytes
    assert sorted(held)[-2] <= PART_BYTES
    # What changes in every step is in the first part, with what is no tensor, and alone.
    assert parts[0].keys() == {"model.norm", "optimizer.state.0.step", "rng"}


def test_what_was_saved_is_read(run: LocalStore) -> None:
    saved = save(run)
    payload = to_payload(STATE)
    assert differences(payload, checkpoint.read_payload(run, commit_of(saved))) == []
    assert differences(payload, checkpoint.read_saved(run, saved)) == []
    changed = STATE | {"model": STATE["model"] | {"embedding": STATE["model"]["embedding"].clone()}}
    changed["model"]["embedding"][-1, -1] += 1
    assert differences(to_payload(changed), checkpoint.read_saved(run, saved)) == ["model.embedding"]
    assert checkpoint.verify(run, commit_of(saved)) == []


def test_a_read_that_fails_fills_nothing_afterwards(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is used again, for what is read instead."""
    commit, began, ended = commit_of(save(run)), list[str](), list[str]()

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
        checkpoint.read_payload(run, commit)
    assert sorted(ended) == sorted(began)


def test_what_is_read_does_not_wait_for_its_hash(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = commit_of(checkpoint.save(run, to_payload(STATE), METADATA_FIELDS, ""))
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
    assert differences(to_payload(STATE), checkpoint.read_payload(run, commit)) == []


def test_what_a_read_fails_with_is_raised(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some of it was read, and hashed, by then."""
    commit = commit_of(save(run))

    def fill(store: LocalStore, name: str, buffer: memoryview) -> Iterator[int]:
        yield len(buffer) // 2
        raise StoreFull("as it was told to")

    monkeypatch.setattr(LocalStore, "fill", fill)
    with pytest.raises(StoreFull):
        checkpoint.read_payload(run, commit)


@pytest.mark.parametrize("name", PARTS)
def test_damage_names_the_part(run: LocalStore, name: str) -> None:
    commit = commit_of(save(run))
    path = run.root / commit.path / name
    data = path.read_bytes()
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"0", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged) as caught:
            checkpoint.read_payload(run, commit)
        assert [file["name"] for file in caught.value.data["files"]] == [name]
        assert [damage.name for damage in checkpoint.verify(run, commit)] == [name]


def test_a_commit_that_does_not_name_all_parts_is_refused(run: LocalStore) -> None:
    commit = commit_of(save(run))
    for name in PARTS:
        files = [file for file in commit.files if file.name != name]
        with pytest.raises(CheckpointDamaged, match="names no checkpoint"):
            checkpoint.read_payload(run, commit.model_copy(update={"files": files}))


def test_remains_of_a_dead_attempt_are_used(run: LocalStore) -> None:
    first = save(run)
    for gone in (METADATA, PARTS[0], PARTS[4]):
        (run.root / first.path / gone).unlink()
    assert save(run).files[:8] == first.files[:8]
    assert run.list(first.path) == sorted(file.name for file in first.files)


def test_another_checkpoint_has_another_folder(run: LocalStore) -> None:
    first = save(run)
    for gone in PARTS[1:]:
        (run.root / first.path / gone).unlink()
    other = save(run, STATE | {"rng": torch.zeros(5000, dtype=torch.uint8)})
    assert other.path == "epoch-0001.2"
    assert checkpoint.verify(run, commit_of(other)) == []
    assert run.list(first.path)[0] == PARTS[0]
    assert not set(PARTS[1:]) & set(run.list(first.path))


def test_parts_that_were_cut_otherwise_stay_by_themselves(run: LocalStore) -> None:
    first = checkpoint.save(run, to_payload(STATE), METADATA_FIELDS, "", PART_BYTES // 2)
    for gone in (METADATA, first.files[0].name):
        (run.root / first.path / gone).unlink()
    other = save(run)
    assert other.path == "epoch-0001.2"
    assert [name for name in run.list(other.path) if name.startswith("checkpoint")] == PARTS


sizes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=9)


@given(sizes, st.integers(8, 300))
def test_what_is_cut_goes_together_again(shapes: list[tuple[int, int]], part_bytes: int) -> None:
    payload = to_payload([torch.rand(shape, generator=generator) for shape in shapes])
    parts = cut(payload, part_bytes)
    files = [bytearray(b"".join(map(in_memory, part.pieces))) for part in parts]
    assert [len(file) for file in files] == [part.size_bytes for part in parts]
    assert differences(deserialize(files), payload) == []
    others = to_payload([torch.rand(shape, generator=generator) for shape in shapes])
    assert [part.size_bytes for part in cut(others, part_bytes)] == [len(file) for file in files]


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), ()])
def test_rows_that_do_not_fit_together_are_refused(shape: tuple[int, ...]) -> None:
    whole = Payload({"a": Tensor("F32", (4, 4), (bytes(64),))}, None)
    size_bytes = 4 * torch.zeros(shape).numel()
    other = Payload({"a": Tensor("F32" if shape != (3, 4) else "I32", shape, (bytes(size_bytes),))}, None)
    files = [b"".join(map(in_memory, cut(payload)[0].pieces)) for payload in (whole, other)]
    with pytest.raises(CheckpointDamaged):
        deserialize([bytearray(file) for file in files])


# ---- beside the training


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    gate, creating = threading.Event(), LocalStore.creating

    @contextlib.contextmanager
    def waiting(store: LocalStore, name: str) -> Iterator[Writer]:
        assert gate.wait(90)
        with creating(store, name) as writer:
            yield writer

    monkeypatch.setattr(LocalStore, "creating", waiting)
    return gate


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


def await_equal(found: Callable[[], object], expected: object) -> None:
    deadline = time.monotonic() + 60  # a disk that others use may stand still for a while
    while found() != expected:
        assert time.monotonic() < deadline, found()
        time.sleep(0.01)


def may_raise_priority() -> bool:
    """Return whether a thread of this process may have its priority lowered and raised again."""
    found = []

    def lower_and_raise() -> None:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual)
            found.append(True)

    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.Thread(target=lower_and_raise)
        thread.start()
        thread.join()
    return bool(found)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a thread has a priority of its own on Linux only")
def test_a_save_gives_way_to_training_until_it_is_waited_for(run: LocalStore, gate: threading.Event) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)

    def found() -> set[int]:
        threads = [each for each in threading.enumerate() if each.name.startswith(("save_", "hash_", "write_"))]
        return {os.getpriority(os.PRIO_PROCESS, each.native_id or 0) for each in threads}

    for is_urgent in (False, True):
        gate.clear()
        saver = Saver(PART_BYTES)
        fields = METADATA_FIELDS | {"optimizer_steps_total": 20 if is_urgent else 10}
        saver.begin(run, to_payload(STATE), fields, "", is_urgent=is_urgent)
        await_equal(found, {usual} if is_urgent else {19})
        waiting = threading.Thread(target=saver.wait)
        waiting.start()
        if may_raise_priority():
            await_equal(found, {usual})
        gate.set()
        waiting.join()
        assert os.getpriority(os.PRIO_PROCESS, 0) == usual


@pytest.mark.skipif(
    not may_raise_priority(), reason="only root may raise a priority on Linux, and not in every container"
)
def test_a_thread_that_begins_while_others_are_restored_is_not_left_behind() -> None:
    usual, priority, found = os.getpriority(os.PRIO_PROCESS, 0), Priority(), list[int]()

    def begin_another() -> None:
        priority.lower()
        other = threading.Thread(target=end)
        other.start()  # as low as this one
        other.join()

    def end() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        priority.restore()
        priority.lower()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=begin_another)
    thread.start()
    thread.join()
    assert found == [19, usual]


def test_memory_is_taken_once(run: LocalStore) -> None:
    buffers = Buffers()
    first = buffers.take(0, 3 * 2**20)
    first[:4] = b"mark"
    assert bytes(buffers.take(0, 2**20)[:4]) == b"mark"
    assert bytes(buffers.take(1, 2**20)[:4]) == bytes(4)
    assert bytes(buffers.take(0, 4 * 2**20)[:4]) == bytes(4)  # there was too little of it


def test_memory_that_was_lent_is_not_taken_while_someone_has_it() -> None:
    buffers = Buffers()
    lent = buffers.lend(0, 2**20)
    lent[:4] = b"mark"
    part = torch.frombuffer(lent[:8], dtype=torch.uint8)[:4]
    del lent
    assert bytes(buffers.take(0, 2**20)[:4]) == bytes(4)
    assert bytes(part.tolist()) == b"mark"
    buffers.lend(0, 2**20)[:4] = b"next"
    assert bytes(buffers.take(0, 2**20)[:4]) == b"next"
    assert len(buffers.lend(1, 0)) == 0


# ---- what doesn't change


def save_with(saver: Saver, run: LocalStore, step: int, **changed: torch.Tensor) -> Saved:
    state = STATE | {"model": STATE["model"] | changed, "progress": step}
    saver.begin(run, to_payload(state), METADATA_FIELDS | {"optimizer_steps_total": step}, "")
    saved = saver.wait()
    assert saved is not None
    return saved


def files_of(run: LocalStore, saved: Saved) -> list[int]:
    """What names each part's file on the disk."""
    return [(run.root / saved.path / name).stat().st_ino for name in PARTS]


def count_shared(run: LocalStore, *checkpoints: Saved) -> list[int]:
    """How many parts each checkpoint shares with the one before."""
    files = [files_of(run, saved) for saved in checkpoints]
    return [
        sum(one == other for one, other in zip(before, after, strict=True))
        for before, after in itertools.pairwise(files)
    ]


@pytest.mark.parametrize(
    ("shared_by", "expected"), [(1, [0] * 7), (2, [0, 7] * 3 + [0]), (3, [0, 7, 7, 0, 7, 7, 0]), (99, [0] + [7] * 6)]
)
def test_what_does_not_change_is_one_file_of_so_many_checkpoints(
    run: LocalStore, shared_by: int, expected: list[int]
) -> None:
    saver = Saver(PART_BYTES, shared_by)
    checkpoints = [save_with(saver, run, step) for step in range(10, 90, 10)]
    assert count_shared(run, *checkpoints) == expected
    for saved in checkpoints[:-1]:
        run.delete_folder(saved.path)
    assert checkpoint.verify(run, commit_of(checkpoints[-1])) == []


def test_what_changes_is_written(run: LocalStore) -> None:
    saver = Saver(PART_BYTES, 99)
    checkpoints = [save_with(saver, run, step) for step in (10, 20, 30)]
    for step in (40, 50, 60, 70):
        changed = STATE["model"]["embedding"].clone()
        changed[999] += step // 20  # the last part of four, in steps 40 and 60
        checkpoints.append(save_with(saver, run, step, embedding=changed))
        expected = to_payload(STATE | {"model": STATE["model"] | {"embedding": changed}, "progress": step})
        assert differences(expected, checkpoint.read_payload(run, commit_of(checkpoints[-1]))) == []
    assert count_shared(run, *checkpoints) == [0, 7, 6, 6, 6, 6]


def test_what_changes_does_not_wait_for_its_hash(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing, hash_part = threading.Event(), saving.hash_bytes

    def late(*arguments: Any) -> Any:
        assert hashing.wait(90)
        return hash_part(*arguments)

    monkeypatch.setattr(saving, "hash_bytes", late)
    saver = Saver(PART_BYTES, 99)
    for step in (10, 20, 30):
        state = {"model": {name: tensor + step for name, tensor in STATE["model"].items()}, "rng": STATE["rng"]}
        hashing.clear()
        saver.begin(run, to_payload(state), METADATA_FIELDS | {"optimizer_steps_total": step}, "")
        await_equal(lambda: [name in run.list(f"epoch-{step // 10:04d}") for name in PARTS], [True] * len(PARTS))  # noqa: B023
        hashing.set()
        saver.wait()  # the hashes that begin only now, too


@pytest.mark.parametrize("trouble", ["no links", "the last is gone", "another run"])
def test_what_cannot_be_copied_is_written(run: LocalStore, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    saver = Saver(PART_BYTES, 99)
    before = [save_with(saver, run, step) for step in (10, 20)]
    if trouble == "no links":
        monkeypatch.setattr(LocalStore, "copy", lambda store, source, name: False)
    elif trouble == "the last is gone":
        run.delete_folder(before[-1].path)
    else:
        run = LocalStore(str(run.root.parent / "other"))
    saved = save_with(saver, run, 30)
    assert {(run.root / saved.path / name).stat().st_nlink for name in PARTS} == {1}
    assert checkpoint.verify(run, commit_of(saved)) == []


def test_a_copy_that_a_dead_attempt_has_left_is_used(run: LocalStore) -> None:
    first, second = (save_with(Saver(PART_BYTES), run, step) for step in (10, 20))
    for name in PARTS[1:]:
        run.copy(f"{second.path}/{name}", f"epoch-0003/{name}")
    saver = Saver(PART_BYTES, 99)
    run.delete_folder(first.path)
    run.delete_folder(second.path)
    checkpoints = [save_with(saver, run, step) for step in (10, 20, 30)]
    assert checkpoints[-1].path == "epoch-0003"
    assert count_shared(run, *checkpoints) == [0, 0]
    assert checkpoint.verify(run, commit_of(checkpoints[-1])) == []


# ---- tensors on a device


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are taken for a GPU's: torch copies from both alike."""

    monkeypatch.setattr(tensors, "_address_of", lambda tensor: 0)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("part_bytes", [PART_BYTES, 2**28], ids=["parts", "one"])
def test_a_device_is_copied_from_when_a_save_begins(run: LocalStore, part_bytes: int) -> None:
    state = STATE | {"model": {name: tensor.clone() for name, tensor in STATE["model"].items()}, "empty": torch.ones(0)}
    saver = Saver(part_bytes)
    payload = to_payload(state)
    pieces: Any = [tensor.pieces[0] for name, tensor in payload.tensors.items() if name != "empty"]
    assert {piece.address for piece in pieces} == {0}
    saver.begin(run, payload, METADATA_FIELDS, "")
    for tensor in state["model"].values():
        tensor.zero_()
    saved = saver.wait()
    assert saved is not None
    read = checkpoint.read_payload(run, commit_of(saved))
    assert differences(to_payload(STATE | {"empty": torch.ones(0)}), read) == []
    assert "model.norm" in differences(to_payload(state), read)
    assert torch.equal(from_payload(to_payload(STATE))["model"]["embedding"], STATE["model"]["embedding"])


def test_what_lies_in_memory_otherwise_is_saved_in_order(run: LocalStore) -> None:
    numbers = torch.complex(torch.rand(9), torch.rand(9))
    state = {
        "transposed": torch.arange(64_000.0).reshape(64, 1000).T,  # of several parts
        "column": torch.arange(6.0).reshape(3, 2)[:, 1],
        "conjugate": numbers.conj(),
        "negative": numbers[:1].conj().imag,  # of one number, so that it is in one piece
        "trained": torch.ones(3, requires_grad=True),
        "image": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    saver = Saver(PART_BYTES)
    saver.begin(run, to_payload(state), METADATA_FIELDS, "")
    saved = saver.wait()
    assert saved is not None
    found = from_payload(checkpoint.read_payload(run, commit_of(saved)))
    assert all(torch.equal(found[name], tensor.detach()) for name, tensor in state.items())


@pytest.mark.usefixtures("on_device")
def test_bytes_of_a_device_are_the_same_bytes(run: LocalStore) -> None:
    saved = save(run)
    assert saved.metadata.checkpoint_sha256 == "ac03b2cf33f64cdd5b75581da28143cddaf656d4ec4dc2cffde0ffc135781293"
    assert b"".join(serialize(to_payload(STATE))) == b"".join(serialize(checkpoint.read_payload(run, commit_of(saved))))


def test_memory_is_pinned_once_and_stays(run: LocalStore) -> None:
    pinned = list[int]()
    buffers = Buffers()
    buffers.take(0, 2**20)
    for size_bytes in (2**20, 2**19, 2**20, 2**21, 2**21):
        buffers.take(0, size_bytes, lambda memory: pinned.append(len(memory)))
    assert pinned == [2**20, 2**21]
    Saver(PART_BYTES, pin=lambda memory: pinned.append(len(memory))).begin(run, to_payload(STATE), METADATA_FIELDS, "")
    assert len(pinned) == 2 + len(PARTS)


def test_memory_that_cannot_be_pinned_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    assert pinning(torch.device("cpu")) is None
    pin = pinning(torch.device("cuda", 9))  # there is none, here or anywhere
    memory = Buffers().take(0, 2**20, pin)
    memory[:4] = b"mark"
    assert "1,048,576 bytes for checkpoints can't be pinned" in caplog.text


# ---- verified beside training


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="a thread has a priority of its own on Linux only")
def test_what_is_read_back_gives_way_to_training(run: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, hash_file = set[int](), checkpoint.hash_file

    def noting(*arguments: Any) -> Any:
        seen.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return hash_file(*arguments)

    monkeypatch.setattr(verifying, "hash_file", noting)
    commit = commit_of(save(run))
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert checkpoint.verify(run, commit) == []
    assert seen == {usual}
    seen.clear()
    assert checkpoint.verify(run, commit, is_urgent=False) == []
    assert seen == {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


@pytest.mark.parametrize("is_urgent", [True, False])
def test_who_is_told_to_stop_does_not_wait_for_what_is_read(
    run: LocalStore, monkeypatch: pytest.MonkeyPatch, is_urgent: bool
) -> None:
    reading = threading.Event()

    def hash_file(run: LocalStore, path: str, name: str, watch: Any) -> Any:
        if name == PARTS[0]:
            raise KeyboardInterrupt
        assert reading.wait(90)

    commit = commit_of(save(run))
    monkeypatch.setattr(verifying, "hash_file", hash_file)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.verify(run, commit, is_urgent=is_urgent)
    reading.set()
    assert time.monotonic() - began < 90

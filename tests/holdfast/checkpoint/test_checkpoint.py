"""A checkpoint's bytes are equal for equal states, readable by safetensors, and verified when they are read."""

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import checkpoint
from holdfast.checkpoint import METADATA, METRICS, PAYLOAD, Saved
from holdfast.errors import CheckpointDamaged, NameTaken
from holdfast.journal import Commit
from holdfast.state import from_payload, to_payload
from holdfast.store import Writer
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of, make_commit

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "mask": torch.tensor([True, False])},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


def save(folder: LocalStore, state: Any = STATE, **fields: Any) -> Saved:
    known = METADATA_FIELDS | fields
    trail = "".join(f'{{"step": {step}}}\n' for step in range(1, known["optimizer_steps_total"] + 1))
    return checkpoint.save(folder, to_payload(state), known, trail)


def test_bytes_never_change() -> None:
    """These bytes are the format: a changed hash means that existing runs lose their content ids."""
    data = b"".join(bytes(piece) for piece in checkpoint.serialize(to_payload(STATE)))
    assert hashlib.sha256(data).hexdigest() == "e554f81a21f6d3181dd47674494f19b9ac0eca04dbec069240f69f81f1c97551"


def test_equal_states_have_equal_bytes(folder: LocalStore, tmp_path: Path) -> None:
    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: shuffled(value[key]) for key in sorted(value, key=str, reverse=True)}

    other = LocalStore(str(tmp_path / "other"))
    tied = torch.ones(3)
    first = save(folder, STATE | {"tied": {"head": tied, "embed": tied}})
    second = save(other, shuffled(STATE | {"tied": {"embed": tied, "head": tied}}), created_at="2027-01-01")
    assert first.metadata.checkpoint_sha256 == second.metadata.checkpoint_sha256


def test_the_content_id_is_the_sha256_of_a_file_that_safetensors_reads(folder: LocalStore) -> None:
    saved = save(folder)
    data = folder.read(f"{saved.path}/{PAYLOAD}")
    assert saved.metadata.checkpoint_sha256 == hashlib.sha256(data).hexdigest()
    assert saved.metadata.checkpoint_size_bytes == len(data)
    tensors = safetensors.torch.load(data)
    assert torch.equal(tensors["model.weight"], STATE["model"]["weight"])
    assert torch.equal(tensors["model.mask"], STATE["model"]["mask"])
    assert torch.equal(tensors["half"], STATE["half"])
    for file in saved.files:
        assert file.sha256 == hashlib.sha256(folder.read(f"{saved.path}/{file.name}")).hexdigest()


def test_a_saved_state_is_read_back_unchanged(folder: LocalStore) -> None:
    state = from_payload(checkpoint.read_payload(folder, commit_of(save(folder))))
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert state["half"].dtype == torch.bfloat16
    assert state["optimizer"]["state"][0]["step"].item() == 3.0
    assert checkpoint.verify(folder, commit_of(save(folder, {"other": 1}))) == []


@pytest.mark.parametrize("name", [PAYLOAD, METADATA, METRICS])
def test_every_flipped_bit_is_found(folder: LocalStore, name: str) -> None:
    saved = save(folder)
    commit = commit_of(saved)
    path = folder.root / saved.path / name
    good = path.read_bytes()
    positions = random.Random(0).sample(range(len(good)), k=min(60, len(good)))
    for position in [0, 8, len(good) - 1, *positions]:
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointDamaged, match=name):
            checkpoint.read_payload(folder, commit)
        (damage,) = checkpoint.verify(folder, commit)
        assert damage.expected == hashlib.sha256(good).hexdigest()
        assert damage.found == hashlib.sha256(bad).hexdigest()
    path.write_bytes(good)
    checkpoint.read_payload(folder, commit)


@pytest.mark.parametrize("change", ["longer", "shorter", "gone"])
@pytest.mark.parametrize("name", [PAYLOAD, METADATA, METRICS])
def test_missing_files_and_wrong_sizes_are_found(folder: LocalStore, name: str, change: str) -> None:
    saved = save(folder)
    path = folder.root / saved.path / name
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" " if change == "longer" else path.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match="missing" if change == "gone" else "bytes but was committed as"):
        checkpoint.read_payload(folder, commit_of(saved))


def test_a_save_overwrites_no_other_checkpoint(folder: LocalStore) -> None:
    first = save(folder)
    assert first.path == "epoch-0001"
    again = save(folder, {"other": 1})
    assert again.path == "epoch-0001.2"
    assert checkpoint.verify(folder, commit_of(first)) == []
    assert checkpoint.verify(folder, commit_of(again)) == []


def test_files_of_a_dead_attempt_are_used_if_they_are_equal(folder: LocalStore) -> None:
    first = save(folder)
    (folder.root / first.path / METADATA).unlink()
    assert save(folder).path == first.path
    (folder.root / first.path / METADATA).unlink()
    assert save(folder, {"other": 1}).path == "epoch-0001.2"


def test_a_name_that_is_taken_but_not_readable_is_skipped(folder: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure shows an upload in this way if its writer died before finishing it."""
    creating = LocalStore.creating

    @contextlib.contextmanager
    def taken(store: LocalStore, name: str) -> Iterator[Writer]:
        with creating(store, name) as writer:
            yield writer
            if name == f"epoch-0001/{PAYLOAD}":
                raise NameTaken(name)

    monkeypatch.setattr(LocalStore, "creating", taken)
    assert save(folder).path == "epoch-0001.2"


def test_folders_are_named_by_epoch_and_step() -> None:
    assert [checkpoint.folder_name(step, 10) for step in (3, 10, 13)] == [
        "epoch-0001-step-00000003", "epoch-0001", "epoch-0002-step-00000013",
    ]  # fmt: skip


def test_orphans_are_complete_verified_and_trained_from_the_head(folder: LocalStore) -> None:
    saved = save(folder)

    def found(head: Commit | None = None, fingerprint: str = "0" * 64, given_up: Sequence[str] = ()) -> list[str]:
        orphans = checkpoint.find_orphans(folder, head, fingerprint.__eq__, 10, lambda: set(given_up))
        return [orphan.path for orphan in orphans]

    assert found() == [saved.path]
    assert found(head=make_commit(1, step=5)) == found(fingerprint="1" * 64) == found(given_up=[saved.path]) == []
    further = save(folder, {"other": 1}, optimizer_steps_total=13, optimizer_steps_epoch=3)
    assert found() == [further.path, saved.path]
    (folder.root / further.path / PAYLOAD).write_bytes(b"damaged")
    (folder.root / saved.path / METADATA).unlink()
    assert found() == []


def test_a_store_may_refuse_a_taken_name_before_the_first_byte(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores check a name before they upload."""
    saved = save(folder)
    (folder.root / saved.path / METADATA).unlink()  # killed between payload and metadata

    @contextlib.contextmanager
    def taken(store: LocalStore, name: str) -> Iterator[Writer]:
        raise NameTaken(f"can't write {name}: it exists")
        yield

    monkeypatch.setattr(LocalStore, "creating", taken)
    monkeypatch.setattr(LocalStore, "create", LocalStore.replace)
    again = save(folder)
    assert (again.path, again.files[:-1]) == (saved.path, saved.files[:-1])  # metadata.json has the token of its save


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        (2**60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"\x80\x04N.",
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match="not a safetensors file"):
        checkpoint.deserialize([bytearray(data)])


@pytest.mark.parametrize("entry", [{"data_offsets": [0, 2**40]}, {"shape": [2**62]}, {"dtype": "F99"}, {"shape": [-1]}])
def test_tensors_outside_the_file_are_refused(entry: dict[str, Any]) -> None:
    header = {"__metadata__": {"holdfast": "{}"}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | entry}
    text = json.dumps(header).encode()
    with pytest.raises(CheckpointDamaged, match="not a safetensors file"):
        checkpoint.deserialize([bytearray(len(text).to_bytes(8, "little") + text + b"1234")])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_do_not_crash_the_reader(data: bytes) -> None:
    with contextlib.suppress(CheckpointDamaged):
        checkpoint.deserialize([bytearray(data)])

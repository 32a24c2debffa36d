"""A large state is cut into several files by its shapes alone, and damage to any of them is found."""

import subprocess

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import checkpoint
from holdfast.checkpoint import METADATA, Payload, Tensor, cut, deserialize, differences, in_memory
from holdfast.errors import CheckpointDamaged
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PART_BYTES, PARTS, STATE, save

generator = torch.Generator().manual_seed(3)


def test_bytes_never_change(folder: LocalStore) -> None:
    """The cut is part of the format: a changed hash means that equal states get other files."""
    saved = save(folder)
    assert [part.name for part in saved.metadata.parts] == PARTS
    assert saved.metadata.checkpoint_sha256 == "ac03b2cf33f64cdd5b75581da28143cddaf656d4ec4dc2cffde0ffc135781293"


def test_the_content_id_of_several_parts_is_the_hash_of_their_sha256sum_listing(folder: LocalStore) -> None:
    saved = save(folder)
    listed, path = "sha256sum checkpoint*.safetensors | sha256sum", folder.root / saved.path
    printed = subprocess.run(["sh", "-c", listed], cwd=path, capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == saved.metadata.checkpoint_sha256
    assert saved.metadata.checkpoint_size_bytes == sum(part.size_bytes for part in saved.metadata.parts)


def test_every_part_is_readable_by_safetensors(folder: LocalStore) -> None:
    path = folder.root / save(folder).path
    parts = [safetensors.torch.load_file(path / name) for name in PARTS]
    rows: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            rows.setdefault(name, []).append(tensor)
    for name, tensor in STATE["model"].items():
        assert torch.equal(torch.cat(rows[f"model.{name}"]), tensor)
    held = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    assert max(held) == STATE["model"]["row"].nbytes
    assert sorted(held)[-2] <= PART_BYTES
    # The first part holds only the small tensors, which change at every step, and the values that are not tensors.
    assert parts[0].keys() == {"model.norm", "optimizer.state.0.step", "rng"}


def test_a_state_in_parts_is_read_as_it_was_saved(folder: LocalStore) -> None:
    saved = save(folder)
    payload = to_payload(STATE)
    assert differences(payload, checkpoint.read_payload(folder, commit_of(saved))) == []
    assert differences(payload, checkpoint.read_saved(folder, saved)) == []
    changed = STATE | {"model": STATE["model"] | {"embedding": STATE["model"]["embedding"].clone()}}
    changed["model"]["embedding"][-1, -1] += 1
    assert differences(to_payload(changed), checkpoint.read_saved(folder, saved)) == ["model.embedding"]
    assert checkpoint.verify(folder, commit_of(saved)) == []


@pytest.mark.parametrize("name", PARTS)
def test_damage_names_the_part(folder: LocalStore, name: str) -> None:
    commit = commit_of(save(folder))
    path = folder.root / commit.path / name
    data = path.read_bytes()
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"0", None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged) as caught:
            checkpoint.read_payload(folder, commit)
        assert [file["name"] for file in caught.value.data["files"]] == [name]
        assert [damage.name for damage in checkpoint.verify(folder, commit)] == [name]


def test_a_commit_that_lacks_a_part_is_refused(folder: LocalStore) -> None:
    commit = commit_of(save(folder))
    for name in PARTS:
        files = [file for file in commit.files if file.name != name]
        with pytest.raises(CheckpointDamaged, match="lists no file checkpoint"):
            checkpoint.read_payload(folder, commit.model_copy(update={"files": files}))


def test_equal_files_of_a_dead_attempt_are_used(folder: LocalStore) -> None:
    first = save(folder)
    for gone in (METADATA, PARTS[0], PARTS[4]):
        (folder.root / first.path / gone).unlink()
    assert save(folder).files[:8] == first.files[:8]
    assert folder.list(first.path) == sorted(file.name for file in first.files)


def test_a_checkpoint_with_other_bytes_gets_another_folder(folder: LocalStore) -> None:
    first = save(folder)
    for gone in PARTS[1:]:
        (folder.root / first.path / gone).unlink()
    other = save(folder, STATE | {"rng": torch.zeros(5000, dtype=torch.uint8)})
    assert other.path == "epoch-0001.2"
    assert checkpoint.verify(folder, commit_of(other)) == []
    assert folder.list(first.path)[0] == PARTS[0]
    assert not set(PARTS[1:]) & set(folder.list(first.path))


def test_parts_of_another_cut_are_not_mixed_in(folder: LocalStore) -> None:
    first = checkpoint.save(folder, to_payload(STATE), METADATA_FIELDS, "", PART_BYTES // 2)
    for gone in (METADATA, first.files[0].name):
        (folder.root / first.path / gone).unlink()
    other = save(folder)
    assert other.path == "epoch-0001.2"
    assert [name for name in folder.list(other.path) if name.startswith("checkpoint")] == PARTS


sizes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=9)


@given(sizes, st.integers(8, 300))
def test_deserialize_joins_the_parts_of_any_cut(shapes: list[tuple[int, int]], part_bytes: int) -> None:
    payload = to_payload([torch.rand(shape, generator=generator) for shape in shapes])
    parts = cut(payload, part_bytes)
    files = [bytearray(b"".join(map(in_memory, part.pieces))) for part in parts]
    assert [len(file) for file in files] == [part.size_bytes for part in parts]
    assert differences(deserialize(files), payload) == []
    others = to_payload([torch.rand(shape, generator=generator) for shape in shapes])
    assert [part.size_bytes for part in cut(others, part_bytes)] == [len(file) for file in files]


@pytest.mark.parametrize("shape", [(3, 4), (2, 5), ()])
def test_rows_of_different_dtypes_or_shapes_are_refused(shape: tuple[int, ...]) -> None:
    whole = Payload({"a": Tensor("F32", (4, 4), (bytes(64),))}, None)
    size_bytes = 4 * torch.zeros(shape).numel()
    other = Payload({"a": Tensor("F32" if shape != (3, 4) else "I32", shape, (bytes(size_bytes),))}, None)
    files = [b"".join(map(in_memory, cut(payload)[0].pieces)) for payload in (whole, other)]
    with pytest.raises(CheckpointDamaged):
        deserialize([bytearray(file) for file in files])

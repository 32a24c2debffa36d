"""A large state lies in several files, cut where its shapes say, and any damage to one of them is found."""

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

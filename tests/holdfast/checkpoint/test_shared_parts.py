"""A part that does not change is written once and linked into the next checkpoints."""

import itertools
import threading
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint import CheckpointSave, Saved, Saver, checkpoint_save, differences
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PART_BYTES, PARTS, STATE
from tests.support.waiting import WITHIN_S, await_equal


def save_with(saver: Saver, folder: LocalStore, step: int, **changed: torch.Tensor) -> Saved:
    state = STATE | {"model": STATE["model"] | changed, "progress": step}
    saver.begin(CheckpointSave(folder, to_payload(state), METADATA_FIELDS | {"optimizer_steps_total": step}, ""))
    saved = saver.wait()
    assert saved is not None
    return saved


def files_of(folder: LocalStore, saved: Saved) -> list[int]:
    """Return the inode of each part's file."""
    return [(folder.root / saved.path / name).stat().st_ino for name in PARTS]


def count_shared(folder: LocalStore, *checkpoints: Saved) -> list[int]:
    """Return, for each checkpoint but the first, how many parts it shares with the checkpoint before."""
    files = [files_of(folder, saved) for saved in checkpoints]
    return [
        sum(one == other for one, other in zip(before, after, strict=True))
        for before, after in itertools.pairwise(files)
    ]


@pytest.mark.parametrize(
    ("shared_by", "expected"), [(1, [0] * 7), (2, [0, 7] * 3 + [0]), (3, [0, 7, 7, 0, 7, 7, 0]), (99, [0] + [7] * 6)]
)
def test_an_unchanged_part_is_shared_by_at_most_the_given_number_of_checkpoints(
    folder: LocalStore, shared_by: int, expected: list[int]
) -> None:
    saver = Saver(PART_BYTES, shared_by)
    checkpoints = [save_with(saver, folder, step) for step in range(10, 90, 10)]
    assert count_shared(folder, *checkpoints) == expected
    for saved in checkpoints[:-1]:
        folder.delete_folder(saved.path)
    assert checkpoint.verify(folder, commit_of(checkpoints[-1])) == []


def test_a_changed_part_is_written(folder: LocalStore) -> None:
    saver = Saver(PART_BYTES, 99)
    checkpoints = [save_with(saver, folder, step) for step in (10, 20, 30)]
    for step in (40, 50, 60, 70):
        changed = STATE["model"]["embedding"].clone()
        changed[999] += step // 20  # the last part of four, in steps 40 and 60
        checkpoints.append(save_with(saver, folder, step, embedding=changed))
        expected = to_payload(STATE | {"model": STATE["model"] | {"embedding": changed}, "progress": step})
        assert differences(expected, checkpoint.read_payload(folder, commit_of(checkpoints[-1]))) == []
    assert count_shared(folder, *checkpoints) == [0, 7, 6, 6, 6, 6]


def test_a_changing_part_is_written_without_waiting_for_its_hash(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing, hash_part = threading.Event(), checkpoint_save.hash_bytes

    def late(*arguments: Any) -> Any:
        assert hashing.wait(WITHIN_S)
        return hash_part(*arguments)

    monkeypatch.setattr(checkpoint_save, "hash_bytes", late)
    saver = Saver(PART_BYTES, 99)
    for step in (10, 20, 30):
        state = {"model": {name: tensor + step for name, tensor in STATE["model"].items()}, "rng": STATE["rng"]}
        hashing.clear()
        saver.begin(CheckpointSave(folder, to_payload(state), METADATA_FIELDS | {"optimizer_steps_total": step}, ""))
        await_equal(lambda: [name in folder.list(f"epoch-{step // 10:04d}") for name in PARTS], [True] * len(PARTS))  # noqa: B023
        hashing.set()
        saver.wait()  # the hashes that begin only now, too


@pytest.mark.parametrize("trouble", ["no links", "the last is gone", "another run"])
def test_a_part_that_cannot_be_copied_is_written(
    folder: LocalStore, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    saver = Saver(PART_BYTES, 99)
    before = [save_with(saver, folder, step) for step in (10, 20)]
    if trouble == "no links":
        monkeypatch.setattr(LocalStore, "copy", lambda store, source, name: False)
    elif trouble == "the last is gone":
        folder.delete_folder(before[-1].path)
    else:
        folder = LocalStore(str(folder.root.parent / "other"))
    saved = save_with(saver, folder, 30)
    assert {(folder.root / saved.path / name).stat().st_nlink for name in PARTS} == {1}
    assert checkpoint.verify(folder, commit_of(saved)) == []


def test_a_copy_from_a_dead_attempt_is_used(folder: LocalStore) -> None:
    first, second = (save_with(Saver(PART_BYTES), folder, step) for step in (10, 20))
    for name in PARTS[1:]:
        folder.copy(f"{second.path}/{name}", f"epoch-0003/{name}")
    saver = Saver(PART_BYTES, 99)
    folder.delete_folder(first.path)
    folder.delete_folder(second.path)
    checkpoints = [save_with(saver, folder, step) for step in (10, 20, 30)]
    assert checkpoints[-1].path == "epoch-0003"
    assert count_shared(folder, *checkpoints) == [0, 0]
    assert checkpoint.verify(folder, commit_of(checkpoints[-1])) == []

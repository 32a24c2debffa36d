"""Near copies: each is used only with the right bytes, the folder stays bounded, and its faults cost a warning."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import (
    CheckpointSave,
    Saved,
    Saver,
    find_orphans,
    read_payload,
)
from holdfast.checkpoint.copying import copy_checkpoint
from holdfast.checkpoint.near import Near, NearReader
from holdfast.checkpoint.partial import PartsReader
from holdfast.config import NearTier
from holdfast.errors import CheckpointDamaged
from holdfast.journal import Commit
from holdfast.state import to_payload
from holdfast.store import Store
from holdfast.store.local import LocalStore
from tests.support.disks import make_read_only, small_disk
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PART_BYTES, PARTS, STATE

STATE_BYTES = 560_000  # of all parts together, about


@pytest.fixture
def run(folder: LocalStore) -> LocalStore:
    folder.create("run.json", b"a run")
    return folder


def make(run: Store, root: Path, most_bytes: int = 10 * STATE_BYTES) -> Near:
    return Near(NearTier(folder=str(root), most_bytes=most_bytes), run, "run")


def save(run: Store, near: Near | None, state: Any = STATE, **fields: Any) -> Saved:
    saver = Saver(PART_BYTES, near=near)
    saver.begin(CheckpointSave(run, to_payload(state), METADATA_FIELDS | fields, '{"step": 10, "loss": 1.0}\n'))
    saved = saver.wait()
    assert saved is not None
    return saved


def list_files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def hide(run: LocalStore, saved: Saved) -> None:
    """Change the bytes of all parts on the store, but not their sizes: who reads one notices."""
    for name in PARTS:
        flip(run.root / saved.path / name)


def read_in_windows(run: Store, commit: Commit, near: NearReader) -> None:
    """Read all parts as a rank does that holds a shard."""
    parts = [file for file in commit.files if file.name in PARTS]
    reader = PartsReader(run, commit, parts, memoryview(bytearray(4 * 4096)), 4096, near)
    try:
        for part in parts:
            taken = 0
            while taken < part.size_bytes:
                taken += len(reader.take())
                reader.give_back()
            reader.check()
    finally:
        reader.close()


def read_at_once(run: Store, commit: Commit, near: NearReader) -> None:
    read_payload(run, commit, near=near)


READS = pytest.mark.parametrize("read", [read_at_once, read_in_windows])


def test_a_copy_changes_nothing_of_a_save(run: LocalStore, tmp_path: Path) -> None:
    near = make(run, tmp_path / "near")
    saved = save(run, near)
    assert saved.near_problem == ""
    alone = save(LocalStore(str(tmp_path / "other")), None)
    assert saved.metadata.parts == alone.metadata.parts
    assert list_files(near.place) == list_files(run.root / saved.path)


@READS
def test_a_restore_reads_the_copy(run: LocalStore, tmp_path: Path, read: Any) -> None:
    near = make(run, tmp_path / "near")
    saved = save(run, near)
    hide(run, saved)
    with pytest.raises(CheckpointDamaged):
        read_payload(run, commit_of(saved))
    reader = NearReader(near, commit_of(saved))
    read(run, commit_of(saved), reader)
    assert sorted(reader.taken) == PARTS


@READS
def test_a_flipped_bit_in_a_copy_is_found_and_the_stores_part_is_read(
    run: LocalStore, tmp_path: Path, read: Any
) -> None:
    near = make(run, tmp_path / "near")
    saved = save(run, near)
    damaged = near.place / saved.path / PARTS[2]
    flip(damaged)
    reader = NearReader(near, commit_of(saved))
    read(run, commit_of(saved), reader)
    assert sorted(reader.taken) == PARTS[:2] + PARTS[3:]
    assert PARTS[2] in reader.problem
    assert not damaged.exists()


def test_damaged_metadata_of_a_copy_is_told(run: LocalStore, tmp_path: Path) -> None:
    near = make(run, tmp_path / "near")
    saved = save(run, near)
    (near.place / saved.path / "metadata.json").write_text("{")
    reader = NearReader(near, commit_of(saved))
    assert reader.store is None
    assert "metadata.json" in reader.problem


@READS
def test_a_copy_that_lacks_a_part_is_used_for_the_others(run: LocalStore, tmp_path: Path, read: Any) -> None:
    near = make(run, tmp_path / "near")
    saved = save(run, near)
    (near.place / saved.path / PARTS[2]).unlink()
    (near.place / saved.path / "metadata.json").unlink()  # as on a node whose ranks wrote only some parts
    reader = NearReader(near, commit_of(saved))
    read(run, commit_of(saved), reader)
    assert (sorted(reader.taken), reader.problem) == (PARTS[:2] + PARTS[3:], "")


@READS
def test_a_copy_does_not_hide_that_the_store_lost_a_file(run: LocalStore, tmp_path: Path, read: Any) -> None:
    near = make(run, tmp_path / "near")
    saved = save(run, near)
    (run.root / saved.path / "metadata.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"metadata\.json"):
        read_payload(run, commit_of(saved), near=NearReader(near, commit_of(saved)))


def test_another_state_of_the_same_step_is_not_read(run: LocalStore, tmp_path: Path) -> None:
    near = make(run, tmp_path / "near")
    save(run, near, {**STATE, "rng": torch.zeros(5000, dtype=torch.uint8)})
    saved = save(run, near)
    assert saved.path == "epoch-0001.2"
    reader = NearReader(near, commit_of(saved))
    read_at_once(run, commit_of(saved), reader)
    assert (sorted(reader.taken), reader.problem) == (PARTS, "")


def test_a_run_that_was_begun_again_has_no_copy(run: LocalStore, tmp_path: Path) -> None:
    saved = save(run, make(run, tmp_path / "near"))
    run.replace("run.json", b"another run")
    reader = NearReader(make(run, tmp_path / "near"), commit_of(saved))
    read_at_once(run, commit_of(saved), reader)
    assert reader.taken == []


def test_ranks_make_the_folder_at_the_same_moment(
    run: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def late(path: Path, *arguments: Any, **options: Any) -> None:
        if not path.exists():
            mkdir(path)  # by another rank
        mkdir(path, *arguments, **options)

    near = make(run, tmp_path / "near")
    monkeypatch.setattr(Path, "mkdir", late)
    assert save(run, near).near_problem == ""


# ---- bounds


def step(number: int) -> dict[str, Any]:
    return {"optimizer_steps_total": number, "epoch": number // 10, "optimizer_steps_epoch": number % 10}


def test_the_oldest_copies_of_all_runs_make_room_and_other_files_stay(run: LocalStore, tmp_path: Path) -> None:
    root = tmp_path / "near"
    other = LocalStore(str(tmp_path / "other"))
    other.create("run.json", b"another run")
    nears = {each.url: make(each, root, 3 * STATE_BYTES) for each in (run, other)}
    places = [nears[run.url].place, nears[other.url].place]
    root.mkdir()
    (root / "mine").write_text("somebody's own file")
    others = [root / "data-0123456789abcdef" / "kept" / "file", root / "runs" / "epoch-0001" / "file"]
    for path in others:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"0" * STATE_BYTES)
        os.utime(path, (0, 0))
    for number, store in enumerate((other, run, run, run, run), 1):
        saved = save(store, nears[store.url], **step(number))
        assert saved.near_problem == ""
        for path in (nears[store.url].place / saved.path).iterdir():
            os.utime(path, (number, number))
        assert sum(path.stat().st_size for place in places for path in place.rglob("*.*")) < 3 * STATE_BYTES
    kept = [f"epoch-0001-step-0000000{number}" for number in (3, 4, 5)]
    assert (list_names(places[0]), list_names(places[1])) == (kept, [])
    assert all(path.exists() for path in (root / "mine", *others))


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_folder_without_room_for_one_checkpoint_keeps_what_it_has(run: LocalStore, tmp_path: Path) -> None:
    save(run, make(run, tmp_path / "near"))
    saved = save(run, small := make(run, tmp_path / "near", 1000), **step(11))
    assert "has 0 bytes of free space" in saved.near_problem
    assert list_names(small.place) == ["epoch-0001"]


# ---- bad input


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1000) as mounted:
        yield mounted


def assert_warned_once(run: LocalStore, near: Near, problem: str) -> None:
    """Assert that saves and restores succeed without the near folder, and that the first save alone says why."""
    saver = Saver(PART_BYTES, near=near)
    said = []
    for number in (1, 2):
        saver.begin(CheckpointSave(run, to_payload(STATE), METADATA_FIELDS | step(number), ""))
        saved = saver.wait()
        assert saved is not None
        said.append(saved.near_problem)
        reader = NearReader(near, commit_of(saved))
        read_at_once(run, commit_of(saved), reader)
        assert (reader.taken, reader.problem) == ([], "")
    assert problem in said[0], said
    assert said[1] == ""


def test_a_full_disk_costs_a_warning(run: LocalStore, disk: Path) -> None:
    (disk / "filler").write_bytes(b"0" * 700_000)
    assert_warned_once(run, make(run, disk / "near"), "bytes of free space")


def test_copies_make_room_on_a_disk_that_is_smaller_than_the_bound(run: LocalStore, disk: Path) -> None:
    near = make(run, disk / "near")
    for number in (1, 2, 3):
        assert save(run, near, **step(number)).near_problem == ""
    assert list_names(near.place) == ["epoch-0001-step-00000003"]


def test_a_read_only_disk_costs_a_warning(run: LocalStore, disk: Path) -> None:
    near = make(run, disk)
    near.place.mkdir()
    make_read_only(disk)
    assert_warned_once(run, near, "Read-only file system")


def test_a_folder_whose_parent_is_missing_is_not_made(run: LocalStore, tmp_path: Path) -> None:
    assert_warned_once(run, make(run, tmp_path / "unmounted" / "near"), "does not exist")
    assert not (tmp_path / "unmounted").exists()


def test_a_file_in_the_place_of_the_folder_costs_a_warning(run: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "near").write_text("")
    assert_warned_once(run, make(run, tmp_path / "near"), str(tmp_path / "near"))


def test_a_folder_that_vanishes_is_made_anew(run: LocalStore, tmp_path: Path) -> None:
    near = make(run, tmp_path / "near")
    save(run, near)
    (tmp_path / "near").rename(tmp_path / "gone")
    saved = save(run, near, **step(11))
    assert saved.near_problem == ""
    assert list_names(near.place) == [saved.path]


# ---- adoption


def list_orphans(run: LocalStore, near: Near) -> list[Saved]:
    return list(find_orphans(run, None, lambda fingerprint: True, 10, place=near.store))


@pytest.fixture
def near(run: LocalStore, tmp_path: Path) -> Near:
    made = make(run, tmp_path / "near")
    made.place.mkdir(parents=True)
    trail = "".join(f'{{"step": {number}}}\n' for number in range(1, 11))
    saver = Saver(PART_BYTES)
    saver.begin(CheckpointSave(made.store, to_payload(STATE), METADATA_FIELDS, trail))
    saver.wait()
    return made


def test_a_near_checkpoint_is_copied_to_the_store(run: LocalStore, near: Near) -> None:
    (saved,) = list_orphans(run, near)
    copied = copy_checkpoint(near.store, saved, run)
    assert copied.metadata.checkpoint_sha256 == saved.metadata.checkpoint_sha256
    assert copied.metadata.writer != saved.metadata.writer
    read_payload(run, commit_of(copied))
    assert list_files(run.root / copied.path) == list_files(near.place)


def test_a_copy_goes_on_where_a_killed_save_has_stopped(run: LocalStore, near: Near) -> None:
    (saved,) = list_orphans(run, near)
    for name in PARTS[:3]:
        run.create(f"{saved.path}/{name}", near.store.read(f"{saved.path}/{name}"))
    assert copy_checkpoint(near.store, saved, run).path == saved.path


def test_a_copy_takes_no_folder_with_other_bytes(run: LocalStore, near: Near) -> None:
    (saved,) = list_orphans(run, near)
    run.create(f"{saved.path}/{PARTS[0]}", b"different bytes")
    copied = copy_checkpoint(near.store, saved, run)
    assert copied.path == f"{saved.path}.2"
    read_payload(run, commit_of(copied))


def test_a_near_checkpoint_with_a_flipped_bit_is_not_adopted(run: LocalStore, near: Near) -> None:
    (saved,) = list_orphans(run, near)
    flip(near.place / saved.path / PARTS[5])
    assert list_orphans(run, near) == []
    with pytest.raises(CheckpointDamaged, match=PARTS[5]):
        copy_checkpoint(near.store, saved, run)
    assert "metadata.json" not in list_files(run.root)


def test_runs_of_two_stores_that_began_alike_have_folders_of_their_own(tmp_path: Path) -> None:
    """Their run.json may be equal: its time is in seconds."""
    places = set()
    for store in ("here", "there"):
        (tmp_path / store / "r").mkdir(parents=True)
        (tmp_path / store / "r" / "run.json").write_text("{}")
        folder = LocalStore(str(tmp_path / store)).inside("r")
        places.add(Near(NearTier(folder=str(tmp_path / "near")), folder, "r").place)
    assert len(places) == 2

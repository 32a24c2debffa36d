"""The files that a recipe reads while it is built are recorded by content, under names that survive a move."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.provenance.opened_files import (
    WHOLE_BYTES,
    describe_file,
    describe_files,
    is_same_file,
    record_opened_files,
)


def read(path: Path) -> dict[str, Any]:
    """Return the record of a recipe in ``path``'s folder that reads the file."""
    with record_opened_files() as opened:
        path.read_bytes()
    return describe_files(opened, [], path.parent, [])


def names(home: Path, *paths: Path, ours: Iterable[str] = ()) -> set[str]:
    with record_opened_files() as opened:
        for path in paths:
            path.read_bytes()
    return {*describe_files(opened, [], home, ours)}


def test_other_content_of_equal_size_and_time_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    (before,) = read(path).values()
    (again,) = read(path).values()
    path.write_bytes(b"two")
    os.utime(path, (1, 1))
    (after,) = read(path).values()
    assert is_same_file(before, again)
    assert not is_same_file(before, after)


def test_every_way_to_open_a_file_is_seen(tmp_path: Path) -> None:
    array, tensor, text = tmp_path / "a.npy", tmp_path / "t.pt", tmp_path / "t.json"
    np.save(array, np.arange(3))
    torch.save(torch.arange(3), tensor)
    text.write_text("{}")
    with record_opened_files() as opened:
        np.load(array, mmap_mode="r")
        torch.load(tensor)
        os.close(os.open(text, os.O_RDONLY))
    assert {*describe_files(opened, [], tmp_path, [])} == {"a.npy", "t.pt", "t.json"}


def test_files_that_are_written_or_read_outside_the_block_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("x")
    (tmp_path / "before").read_text()
    with record_opened_files() as opened:
        (tmp_path / "cache").write_text("x")
        (tmp_path / "cache").read_text()
        with (tmp_path / "log").open("a") as log:
            log.write("x")
        os.close(os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR))
        (tmp_path / "gone").write_text("x")
        (tmp_path / "gone").unlink()
    assert describe_files(opened, [], tmp_path, []) == {}


def test_files_of_the_system_and_of_holdfast_are_left_out(tmp_path: Path) -> None:
    records = ("mine-1.0.dist-info/RECORD", "mine.egg-info/PKG-INFO")
    left_out = (".cache/x", "runs/x", "lib/site-packages/x", "own.py", "made.pyc", *records)
    paths = [tmp_path / name for name in (*left_out, "x")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    with record_opened_files() as opened:
        for path in [*paths, Path(os.__file__), Path("/proc/cpuinfo"), Path("/etc/hosts")]:
            path.read_bytes()
    assert {*describe_files(opened, [str(tmp_path / "own.py")], tmp_path, [str(tmp_path / "runs")])} == {"x"}


def test_names_are_relative_to_the_recipes_or_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("home/data/a", "work/b", "else/where/c", "else/here/c", "else/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path / "work")
    every = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert names(tmp_path / "home", *every) == {"data/a", "b", "where/c", "here/c", "d"}
    # A checkout may be in a hidden folder.
    hidden = tmp_path / ".hidden"
    (tmp_path / "home").rename(hidden)
    assert names(hidden, hidden / "data" / "a") == {"data/a"}


def test_many_files_of_a_folder_are_one_entry(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / f"{number:02d}").write_text(str(number))
    every = [*(tmp_path / "many").iterdir()]
    with record_opened_files() as opened:
        for path in every:
            path.read_bytes()
    before = describe_files(opened, [], tmp_path, [])
    assert {name: entry["files"] for name, entry in before.items()} == {"many/*": 40}
    every[7].write_text("xx")
    assert not is_same_file(before["many/*"], describe_files(opened, [], tmp_path, [])["many/*"])


def test_a_large_file_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(WHOLE_BYTES + 1)  # a sparse file, which takes no space on the disk
    before = describe_file(path)
    assert before.keys() == {"size_bytes", "sampled"}
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert not is_same_file(before, describe_file(path))


def test_entries_are_compared_by_the_strongest_digest_that_both_have() -> None:
    whole = {"size_bytes": 1, "sha256": "a", "sampled": "s"}
    assert is_same_file(whole, {"size_bytes": 1, "sampled": "s"})
    assert not is_same_file(whole, {"size_bytes": 1, "sampled": "t"})
    assert not is_same_file(whole, whole | {"sha256": "b"})
    assert not is_same_file(whole, whole | {"size_bytes": 2})

"""A checkpoint is read part by part, and damage to a header or to a part's bytes is found."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import cut, in_memory, read_headers
from holdfast.checkpoint.partial import PartsReader
from holdfast.errors import CheckpointDamaged
from holdfast.journal import Commit, FileRecord
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import commit_of
from tests.support.parts import PART_BYTES, PARTS, STATE, save
from tests.support.waiting import WITHIN_S

WINDOW_BYTES = 50
WINDOWS = 4


def test_headers_say_where_the_rows_are(folder: LocalStore) -> None:
    saved = save(folder)
    headers = read_headers(folder, commit_of(saved), saved.metadata.parts)
    assert list(headers) == PARTS
    payload = to_payload(STATE)
    assert [headers[name].tree for name in PARTS] == [payload.tree] + [None] * (len(PARTS) - 1)
    for part, file in zip(cut(payload, PART_BYTES), saved.metadata.parts, strict=True):
        image = memoryview(read(folder, commit_of(saved), [file]))
        _, *pieces = part.pieces
        for rows, piece in zip(sorted(headers[part.name].rows, key=lambda each: each.position), pieces, strict=True):
            assert image[rows.position : rows.position + rows.size_bytes] == in_memory(piece)


def test_only_the_parts_that_are_asked_for_are_read(folder: LocalStore) -> None:
    saved = save(folder)
    Path(folder.root, saved.path, PARTS[1]).unlink()
    assert list(read_headers(folder, commit_of(saved), saved.metadata.parts[2:4])) == PARTS[2:4]


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "no header", "a tensor outside"])
def test_damage_is_found(folder: LocalStore, damage: str) -> None:
    saved = save(folder)
    part, commit = saved.metadata.parts[2], commit_of(saved)
    path = Path(folder.root, saved.path, part.name)
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    elif damage == "no header":
        data[:8] = b"\xff" * 8
    elif damage == "a tensor outside":
        data = data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,')
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "cut" else data)

    def read_one() -> None:
        read_headers(folder, commit, [part])
        read(folder, commit, [part])

    with pytest.raises(CheckpointDamaged, match=part.name):
        read_one()


def test_parts_that_follow_a_damaged_one_are_read_all_the_same(folder: LocalStore) -> None:
    saved = save(folder)
    parts, commit = saved.metadata.parts[1:3], commit_of(saved)
    path = Path(folder.root, saved.path, parts[0].name)
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    reader = PartsReader(folder, commit, parts, memoryview(bytearray(WINDOWS * WINDOW_BYTES)), WINDOW_BYTES)
    for part, problem in zip(parts, (True, False), strict=True):
        assert len(take_part(reader, part.size_bytes)) == part.size_bytes
        with pytest.raises(CheckpointDamaged, match=part.name) if problem else contextlib.nullcontext():
            reader.check()
    reader.close()


def test_a_reader_that_nobody_reads_from_ends(folder: LocalStore) -> None:
    saved = save(folder)
    memory = memoryview(bytearray(WINDOWS * WINDOW_BYTES))
    PartsReader(folder, commit_of(saved), saved.metadata.parts, memory, WINDOW_BYTES).close()


class Slow(LocalStore):
    """A store that answers no read before it is asked for all windows but one."""

    asked = threading.Barrier(WINDOWS - 1, timeout=WITHIN_S)

    def fill(self, name: str, buffer: memoryview, start: int = 0) -> Iterator[int]:
        self.asked.wait()
        yield from super().fill(name, buffer, start)


def test_several_windows_are_read_at_once(folder: LocalStore) -> None:
    saved = save(folder)
    reader = PartsReader(
        Slow(folder.root), commit_of(saved), saved.metadata.parts[1:], memoryview(bytearray(WINDOWS * WINDOW_BYTES)),
        WINDOW_BYTES,
    )  # fmt: skip
    for _ in range(WINDOWS - 1):
        assert reader.take()
        reader.give_back()
    Slow.asked.abort()
    reader.close()


def read(folder: LocalStore, commit: Commit, parts: list[FileRecord]) -> bytearray:
    """Read some parts in windows, and verify them."""
    reader = PartsReader(folder, commit, parts, memoryview(bytearray(WINDOWS * WINDOW_BYTES)), WINDOW_BYTES)
    found = bytearray()
    try:
        for part in parts:
            found += take_part(reader, part.size_bytes)
            reader.check()
    finally:
        reader.close()
    return found


def take_part(reader: PartsReader, size_bytes: int) -> bytearray:
    """Take all windows of a part."""
    found = bytearray()
    while len(found) < size_bytes:
        found += reader.take()
        reader.give_back()
    return found

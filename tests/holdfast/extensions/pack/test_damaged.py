"""Unpacking refuses a file that is damaged, truncated or no tar file."""

import contextlib
import gzip
import json
import random
import shutil
import tarfile
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.checkpoint import PAYLOAD
from holdfast.errors import Damage
from holdfast.journal import Journal
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from tests.support.packing import contents, members, unpacked

FLIPS = 200


def parts(data: bytes) -> dict[str, list[int]]:
    """Return the positions of all bytes of the file, by kind."""
    found: dict[str, list[int]] = {"header": [], "record": [], "payload": [], "padding": []}
    at = 0
    for member, _ in members(data):
        found["header"] += range(member.offset, member.offset_data)
        end = member.offset_data + member.size
        found["payload" if member.name.endswith(PAYLOAD) else "record"] += range(member.offset_data, end)
        at = -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        found["padding"] += range(end, at)
    found["padding"] += range(at, len(data))
    assert sum(map(len, found.values())) == len(data)
    return found


def values(files: Iterable[tuple[str, bytes]]) -> dict[str, Any]:
    """Return the values of each commit, and the bytes of every other file; a commit that is no JSON is its bytes."""
    found: dict[str, Any] = {}
    for name, data in files:
        found[name] = data
        if "/commits/" in name:
            with contextlib.suppress(ValueError):
                found[name] = json.loads(data)
    return found


def stored(store: LocalStore) -> dict[str, Any]:
    """Return the values of all files of a store."""
    return values(contents(store.root).items())


def listed(data: bytes) -> dict[str, Any]:
    """Return the values of all members of a packed checkpoint."""
    return values((member.name, content) for member, content in members(data))


def test_a_flipped_bit_is_refused_or_changes_nothing(good: bytes, store: LocalStore) -> None:
    """Unpacking either refuses the file and leaves no run, or the bit has no meaning and the run is unchanged.

    A bit in the 17th digit of a number or in its "e" may have none: both spellings are one number, and a record's
    hash is of that.
    """
    unpacked(good, store)
    expected = stored(store)
    chosen = random.Random(20)
    outcomes: dict[str, list[bool]] = {}
    for count in range(FLIPS):
        shutil.rmtree(store.root / "run", ignore_errors=True)
        part, positions = [*parts(good).items()][count % 4]
        position = chosen.choice(positions)
        data = bytearray(good)
        data[position] ^= 1 << chosen.randrange(8)
        try:
            unpacked(bytes(data), store)
        except Damage:
            assert store.list() == [], (part, position)
            outcomes.setdefault(part, []).append(False)
        else:
            assert stored(store) == expected, (part, position)
            assert verify_run(Journal(store, "run"), deep=True).ok
            assert part != "record" or listed(bytes(data)) == listed(good), position
            outcomes.setdefault(part, []).append(True)
    assert not all(outcomes["record"])
    assert not any(outcomes["payload"])
    assert outcomes["header"].count(True) < FLIPS / 40  # only the last byte of the checksum has no meaning
    assert any(outcomes["padding"])


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [
        (0, "not a packed checkpoint"),
        (511, "not a packed checkpoint"),
        (600, "the packed file is cut short: it ends in"),
    ],
)
def test_a_truncated_file_is_refused(good: bytes, store: LocalStore, size_bytes: int, said: str) -> None:
    with pytest.raises(Damage, match=said):
        unpacked(good[:size_bytes], store)
    assert store.list() == []


def test_truncation_at_any_byte_is_refused_or_harmless(good: bytes, store: LocalStore) -> None:
    end = max(member.offset_data + member.size for member, _ in members(good))
    for size_bytes in range(0, len(good), 500):
        shutil.rmtree(store.root / "run", ignore_errors=True)
        try:
            unpacked(good[:size_bytes], store)
        except Damage:
            assert store.list() == []
        else:
            assert size_bytes > end
            assert verify_run(Journal(store, "run"), deep=True).ok


NO_TARS = {
    "empty": b"",
    "zeros": bytes(tarfile.RECORDSIZE),
    "JSON": b"{}",
    "text": b"x" * tarfile.RECORDSIZE,
    "gzip": gzip.compress(bytes(tarfile.RECORDSIZE)),
    "all bits": b"\xff" * tarfile.RECORDSIZE,
}


@pytest.mark.parametrize("case", NO_TARS)
def test_a_file_that_is_no_tar_is_refused(store: LocalStore, case: str) -> None:
    with pytest.raises(Damage, match="the file is not a packed checkpoint"):
        unpacked(NO_TARS[case], store)
    assert store.list() == []

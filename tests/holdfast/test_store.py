"""What a checkpoint needs from a folder: create-once under race, whole reads, clear errors."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, NameMissing, NameTaken, StoreDenied, StoreError
from holdfast.store import Store

ROUNDS, WRITERS = 60, 8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def test_of_all_who_create_a_name_one_succeeds(store: Store) -> None:
    barrier = threading.Barrier(WRITERS)

    def write(name: str, writer: int) -> bool:
        barrier.wait()
        try:
            store.create(name, bytes([writer]) * 1000)
        except NameTaken:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as pool:
        for round_ in range(ROUNDS):
            name = f"commits/{round_}"
            won = list(pool.map(write, [name] * WRITERS, range(WRITERS)))
            assert sum(won) == 1
            assert store.read(name) == bytes([won.index(True)]) * 1000
    assert store.list("commits") == sorted(map(str, range(ROUNDS)))


def test_a_name_appears_whole_or_not_at_all(store: Store) -> None:
    def fail_half_way() -> None:
        with store.creating("a/b") as writer:
            writer.write(b"half")
            assert not store.exists("a/b")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert not store.exists("a/b")
    assert store.list("a") == []
    assert list((store.root / "a").iterdir()) == []


def test_replace_and_pieces(store: Store) -> None:
    store.replace("a", b"old")
    store.replace("a", b"new bytes")
    assert store.read("a") == b"new bytes"
    assert list(store.pieces("a", 4)) == [b"new ", b"byte", b"s"]
    assert store.size_bytes("a") == 9


def test_what_is_not_there(store: Store) -> None:
    assert store.list() == []
    assert not store.exists("a")
    store.delete_folder("a")
    for read in (store.read, store.size_bytes, lambda name: list(store.pieces(name))):
        with pytest.raises(NameMissing) as caught:
            read("a")
        assert isinstance(caught.value, FileNotFoundError)


def test_folders_are_deleted_and_writes_in_progress_are_not_listed(store: Store) -> None:
    store.create("a/b", b"")
    (store.root / "a" / "c.tmp-1234").write_bytes(b"half")
    assert store.list("a") == ["b"]
    store.delete_folder("a")
    assert store.list() == []


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", ""])
def test_names_do_not_leave_the_store(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="not a name inside"):
        store.create(name, b"")


def test_unusable_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreDenied, match="Not a directory") as caught:
        Store(str(tmp_path / "file")).create("a", b"")
    assert isinstance(caught.value, PermissionError)
    with pytest.raises(ConfigError, match="s3:// is not supported"):
        Store("s3://bucket")


def test_file_urls_are_folders(tmp_path: Path) -> None:
    Store(f"file://{tmp_path}").create("a", b"x")
    assert (tmp_path / "a").read_bytes() == b"x"

"""The conformance suite of stores: a test class from which you derive the tests of your own store.

::

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore("an/empty/folder")
"""

import contextlib
import functools
import mmap
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from holdfast.errors import NameMissing, NameTaken, StoreError
from holdfast.store import Store


class StoreTests:
    """The conformance suite of a store. The suite needs a fixture ``store`` that returns a new empty folder for every
    test.

    Attributes:
        writers, rounds: the number of writers that race to create one name, and the number of races.
        large_bytes: the size of a test file in bytes. Choose more than the store sends in one request.
        names: the number of files in a test of listings. If possible, choose more than the store lists in one request.
    """

    writers = 8
    rounds = 20
    large_bytes = 40 * 2**20
    names = 20

    def test_create_then_read(self, store: Store) -> None:
        store.create("a/b.json", b"bytes")
        assert store.read("a/b.json") == b"bytes"
        assert store.size_bytes("a/b.json") == 5
        assert store.exists("a/b.json")

    @pytest.mark.parametrize("data", [b"", b"x", bytearray(b"array"), memoryview(b"view")])
    def test_any_bytes(self, store: Store, data: bytes) -> None:
        store.create("created", data)
        store.replace("replaced", data)
        with store.creating("in pieces") as writer:
            writer.write(data)
        for name in ("created", "replaced", "in pieces"):
            assert store.read(name) == bytes(data)
            assert b"".join(store.pieces(name)) == bytes(data)

    def test_what_exists_is_not_created_again(self, store: Store) -> None:
        store.create("a", b"first")
        with pytest.raises(NameTaken):
            store.create("a", b"second")
        with pytest.raises(NameTaken):
            self._create_in_pieces(store, "a", [b"second"])
        assert store.read("a") == b"first"

    def test_of_all_who_create_a_name_one_succeeds(self, store: Store) -> None:
        for round_ in range(self.rounds):
            name = f"commits/{round_}"
            won = self._race(functools.partial(self._create, store, name, 1000))
            assert won.count(True) == 1
            assert store.read(name) == bytes([won.index(True)]) * 1000

    def test_of_all_who_create_a_name_in_pieces_one_succeeds(self, store: Store) -> None:
        for round_ in range(self.rounds // 4):
            name = f"payload/{round_}"
            won = self._race(functools.partial(self._create, store, name, 9, in_pieces=True))
            assert won.count(True) == 1
            assert store.read(name) == bytes([won.index(True)]) * 9

    def test_large_bytes_in_pieces(self, store: Store) -> None:
        piece = bytes(range(256)) * 2**12
        count = self.large_bytes // len(piece)
        self._create_in_pieces(store, "large", [piece] * count)
        assert store.size_bytes("large") == count * len(piece)
        assert all(found == piece for found in store.pieces("large", len(piece)))
        with pytest.raises(NameTaken):
            self._create_in_pieces(store, "large", [piece] * count)

    def test_writers_in_pieces_do_not_mix(self, store: Store) -> None:
        data = [bytes([number]) * self.large_bytes for number in range(2)]
        with contextlib.ExitStack() as last, contextlib.ExitStack() as first:
            for stack, mine in ((first, data[0]), (last, data[1])):
                stack.enter_context(store.creating("large")).write(mine)
            first.close()
            with pytest.raises(NameTaken):
                last.close()
        assert store.read("large") == data[0]

    @pytest.mark.parametrize(
        "error", [FileExistsError, FileNotFoundError, PermissionError, KeyError, KeyboardInterrupt]
    )
    def test_what_the_caller_raises_passes(self, store: Store, error: type[BaseException]) -> None:
        def failing() -> Iterator[bytes]:
            yield b"x"
            raise mine

        mine = error("mine")
        with pytest.raises(error) as caught:
            self._create_in_pieces(store, "a", failing())
        assert caught.value is mine
        assert store.list() == []

    @pytest.mark.parametrize("pieces", [1, 40])
    def test_a_write_that_fails_leaves_nothing(self, store: Store, pieces: int) -> None:
        self._fail_to_create(store, "a/half", pieces)
        assert not store.exists("a/half")
        assert store.list("a") == []

    @pytest.mark.parametrize("pieces", [1, 40])
    def test_a_write_that_failed_can_be_done_again(self, store: Store, pieces: int) -> None:
        self._fail_to_create(store, "a/half", pieces)
        store.create("a/half", b"whole")
        assert store.read("a/half") == b"whole"

    @pytest.mark.parametrize("is_large", [False, True])
    def test_a_copy_is_a_file_of_its_own(self, store: Store, is_large: bool) -> None:
        data = random.Random(1).randbytes(self.large_bytes if is_large else 5)
        store.create("a/first", data)
        if not store.copy("a/first", "b/second"):
            assert not store.exists("b/second")
            return
        assert store.read("b/second") == data
        store.replace("a/first", b"other")
        assert store.read("b/second") == data
        store.delete("a/first")
        assert store.read("b/second") == data

    @pytest.mark.parametrize("is_large", [False, True])
    def test_a_copy_replaces_nothing_and_comes_from_something(self, store: Store, is_large: bool) -> None:
        data = bytes(self.large_bytes if is_large else 5)
        store.create("a", data)
        if not store.copy("a", "b"):
            return
        with pytest.raises(NameTaken):
            store.copy("a", "b")
        store.create("c/1", b"first")
        with pytest.raises(NameTaken):
            store.copy("a", "c/1")
        assert store.read("c/1") == b"first"
        for source in ("nowhere", "c"):
            with pytest.raises(NameMissing):
                store.copy(source, "d")
        for names in (("../a", "d"), ("a", "../d")):
            with pytest.raises(StoreError, match="not a name inside"):
                store.copy(*names)
        assert store.list() == ["a", "b", "c"]
        assert store.sweep(datetime.now(UTC) + timedelta(hours=1)) == 0

    def test_of_all_who_copy_to_a_name_one_succeeds(self, store: Store) -> None:
        sources = [bytes([writer]) * self.large_bytes for writer in range(2)]
        for writer, data in enumerate(sources):
            store.create(f"source/{writer}", data)
        if not store.copy("source/0", "try"):
            return
        won = self._race(lambda writer: store.copy(f"source/{writer}", "copy"), writers=2)
        assert won.count(True) == 1
        assert store.read("copy") == sources[won.index(True)]

    def test_replace(self, store: Store) -> None:
        store.replace("latest.json", b"the old bytes")
        store.replace("latest.json", b"new")
        assert store.read("latest.json") == b"new"

    def test_readers_see_old_or_new(self, store: Store) -> None:
        versions = {bytes([number]) * 5000 for number in range(self.rounds)}
        store.replace("latest.json", next(iter(versions)))
        ended = threading.Event()

        def read() -> bool:
            seen = True
            while not ended.is_set():
                seen = seen and store.read("latest.json") in versions
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            for version in versions:
                store.replace("latest.json", version)
            ended.set()
        assert all(reader.result() for reader in readers)

    def test_pieces_are_in_order_and_of_the_size_asked_for(self, store: Store) -> None:
        store.create("a", b"0123456789")
        assert list(store.pieces("a", 4)) == [b"0123", b"4567", b"89"]

    @pytest.mark.parametrize(
        ("start", "stop", "expected"),
        [
            (0, 3, b"012"), (3, 7, b"3456"), (7, None, b"789"), (8, 99, b"89"), (0, 99, b"0123456789"), (10, 12, b""),
            (50, 60, b""), (50, None, b""), (4, 4, b""), (0, 0, b""), (5, 2, b""),
        ],
    )  # fmt: skip
    def test_read_is_of_a_range(self, store: Store, start: int, stop: int | None, expected: bytes) -> None:
        store.create("a", b"0123456789")
        assert store.read("a", start, stop) == expected

    def test_a_range_of_an_empty_file_is_empty(self, store: Store) -> None:
        store.create("a", b"")
        assert store.read("a", 0, 10) == store.read("a", 5, 10) == store.read("a", 5) == b""

    @pytest.mark.parametrize("size_bytes", [0, 1, 10, 11, 3 * 2**20 + 5])
    def test_a_buffer_is_filled_as_far_as_there_is_something(self, store: Store, size_bytes: int) -> None:
        data = random.Random(size_bytes).randbytes(size_bytes)
        store.create("a", data)
        for buffer_bytes in {max(size_bytes - 1, 0), size_bytes, size_bytes + 7}:
            # A map's memory is aligned to a page, as a store that bypasses the page cache may require.
            buffer = memoryview(mmap.mmap(-1, buffer_bytes + 1))[:buffer_bytes]
            filled = list(store.fill("a", buffer))
            assert filled == sorted(filled)
            assert (filled[-1] if filled else 0) == min(size_bytes, buffer_bytes)
            assert buffer[:size_bytes] == data[:buffer_bytes]
        for start in {0, 1, size_bytes // 2 // 4096 * 4096, size_bytes, size_bytes + 1}:
            buffer = memoryview(mmap.mmap(-1, 2**21 + 4096))[: 2**21 + 7]
            filled = [0, *store.fill("a", buffer, start)]
            assert buffer[: filled[-1]] == data[start : start + len(buffer)]
        with pytest.raises(NameMissing):
            list(store.fill("b", memoryview(bytearray(1))))

    def test_list_is_of_one_folder_and_sorted(self, store: Store) -> None:
        assert store.list() == []
        for name in ("b", "a/2", "a/1", "a/deep/er", "ab"):
            store.create(name, b"")
        assert store.list() == ["a", "ab", "b"]
        assert store.list("a") == ["1", "2", "deep"]
        assert store.list("nowhere") == []

    def test_list_after_a_name(self, store: Store) -> None:
        for name in ("b", "a", "a!", "a.json", "a/2", "a/1", "a/deep/er", "ab", "é"):
            store.create(name if "/" in name else f"{name}-", b"")
        everything = store.list()
        for after in (*everything, "a", "0", "a/", "zz", "a-é", "ü"):
            assert store.list("", after) == [name for name in everything if name > after]
        assert store.list("a", "1") == ["2", "deep"]
        assert store.list("a", "deep") == store.list("nowhere", "1") == []

    def test_list_is_whole_when_it_is_long(self, store: Store) -> None:
        names = [f"{number:08d}" for number in range(self.names)]
        with ThreadPoolExecutor(self.writers) as pool:
            list(pool.map(lambda name: store.create(f"commits/{name}", b""), names))
        assert store.list("commits") == names
        assert store.list("commits", names[4]) == names[5:]
        store.delete_folder("commits")
        assert store.list("commits") == []

    def test_what_is_written_elsewhere_is_seen_at_once(self, store: Store) -> None:
        assert store.list("a") == []
        assert not store.exists("a/1")
        store.inside("a").create("1", b"x")
        assert store.list("a") == ["1"]
        assert store.exists("a/1")
        assert store.inside("a").read("1") == b"x"

    def test_what_is_not_there(self, store: Store) -> None:
        assert not store.exists("a")
        self._is_missing(store, "a")

    def test_a_folder_is_no_file(self, store: Store) -> None:
        store.create("folder/a", b"")
        assert not store.exists("folder")
        self._is_missing(store, "folder")

    def test_modified_is_when_it_was_written(self, store: Store) -> None:
        before = datetime.now(UTC) - timedelta(seconds=2)
        store.create("a", b"x")
        assert before <= store.modified("a") <= datetime.now(UTC) + timedelta(seconds=2)
        assert store.modified("a").utcoffset() == timedelta(0)

    def test_a_deleted_file_is_gone(self, store: Store) -> None:
        for name in ("a/1", "a/12", "a/deep/er"):
            store.create(name, b"x")
        for name in ("a/1", "a/1", "never/was"):
            store.delete(name)
        assert store.list("a") == ["12", "deep"]
        store.create("a/1", b"again")
        assert store.read("a/1") == b"again"

    def test_deleting_is_done_once_or_often(self, store: Store) -> None:
        for name in ("a/1", "a/2", "a/deep/er/still", "ab/1"):
            store.create(name, b"x")
        store.delete_folder("a")
        assert store.list() == ["ab"]
        store.delete_folder("a")
        store.delete_folder("never/was")
        store.create("a/1", b"again")

    def test_sweeping_leaves_what_is_whole(self, store: Store) -> None:
        self._fail_to_create(store, "a/half", 40)
        store.create("a/b", b"x")
        store.sweep(datetime.now(UTC) + timedelta(hours=1))
        assert store.sweep(datetime.now(UTC) + timedelta(hours=1)) == 0
        assert store.list() == ["a"]
        assert store.read("a/b") == b"x"

    @pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "", ".."])
    def test_names_do_not_leave_the_store(self, store: Store, name: str) -> None:
        for verb in (
            store.read, store.exists, store.modified, store.inside, store.delete, store.delete_folder,
            lambda name: store.create(name, b""),
        ):  # fmt: skip
            with pytest.raises(StoreError, match="not a name inside"):
                verb(name)

    def _is_missing(self, store: Store, name: str) -> None:
        for read in (
            store.read,
            lambda name: store.read(name, 2, 4),
            lambda name: store.read(name, 4, 4),
            store.size_bytes,
            store.modified,
            lambda name: list(store.pieces(name)),
        ):
            with pytest.raises(NameMissing):
                read(name)

    def _fail_to_create(self, store: Store, name: str, pieces: int) -> None:
        def failing() -> Iterator[bytes]:
            for _ in range(pieces):
                yield b"x" * 2**20
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self._create_in_pieces(store, name, failing())

    def _create(self, store: Store, name: str, count: int, writer: int, *, in_pieces: bool = False) -> None:
        if in_pieces:
            self._create_in_pieces(store, name, [bytes([writer])] * count)
        else:
            store.create(name, bytes([writer]) * count)

    @staticmethod
    def _create_in_pieces(store: Store, name: str, pieces: "list[bytes] | Iterator[bytes]") -> None:
        with store.creating(name) as writer:
            for piece in pieces:
                writer.write(piece)

    def _race(self, write: Callable[[int], object], writers: int = 0) -> list[bool]:
        writers = writers or self.writers
        barrier = threading.Barrier(writers)

        def run(writer: int) -> bool:
            barrier.wait()
            try:
                write(writer)
            except NameTaken:
                return False
            return True

        with ThreadPoolExecutor(writers) as pool:
            return list(pool.map(run, range(writers)))

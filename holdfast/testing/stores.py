"""What every store has to do, as tests that a store of your own can inherit.

::

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self) -> Store:
            return MyStore("an/empty/folder")
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import NameMissing, NameTaken, StoreError
from holdfast.store import Store


class StoreTests:
    """The conformance suite. It needs a fixture ``store``: an empty folder, a new one for every test.

    Attributes:
        writers, rounds: how many race for one name, and how often.
        large_bytes: more than the store sends in one request.
    """

    writers = 8
    rounds = 20
    large_bytes = 40 * 2**20

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

    def test_list_is_of_one_folder_and_sorted(self, store: Store) -> None:
        assert store.list() == []
        for name in ("b", "a/2", "a/1", "a/deep/er", "ab"):
            store.create(name, b"")
        assert store.list() == ["a", "ab", "b"]
        assert store.list("a") == ["1", "2", "deep"]
        assert store.list("nowhere") == []

    def test_what_is_written_elsewhere_is_seen_at_once(self, store: Store) -> None:
        assert store.list("a") == []
        assert not store.exists("a/1")
        store.inside("a").create("1", b"x")
        assert store.list("a") == ["1"]
        assert store.exists("a/1")
        assert store.inside("a").read("1") == b"x"

    def test_what_is_not_there(self, store: Store) -> None:
        assert not store.exists("a")
        for read in (store.read, store.size_bytes, lambda name: list(store.pieces(name))):
            with pytest.raises(NameMissing):
                read("a")

    def test_a_folder_is_no_file(self, store: Store) -> None:
        store.create("folder/a", b"")
        assert not store.exists("folder")

    def test_deleting_is_done_once_or_often(self, store: Store) -> None:
        for name in ("a/1", "a/2", "ab/1"):
            store.create(name, b"x")
        store.delete_folder("a")
        assert store.list() == ["ab"]
        store.delete_folder("a")
        store.delete_folder("never/was")
        store.create("a/1", b"again")

    @pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "", ".."])
    def test_names_do_not_leave_the_store(self, store: Store, name: str) -> None:
        for verb in (store.read, store.exists, store.inside, store.delete_folder, lambda name: store.create(name, b"")):
            with pytest.raises(StoreError, match="not a name inside"):
                verb(name)

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

    def _race(self, write: Callable[[int], None]) -> list[bool]:
        barrier = threading.Barrier(self.writers)

        def run(writer: int) -> bool:
            barrier.wait()
            try:
                write(writer)
            except NameTaken:
                return False
            return True

        with ThreadPoolExecutor(self.writers) as pool:
            return list(pool.map(run, range(self.writers)))

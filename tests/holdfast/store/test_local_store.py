"""The store on a local file system: it refuses links, pipes and devices, and sweeps remains of writes."""

import itertools
import os
import resource
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from holdfast.errors import StoreError
from holdfast.store import Store, folders, open_store
from holdfast.store.local import LocalStore
from holdfast.testing.stores import StoreTests


def test_local_writes_in_progress_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.create("a/b", b"")
    (tmp_path / "a" / "c.tmp-1234").write_bytes(b"half")
    assert store.list("a") == ["b"]


def test_an_interrupt_on_any_line_closes_no_descriptor_twice(tmp_path: Path) -> None:
    """Ctrl-C may come between any two lines of this process, and another thread may have got the number meanwhile."""
    (tmp_path / "a" / "b").mkdir(parents=True)

    def open_until(line: int) -> bool:
        """Open the folder; return whether it was interrupted on its ``line``-th line."""
        lines = itertools.count()

        def interrupt(frame: FrameType, event: str, argument: object) -> Any:
            if frame.f_code.co_filename != folders.__file__:
                return None
            if event == "line" and next(lines) == line:
                raise KeyboardInterrupt
            return interrupt

        traced = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with folders.opened(tmp_path, ["a", "b"]) as descriptor:
                os.listdir(descriptor)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(traced)
        return False

    interrupted = list(itertools.takewhile(open_until, itertools.count()))
    assert len(interrupted) > 10


def test_local_remains_are_swept_once_they_are_old(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "run"))
    store.create("a/b", b"")
    for name in ("one.tmp-1", "a/two.tmp-2", "outside/three.tmp-3"):
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_bytes(b"half")
    (tmp_path / "run" / "outside").rename(tmp_path / "outside")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "outside")
    assert store.sweep(datetime.now(UTC) - timedelta(hours=1)) == 0
    assert store.inside("a").sweep(datetime.now(UTC) + timedelta(hours=1)) == 1
    assert store.sweep(datetime.now(UTC) + timedelta(hours=1)) == 1
    assert (tmp_path / "outside" / "three.tmp-3").exists()
    assert LocalStore(str(tmp_path / "nowhere")).sweep(datetime.now(UTC)) == 0


def test_local_remains_in_a_spared_folder_stay(tmp_path: Path) -> None:
    remains = ("a/b/one.tmp-1", "a/two.tmp-2", "b/a/three.tmp-3", "four.tmp-4")
    for name in remains:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    swept = LocalStore(str(tmp_path)).sweep(datetime.now(UTC) + timedelta(hours=1), {"a", "four.tmp-4"}.__contains__)
    assert swept == 2
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.tmp-*")) == [*remains[:2]]


VERBS: dict[str, Callable[[Store, str], object]] = {
    "create": lambda store, name: store.create(name, b"mine"),
    "replace": lambda store, name: store.replace(name, b"mine"),
    "creating": lambda store, name: store.creating(name).__enter__(),
    "copy from": lambda store, name: store.copy(name, "copied"),
    "copy to": lambda store, name: store.copy("inner/file", name),
    "read": lambda store, name: store.read(name),
    "pieces": lambda store, name: list(store.pieces(name)),
    "size_bytes": lambda store, name: store.size_bytes(name),
    "exists": lambda store, name: store.exists(name),
    "modified": lambda store, name: store.modified(name),
    "list": lambda store, name: store.list(name),
    "delete": lambda store, name: store.delete(name),
    "delete_folder": lambda store, name: store.delete_folder(name),
}


@pytest.mark.parametrize("name", ["file", "folder", "folder/a", "folder/new", "dangling", "inner/link/a", "loop/a"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_link_in_a_local_store_is_refused(tmp_path: Path, verb: str, name: str) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    for folder in (outside, run / "inner"):
        folder.mkdir(parents=True)
    (outside / "a").write_bytes(b"theirs")
    (run / "inner" / "file").write_bytes(b"ours")
    (run / "file").symlink_to(outside / "a")
    (run / "loop").symlink_to(run / "loop")
    (run / "dangling").symlink_to(outside / "new")
    for link in ("folder", "inner/link"):
        (run / link).symlink_to(outside)
    with pytest.raises(StoreError, match="is a symbolic link; a run must not contain one"):
        VERBS[verb](LocalStore(str(run)), name)
    assert os.listdir(outside) == ["a"]
    assert (outside / "a").read_bytes() == b"theirs"
    assert sorted(os.listdir(run)) == ["dangling", "file", "folder", "inner", "loop"]


def test_the_root_of_a_local_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "big").mkdir()
    (tmp_path / "data" / "run").symlink_to(tmp_path / "data" / "big")
    store = open_store(f"{tmp_path}/runs").inside("run")
    store.create("a/b", b"x")
    assert (tmp_path / "data" / "big" / "a" / "b").read_bytes() == b"x"
    assert store.list() == ["a"]
    store.delete_folder("a")
    assert store.sweep(datetime.now(UTC)) == 0


@pytest.mark.parametrize("verb", ["read", "pieces", "size_bytes", "exists", "modified"])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_pipe_or_socket_blocks_nothing(tmp_path: Path, verb: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's address must be short
    with socket.socket(socket.AF_UNIX) as listening:
        os.mkfifo("a") if kind == "pipe" else listening.bind("a")
        with pytest.raises(StoreError, match="is not a regular file"):
            VERBS[verb](LocalStore(str(tmp_path)), "a")
    assert not LocalStore(str(tmp_path)).list("a")


def test_a_file_that_is_swapped_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    monkeypatch.setattr(folders, "stat_file", lambda *_: None)
    with pytest.raises(StoreError, match="is not a regular file"):
        LocalStore(str(tmp_path)).read("pipe")
    with pytest.raises(StoreError, match="symbolic links"):
        LocalStore(str(tmp_path)).read("link")


def test_deleting_a_local_folder_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"theirs")
    (tmp_path / "run" / "old" / "deep").mkdir(parents=True)
    for link, target in (("old/link", "outside"), ("old/deep/link", "outside/a")):
        (tmp_path / "run" / link).symlink_to(tmp_path / target)
    os.mkfifo(tmp_path / "run" / "old" / "pipe")
    LocalStore(str(tmp_path / "run")).delete_folder("old")
    assert os.listdir(tmp_path / "run") == []
    assert (tmp_path / "outside" / "a").read_bytes() == b"theirs"


def test_a_failed_local_write_raises_a_store_error_and_leaves_nothing(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limit[1]))
    try:
        with pytest.raises(StoreError, match=r"can't write a/b in .*File too large"):
            StoreTests._create_in_pieces(LocalStore(str(tmp_path)), "a/b", [b"x" * 5000] * 400)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir(tmp_path / "a") == []

"""A file system without hard links: create-once uses an exclusive rename, or is refused if there is none."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreDenied
from holdfast.journal import Journal
from holdfast.keeping.verification import verify_run
from holdfast.store import Store, naming, open_store
from holdfast.store.local import LocalStore
from holdfast.testing.stores import StoreTests
from tests.conftest import COMMAND_WITHIN_S, ROOT
from tests.support import writer

VFAT_MB = 400
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="strace makes system calls fail")


@pytest.fixture
def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make link(2) fail as it does on vfat."""

    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("without_links")
class TestWithoutLinks(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(str(tmp_path / "store"))

    def test_nothing_is_copied_by_a_link(self, store: Store) -> None:
        store.create("a", b"x")
        assert not store.copy("a", "b")


@pytest.fixture(scope="session")
def vfat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Mount a vfat file system, which has an exclusive rename and no hard links."""
    folder = tmp_path_factory.mktemp("vfat")
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    if os.geteuid() or not shutil.which("mkfs.vfat"):
        pytest.skip("mounting a file system needs root and mkfs.vfat")
    with image.open("wb") as file:
        file.truncate(VFAT_MB * 2**20)
    subprocess.run(["mkfs.vfat", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, mounted], check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no vfat")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


class TestVfat(StoreTests):
    @pytest.fixture
    def store(self, vfat: Path, tmp_path: Path) -> Store:
        return open_store(str(vfat / tmp_path.name))


def test_a_run_on_vfat(vfat: Path) -> None:
    assert writer.main(str(vfat / "store"), 3) == 0
    assert verify_run(Journal(LocalStore(str(vfat / "store")), "run"), deep=True).ok


def run_writer(store: Path, *faults: str) -> "subprocess.CompletedProcess[str]":
    """Write a run of three commits in a process whose system calls fail as the faults say."""
    options = [option for fault in faults for option in ("--inject", fault)]
    command = ["strace", "--follow-forks", "--output", os.devnull, "--trace", "linkat,renameat2", *options]
    return subprocess.run(
        [*command, sys.executable, "-m", "tests.support.writer", str(store), "3"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S,
    )  # fmt: skip


@needs_strace
@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP", "ENOSYS"])
def test_a_whole_run_without_links(tmp_path: Path, error: str) -> None:
    done = run_writer(tmp_path / "store", f"linkat:error={error}")
    assert done.returncode == 0, done.stderr
    report = verify_run(Journal(LocalStore(str(tmp_path / "store")), "run"), deep=True)
    assert (report.problems, report.notes) == ([], [])


@needs_strace
@pytest.mark.parametrize("error", ["EINVAL", "ENOSYS"])
def test_a_file_system_without_create_once_is_refused(tmp_path: Path, error: str) -> None:
    done = run_writer(tmp_path / "store", "linkat:error=EPERM", f"renameat2:error={error}")
    assert done.returncode == 3
    assert done.stderr.startswith(f"StoreDenied: can't write run.json in {tmp_path}/store/run: its file system has")
    assert "neither hard links nor a rename that refuses to replace a file" in done.stderr
    assert [path.name for path in (tmp_path / "store").rglob("*")] == ["run"]


@pytest.mark.usefixtures("without_links")
def test_the_refusal_says_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renameat2(*_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(naming, "_renameat2", renameat2)
    with pytest.raises(StoreDenied) as caught:
        LocalStore(str(tmp_path)).create("a", b"")
    assert "give a folder on ext4, xfs, tmpfs, NFS or vfat, or a bucket" in caught.value.hint


@pytest.mark.usefixtures("without_links")
def test_a_rename_whose_response_was_lost_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = naming._renameat2

    def renamed_twice(folder: int, old: str, new: str) -> None:
        rename(folder, old, new)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)

    monkeypatch.setattr(naming, "_renameat2", renamed_twice)
    store = LocalStore(str(tmp_path))
    store.create("a", b"mine")
    assert store.read("a") == b"mine"

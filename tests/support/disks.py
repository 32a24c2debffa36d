"""Small disks, which root alone can mount."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size_kb: int) -> Iterator[Path]:
    """Mount a disk of a size at a new folder for the block; skip the test if that isn't allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    """Let a mounted disk refuse writes, even root's."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)

"""The texts that recipes learn from: the standard library's own sources, or files at any URL."""

import hashlib
import sysconfig
from pathlib import Path

import fsspec

from holdfast.errors import RecipeError

STANDARD_LIBRARY = "stdlib"
# The protocols that a data setting may name. Others of fsspec, such as reference, execute templates or programs.
PROTOCOLS = ("file", "local", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https", "memory")


def read_files(data: str) -> list[tuple[str, bytes]]:
    """Return path and content of all files that an fsspec URL or glob matches, in the order of their paths.

    Raises:
        RecipeError: the protocol isn't in `PROTOCOLS`, no file matches, or a file can't be read.
    """
    protocol, separator, _ = data.partition("://")
    if "::" in data or (separator and protocol not in PROTOCOLS):
        what = "data can't be several URLs joined by ::" if "::" in data else f"{protocol}:// is refused"
        raise RecipeError(f"settings.data = {data!r}: {what}", hint=f"a path, or a URL of {', '.join(PROTOCOLS)}")
    try:
        files = sorted(fsspec.open_files(data, "rb"), key=lambda file: str(file.path))
        found = [(str(file.path), file.fs.cat_file(file.path)) for file in files]
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(f"settings.data = {data!r} can't be read: {error}") from error
    if not found:
        raise RecipeError(
            f"settings.data = {data!r}: no file has this path, or matches this pattern",
            hint="a path, or a glob such as texts/*.txt",
        )
    return found


def find_standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def list_standard_library() -> list[str]:
    """Return the source files of this Python's standard library, without its tests, relative to its folder.

    They are ordered by the hash of their names, so that any part of the list contains files of many modules.
    """
    root = find_standard_library()
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    return sorted(
        (
            path.relative_to(root).as_posix()
            for path in root.rglob("*.py")
            if not skipped & set(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
        ),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )

"""The record of the files that a process reads while it builds a recipe, with hashes of the files' contents.

Python raises an audit event for every file that it opens, also for NumPy and torch. The record doesn't include files
that a library opens in C (h5py, pyarrow, SQLite), or files that are read later, during training.
"""

import contextlib
import hashlib
import os
import stat
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.provenance.ownership import is_claimed, is_own_file

WHOLE_BYTES = 64 * 2**20
TOTAL_BYTES = 256 * 2**20
# Of a large file, SAMPLES pieces of this size are hashed, evenly spaced from the first bytes to the last. A file is
# large if it has more bytes than all these pieces.
SAMPLE_BYTES = 2**20
SAMPLES = 16
# If more files than this number were read in a folder, the record has a single entry for all of these files.
LISTED_FILES = 16

# Folders that are left out because every query of the installed packages reads them. `holdfast.provenance.packages`
# records their contents.
RECORDS = (".dist-info", ".egg-info")
COMPILED = (".pyc", ".pyo", ".so", ".pyd", ".pth")
SYSTEM = (
    "/proc", "/sys", "/dev", "/etc", "/lib", "/lib64", "/bin", "/sbin", "/run", "/boot",
    "/usr/lib", "/usr/share", "/usr/bin", "/usr/local/lib", "/usr/local/share",
)  # fmt: skip

# A folder of SYSTEM in which users keep data, too.
MEMORY = "/dev/shm/"

Entry = dict[str, Any]


class Opened:
    """The files that were opened during a `record_opened_files` block.

    Attributes:
        read, written: the absolute paths of the files that were opened for reading and for writing.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()

    def note(self, path: object, mode: object, flags: object) -> None:
        """Record the file that an audit event ``open`` names."""
        if not isinstance(path, str | bytes | os.PathLike):
            return  # the argument is a file descriptor, not a path
        writes = bool(isinstance(mode, str) and set(mode) & set("wax+"))
        if mode is None and isinstance(flags, int):  # the event comes from os.open, without a mode
            writes = flags & os.O_ACCMODE != os.O_RDONLY
        (self.written if writes else self.read).add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100


_watching: list[Opened] = []
_is_hooked = False


@contextlib.contextmanager
def record_opened_files() -> Iterator[Opened]:
    """Record the files that all threads of this process open during the block."""
    global _is_hooked
    if not _is_hooked:  # an audit hook can't be removed; outside of a block it takes 0.1 microseconds for each event
        sys.addaudithook(_record_event)
        _is_hooked = True
    opened = Opened()
    _watching.append(opened)
    try:
        yield opened
    finally:
        _watching.remove(opened)


def _record_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open":
        for opened in _watching:
            opened.note(*arguments)


# ---- describing


def describe_files(opened: Opened, own: Collection[str], home: Path, ours: Iterable[str]) -> dict[str, Entry]:
    """Return size and hashes of the data files that were read, by names that don't depend on the checkout's path.

    Args:
        own: the files of modules. They are left out, because the user's modules are recorded as code.
        home: the folder of the recipe's module, to which names are relative.
        ours: the folders into which Holdfast writes. Files in them are left out.
    """
    folders = [os.path.abspath(folder) for folder in ours]  # noqa: PTH100
    bases = (home, Path.cwd())
    system, left_out = (tuple(f"{folder}{os.sep}" for folder in each) for each in (SYSTEM, folders))
    read = sorted(opened.read - opened.written - {*own})
    others = [path for path in read if path.startswith(MEMORY) or not path.startswith(system)]
    claimed = filter(is_claimed, read)
    own_files = (path for path in others if not path.startswith(left_out) and is_own_file(path))
    found = [Path(path) for path in sorted({*claimed, *own_files})]
    names = _name([path for path in found if _is_data(path, bases)], bases)
    left = TOTAL_BYTES
    entries: dict[str, Entry] = {}
    for path in sorted(names, key=names.__getitem__):
        with contextlib.suppress(OSError):
            entry = describe_file(path, min(left, WHOLE_BYTES))
            left -= entry["size_bytes"] if "sha256" in entry else 0
            entries[names[path]] = entry
    return _fold(entries)


def _is_data(path: Path, bases: Iterable[Path]) -> bool:
    inner = next((path.relative_to(base) for base in bases if path.is_relative_to(base)), path)
    # Skip hidden folders, because they contain caches and other tools' settings, which differ between machines.
    if path.suffix in COMPILED or any(part.startswith(".") or part.endswith(RECORDS) for part in inner.parts[:-1]):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _name(paths: list[Path], bases: Iterable[Path]) -> dict[Path, str]:
    """Return a name for each path: relative to the first base that contains the path, else its shortest unique end."""
    names: dict[Path, str] = {}
    for path in paths:
        base = next((each for each in bases if path.is_relative_to(each)), None)
        if base is not None:
            names[path] = path.relative_to(base).as_posix()
    others = [path for path in paths if path not in names]
    for path in others:
        tails = ([each.parts[-length:] for each in others] for length in range(1, len(path.parts) + 1))
        lengths = (length for length, tail in enumerate(tails, 1) if tail.count(path.parts[-length:]) == 1)
        names[path] = "/".join(path.parts[-next(lengths) :])
    return names


def describe_file(path: Path, whole_bytes: int = WHOLE_BYTES) -> Entry:
    """Return a file's size and its digests.

    A file of at most ``whole_bytes`` bytes has the SHA-256. A larger file has a digest of samples of its bytes. A file
    that is larger than the samples and at most ``whole_bytes`` has both.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        entry: Entry = {"size_bytes": size}
        if size <= whole_bytes:
            entry["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        if size > SAMPLE_BYTES * SAMPLES or "sha256" not in entry:
            sha256 = hashlib.sha256()
            for number in range(SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
                sha256.update(file.read(SAMPLE_BYTES))
            entry["sampled"] = sha256.hexdigest()
    return entry


def _fold(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in entries:
        by_folder[name.rpartition("/")[0]].append(name)
    folded: dict[str, Entry] = {}
    for folder, names in sorted(by_folder.items()):
        if len(names) <= LISTED_FILES:
            folded |= {name: entries[name] for name in names}
            continue
        lines = [f"{entries[name].get('sha256') or entries[name]['sampled']}  {name}\n" for name in names]
        folded[f"{folder}/*".lstrip("/")] = {
            "size_bytes": sum(entries[name]["size_bytes"] for name in names),
            "files": len(names),
            "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
        }
    return folded


def is_same_file(saved: Entry, current: Entry) -> bool:
    """Return whether two entries have equal sizes and digests: the SHA-256 if both have it, else that of the samples.

    If the entries have no digest of the same kind, only their sizes are compared.
    """
    if saved["size_bytes"] != current["size_bytes"]:
        return False
    common = next((name for name in ("sha256", "sampled") if name in saved and name in current), None)
    return common is None or saved[common] == current[common]

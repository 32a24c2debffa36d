"""The versions of the installed packages that a recipe's code imports, and of Holdfast itself."""

import functools
import hashlib
import sys
from collections.abc import Collection, Iterable
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, version
from pathlib import Path

import holdfast
from holdfast.imports import find_file, list_imports
from holdfast.ownership import ENGINE, SITE_FOLDERS

# The environment records these packages' versions, and the contract compares them.
JUDGED_ELSEWHERE = {"torch", "numpy", "accelerate", "torchdata", "holdfast"}


def describe_holdfast() -> str:
    """Return Holdfast's version with a digest of its code, since a checkout's code changes without its version."""
    sha256 = hashlib.sha256()
    for path in sorted(Path(ENGINE).rglob("*.py")):
        sha256.update(path.relative_to(ENGINE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{holdfast.__version__} ({sha256.hexdigest()[:12]})"


def find_packages(modules: Collection[str]) -> dict[str, str]:
    """Return name and version of each loaded, installed package that these modules import."""
    imported = {name for module in modules for name in list_imports(module)} - {*modules}
    owners = (find_owner(find_file(name)) for name in imported if sys.modules.get(name) is not None)
    found = {owner.name: owner.version for owner in owners if owner is not None}
    return {name: found[name] for name in sorted(found) if name.lower() not in JUDGED_ELSEWHERE}


def find_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the named packages, loaded or not. Packages that aren't installed are left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def find_owner(file: str) -> Distribution | None:
    """Return the installed package that a file belongs to; None if no package's RECORD names the file."""
    path = Path(file)
    sites = [parent for parent in path.parents if parent.name in SITE_FOLDERS]
    for folder in sites or [Path(each) for each in sys.path if path.is_relative_to(each)]:
        inner = path.relative_to(folder)
        # Most packages have their module's name. Reading their RECORD first saves reading the others.
        records = sorted(_list_records(folder), key=lambda record: not _is_named(record, inner.parts[0]))
        line = f"{inner.as_posix()},"
        if owner := next((record.parent for record in records if line in _read(record)), None):
            return PathDistribution(owner)
    return None


def _is_named(record: Path, module: str) -> bool:
    return record.parent.name.partition("-")[0].lower() == module.partition(".")[0].lower()


@functools.cache
def _list_records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.dist-info/RECORD"))


@functools.cache
def _read(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")

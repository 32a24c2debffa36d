"""The versions and files of the installed packages that a recipe's code imports, and of Holdfast itself."""

import base64
import csv
import functools
import hashlib
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution, version
from pathlib import Path
from typing import Any

from holdfast.provenance.imports import find_file, list_imports
from holdfast.provenance.ownership import ENGINE, SITE_FOLDERS
from holdfast.terminal.distribution import OWN_NAMES

# The record of the environment has these packages' versions. The contract of bit-exactness compares them at a resume.
JUDGED_ELSEWHERE = {"torch", "numpy", "accelerate", "torchdata", *OWN_NAMES}


def describe_holdfast(version: str) -> str:
    """Return Holdfast's version and a digest of its code, because a checkout's code may change without its version."""
    sha256 = hashlib.sha256()
    for path in sorted(Path(ENGINE).rglob("*.py")):
        sha256.update(path.relative_to(ENGINE).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{version} ({sha256.hexdigest()[:12]})"


def find_packages(modules: Collection[str]) -> dict[str, str]:
    """Return the versions, by name, of the installed packages that these modules import and that are loaded."""
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


def find_contents(names: Iterable[str], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a digest of each package's RECORD, and of each package file that was edited after the installation.

    If files of a package are loaded, these files are read. If none is loaded, the files that aren't older than the
    RECORD are read, because an older file was not edited. Packages whose RECORD has no hashes are left out.

    Args:
        recorded: an earlier result. The edited files in it are read again, even if they aren't loaded.
    """
    loaded = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    found: dict[str, Any] = {}
    for name in names:
        base, hashes, installed_s = _read_hashes(name)
        files = {inner: f"{base}{os.sep}{inner}" for inner in sorted(hashes)}
        read = {inner for inner, file in files.items() if file in loaded}
        read = read or {inner for inner, file in files.items() if _read_time(file) >= installed_s}
        read |= files.keys() & recorded.get(name, {}).get("edited", {})
        now = {inner: _hash_file(files[inner]) for inner in sorted(read)}
        edited = {inner: sha256[:16] for inner, sha256 in now.items() if sha256 != hashes[inner]}
        if hashes:
            record = hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:16]
            found[name] = {"record": record, **({"edited": edited} if edited else {})}
    return found


@functools.cache
def _read_hashes(name: str) -> tuple[str, dict[str, str], float]:
    """Return a package's folder, the SHA-256 of each file in its RECORD, and when the RECORD was written.

    Scripts and the package's metadata are left out, because they differ with the interpreter and the installer.
    """
    try:
        owner = distribution(name)
    except PackageNotFoundError:
        return "", {}, 0.0
    rows = csv.reader((owner.read_text("RECORD") or "").splitlines())
    hashes = {row[0]: row[1].removeprefix("sha256=") for row in rows if len(row) == 3 and row[1].startswith("sha256=")}
    own = {inner: each for inner, each in hashes.items() if ".dist-info/" not in inner and not inner.startswith("..")}
    # Don't use `Distribution.files`, which would parse the whole RECORD again to find its path.
    installed_s = _read_time(f"{getattr(owner, '_path', '')}{os.sep}RECORD")
    return str(owner.locate_file("")).rstrip(os.sep), own, installed_s


def _read_time(file: str) -> float:
    try:
        return Path(file).stat().st_mtime
    except OSError:
        return 0.0


def _hash_file(file: str) -> str:
    try:
        status = Path(file).stat()
        return _hash_version(file, status.st_mtime_ns, status.st_size)
    except OSError:
        return "gone"


@functools.cache
def _hash_version(file: str, changed_ns: int, size: int) -> str:
    digest = hashlib.sha256(Path(file).read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def find_owner(file: str) -> Distribution | None:
    """Return the installed package to which a file belongs; None if no package's RECORD names the file."""
    path = Path(file)
    sites = [parent for parent in path.parents if parent.name in SITE_FOLDERS]
    for folder in sites or [Path(each) for each in sys.path if path.is_relative_to(each)]:
        inner = path.relative_to(folder)
        # Most packages have the same name as their module. So read the RECORD of the package with the module's name
        # first.
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

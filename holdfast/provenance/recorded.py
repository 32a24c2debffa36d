"""The comparison of the code, files, packages and built values of this process with a checkpoint's record.

A built value is a value of an object that the recipe has built. Records that an older checkpoint lacks aren't compared.
The functions depend only on their arguments.
"""

import math
from collections.abc import Mapping
from typing import Any

from holdfast.machine.contract import PARTS, list_changed
from holdfast.provenance.changes import Change, is_same
from holdfast.provenance.fingerprint import ABSENT, VARIABLES
from holdfast.provenance.opened_files import is_same_file

# If one of these versions differs, the built values of the same object may have other names.
VERSIONS = ("python", "torch", "numpy", "accelerate", "torchdata", "holdfast")


def compare_records(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Return the changes of code, files, packages and built values between two environments.

    Args:
        saved: a checkpoint's ``environment``.
        current: the current environment, in the same form.
    """
    packages = [
        Change(name=f"packages.{name}", kind="package", saved=was, current=now or ABSENT)
        for name, was, now in list_changed(saved, {"packages": {}, **current})
    ]
    is_upgraded = bool(packages) or any(_version(saved, name) != _version(current, name) for name in VERSIONS)
    changes = []
    if saved.get("sources"):
        changes += compare_sources(saved["sources"], current.get("sources") or {})
    if "files" in saved:
        changes += compare_files(saved["files"], current.get("files") or {})
    if "holdfast" in saved and saved["holdfast"] != current.get("holdfast"):
        now = current.get("holdfast", ABSENT)
        changes.append(Change(name="holdfast", kind="package", saved=saved["holdfast"], current=now))
    changes += packages
    if saved.get("built"):  # built values come last, because there may be many
        changes += compare_built(saved["built"], current.get("built") or {}, is_upgraded=is_upgraded)
    return changes


def _version(environment: Mapping[str, Any], name: str) -> Any:
    value = environment.get(name)
    return PARTS["major.minor"](value) if name == "python" and isinstance(value, str) else value


def compare_sources(saved: Mapping[str, str], current: Mapping[str, str]) -> list[Change]:
    """Return the changes of modules, as ``sources.<module>``: changed code, and new or missing modules."""
    return [
        Change(
            name=f"sources.{module}",
            kind="source",
            saved=saved.get(module, ABSENT),
            current=current.get(module, ABSENT),
        )
        for module in sorted(saved.keys() | current.keys())
        if saved.get(module) != current.get(module)
    ]


def compare_files(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """Return the changes of files, as ``files.<path>``: changed files, and files that only one of the records has."""
    return [
        Change(name=f"files.{name}", kind="file", saved=saved.get(name, ABSENT), current=current.get(name, ABSENT))
        for name in sorted(saved.keys() | current.keys())
        if name not in saved or name not in current or not is_same_file(saved[name], current[name])
    ]


def compare_built(saved: Mapping[str, Any], current: Mapping[str, Any], *, is_upgraded: bool) -> list[Change]:
    """Return the changes of built values, as ``built.<name>``.

    Args:
        is_upgraded: whether versions differ. If they do, a name that only one record has doesn't count as a
            change: a different version of a library or of Holdfast may name the values of an object differently.

    A variable of a loop that only one record has never counts as a change, because older records have no variables.
    """
    return [
        Change(name=f"built.{name}", kind="built", saved=saved.get(name, ABSENT), current=current.get(name, ABSENT))
        for name in sorted(saved.keys() | current.keys())
        if not ((is_upgraded or name.startswith(VARIABLES)) and (name not in saved or name not in current))
        and not _is_close(saved.get(name, ABSENT), current.get(name, ABSENT))
    ]


def _is_close(saved: Any, current: Any) -> bool:
    """Return whether values are equal, or are floats that differ only in the last bits, as cos does across machines."""
    if isinstance(saved, float) and isinstance(current, float):
        return math.isclose(saved, current, rel_tol=1e-12)
    return is_same(saved, current)

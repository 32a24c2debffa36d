"""The comparison of a run's settings, code and files with saved ones: each difference is a `Change` with a class.

The functions depend only on their arguments: identities, which `holdfast.provenance.fingerprint` hashes, and records of
code, hyperparameters, files and packages. They return changes, and `holdfast.provenance.drift` decides which changes
are allowed.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from holdfast.config import RunConfig, Section
from holdfast.config.fields import FieldClass, list_classes
from holdfast.provenance.fingerprint import ABSENT, SHOWN_HASH_CHARS, canonical_json, to_plain

Kind = Literal["value", "added", "removed", "renamed", "source", "built", "file", "package"]

FIELD_CLASSES = dict(list_classes(RunConfig))

# The prefix of a change's name, for each kind of change except changes of settings.
PREFIXES: dict[Kind, str] = {"source": "sources.", "built": "built.", "file": "files.", "package": "packages."}
# The class of each kind of change, except changes of settings, whose class is the field's (see `classify`).
CLASSES: dict[Kind, str] = {"source": "code", "built": "built", "file": "data", "package": "package"}


def classify(name: str) -> FieldClass:
    """Return the class of a configuration's field by the field's dotted name; ``operational`` for an unknown field."""
    return next((FIELD_CLASSES[table] for table in list_tables(name) if table in FIELD_CLASSES), "operational")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference between a saved record and the current one.

    Attributes:
        name: the dotted name; the new name of a renamed field.
        saved, current: the two values as plain JSON; "(absent)" for a missing value.
        was: the old name of a renamed field.
        is_default: whether an added field has its default value.
    """

    name: str
    kind: Kind
    saved: Any = ABSENT
    current: Any = ABSENT
    was: str = ""
    is_default: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self._what()}"

    def _what(self) -> str:
        if self.kind == "value":
            return f"saved {format_value(self.saved)}, now {format_value(self.current)}"
        if self.kind == "added":
            return f"new, {'with its default' if self.is_default else 'and set to'} {format_value(self.current)}"
        if self.kind == "removed":
            return f"no longer a setting; saved {format_value(self.saved)}"
        if self.kind == "renamed":
            return f"was {self.was}, same value {format_value(self.current)}"
        if self.kind in ("built", "package"):
            return f"saved {format_value(self.saved)}, now {format_value(self.current)}"
        among = "sources" if self.kind == "source" else "files that are read"
        if ABSENT in (self.saved, self.current):
            return f"new among the {among}" if self.saved == ABSENT else f"no longer among the {among}"
        return "its code has changed" if self.kind == "source" else "its content has changed"


def format_value(value: Any) -> str:
    """Return a value of a change as a readable text. Shorten a hash; write NaN and large numbers as plain numbers."""
    if isinstance(value, dict) and not _is_table(value):
        return str(*value.values())
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:SHOWN_HASH_CHARS]
    return repr(value)


# ---- comparing


def find_defaults(section: type[Section] = RunConfig, table: str = "") -> dict[str, Any]:
    """Return the default of each field of the configuration that has a default, by dotted name.

    Defaults in ``settings`` are not included, because only the recipe knows them.
    """
    defaults: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if not field.is_required() and not isinstance(default, Section):
            defaults[f"{table}{key}"] = default
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                defaults |= find_defaults(kind, f"{table}{key}.")
    return defaults


def compare_identities(
    saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[Change]:
    """Return the changes between two identities, sorted by name; no changes if and only if the fingerprints are equal.

    A removed and an added field count as one renamed field if they are in the same table and have equal values. If
    there are several such fields, those with the most similar names are paired.

    Args:
        saved: the saved identity, perhaps read from JSON.
        defaults: the defaults of the current fields by dotted name: the result of `find_defaults`, and
            ``settings.<name>`` for the recipe's.
    """
    changes = list(_walk(to_plain(saved), to_plain(current), "", defaults))
    return sorted(_join_renamed(changes), key=lambda change: change.name)


def _walk(saved: dict[str, Any], current: dict[str, Any], table: str, defaults: Mapping[str, Any]) -> Iterator[Change]:
    for key in saved.keys() | current.keys():
        name = f"{table}.{key}" if table else key
        if key not in saved:
            yield from _walk_added(name, current[key], defaults)
        elif key not in current:
            yield Change(name=name, kind="removed", saved=saved[key])
        elif _is_table(saved[key]) and _is_table(current[key]):
            yield from _walk(saved[key], current[key], name, defaults)
        elif not is_same(saved[key], current[key]):
            yield Change(name=name, kind="value", saved=saved[key], current=current[key])


def _walk_added(name: str, value: Any, defaults: Mapping[str, Any]) -> Iterator[Change]:
    # List the fields of a new table one by one. But if the value of a single field is a table, compare the whole value
    # with the field's default.
    if _is_table(value) and any(field.startswith(f"{name}.") for field in defaults):
        for key, inner in value.items():
            yield from _walk_added(f"{name}.{key}", inner, defaults)
        return
    is_default = name in defaults and is_same(value, defaults[name])
    yield Change(name=name, kind="added", current=value, is_default=is_default)


def _join_renamed(changes: Sequence[Change]) -> list[Change]:
    removed = [change for change in changes if change.kind == "removed"]
    added = [change for change in changes if change.kind == "added"]
    renamed = []
    for old in removed:
        new = _closest(old, [each for each in added if _fits(old, each)])
        if new is not None and _closest(new, [each for each in removed if _fits(each, new)]) is old:
            renamed.append(Change(name=new.name, kind="renamed", saved=old.saved, current=new.current, was=old.name))
    joined = {name for change in renamed for name in (change.name, change.was)}
    return [change for change in changes if change.name not in joined] + renamed


def _fits(old: Change, new: Change) -> bool:
    return old.name.rpartition(".")[0] == new.name.rpartition(".")[0] and is_same(old.saved, new.current)


def _closest(change: Change, others: Sequence[Change]) -> Change | None:
    if len(others) < 2:
        return next(iter(others), None)
    by_key = {other.name.rpartition(".")[2]: other for other in others}
    near = difflib.get_close_matches(change.name.rpartition(".")[2], sorted(by_key), n=1)
    return by_key[near[0]] if near else None


def is_same(a: Any, b: Any) -> bool:
    return canonical_json([a]) == canonical_json([b])  # 1 equals 1.0 and differs from true, as in the fingerprint


def _is_table(value: Any) -> bool:
    """Return whether a value is a table of fields. A number in a notation of `canonical` is not a table."""
    return isinstance(value, dict) and value.keys() not in ({"$int"}, {"$float"})


def list_tables(name: str) -> list[str]:
    """Return the names of the tables around a dotted name, and the name: ``a``, ``a.b``, ``a.b.c`` for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


# ---- recording changes in commits


def to_lineage(changes: Iterable[Change]) -> dict[str, Any]:
    """Return the changes as a JSON object with the changes' names as keys. `from_lineage` reads it."""
    return {
        change.name: {
            "kind": change.kind,
            "saved": change.saved,
            "now": change.current,
            "was": change.was,
            "default": change.is_default,
        }
        for change in changes
    }


def from_lineage(record: Mapping[str, Mapping[str, Any]]) -> list[Change]:
    """Return the changes that `to_lineage` wrote."""
    return [
        Change(
            name=name,
            kind=entry["kind"],
            saved=entry["saved"],
            current=entry["now"],
            was=entry["was"],
            is_default=entry["default"],
        )
        for name, entry in record.items()
    ]

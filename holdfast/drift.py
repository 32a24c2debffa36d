"""What differs between what a run was trained with and what it is to go on with, and what of that is let through.

Pure: identities, as `holdfast.fingerprint` hashes them, and hashes of sources go in; a list of changes comes out.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from holdfast.config import RunConfig, Section
from holdfast.errors import ConfigDrift
from holdfast.fingerprint import ABSENT, SHOWN_HASH_CHARS, canonical_json, to_plain

FieldClass = Literal["identity", "schedule", "operational"]
Kind = Literal["value", "added", "removed", "renamed", "source"]

# Identity changes the mathematics, schedule says how long to train, operational is all else. A table whose fields
# differ is listed field by field.
FIELD_CLASSES: dict[str, FieldClass] = {
    "recipe": "identity",
    "seed": "identity",
    "determinism": "identity",
    "compute.ranks": "identity",
    "compute.mixed_precision": "identity",
    "settings": "identity",
    "init_from": "identity",
    "epochs": "schedule",
    "run": "operational",
    "store": "operational",
    "where": "operational",
    "chunk": "operational",
    "checkpoint": "operational",
    "retention": "operational",
    "compute.device": "operational",
    "compute.loader_workers": "operational",
    "resume": "operational",
    "preemption": "operational",
    "supervision": "operational",
    "parity": "operational",
    "log": "operational",
    "signing_key": "operational",
}

GROUPS: dict[Kind, str] = {
    "value": "changed values",
    "added": "changed schema",
    "removed": "changed schema",
    "renamed": "changed schema",
    "source": "changed code",
}


def classify(name: str) -> FieldClass:
    """The class of a configuration's field, by its dotted name; one that this version doesn't know is operational."""
    return next((FIELD_CLASSES[table] for table in _tables(name) if table in FIELD_CLASSES), "operational")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        name: dotted; of a renamed field the new name.
        saved, current: as plain JSON; "(absent)" where there is none.
        was: the old name of a renamed field.
        is_default: whether an added field has its default.
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
            return f"saved {show(self.saved)}, now {show(self.current)}"
        if self.kind == "added":
            return f"new, {'with its default' if self.is_default else 'and set to'} {show(self.current)}"
        if self.kind == "removed":
            return f"no longer a setting; saved {show(self.saved)}"
        if self.kind == "renamed":
            return f"was {self.was}, same value {show(self.current)}"
        if ABSENT in (self.saved, self.current):
            return "not among the sources before" if self.saved == ABSENT else "no longer among the sources"
        return "its code has changed"


def show(value: Any) -> str:
    """A value of a change, for a person: a hash is cut, and a number that JSON lacks reads as one."""
    if isinstance(value, dict) and not _is_table(value):
        return str(*value.values())
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:SHOWN_HASH_CHARS]
    return repr(value)


# ---- what differs


def find_defaults(section: type[Section] = RunConfig, table: str = "") -> dict[str, Any]:
    """The default of every field of the configuration that has one, by dotted name; of settings the recipe knows it."""
    defaults: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if not field.is_required() and not isinstance(default, Section):
            defaults[f"{table}{key}"] = default
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                defaults |= find_defaults(kind, f"{table}{key}.")
    return defaults


def compare(saved: Mapping[str, Any], current: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Change]:
    """How two identities differ, by name; equal fingerprints have no changes, and different ones have some.

    A field that one of them lacks, and another of the same table with an equal value that the other lacks, were
    renamed; where several would fit, those with the most similar names.

    Args:
        saved: may have been read back from JSON.
        defaults: of the fields that are known today, by dotted name: `find_defaults`, and ``settings.<name>``.
    """
    changes = list(_walk(to_plain(saved), to_plain(current), "", defaults))
    return sorted(_join_renamed(changes), key=lambda change: change.name)


def compare_sources(saved: Mapping[str, str], current: Mapping[str, str]) -> list[Change]:
    """The modules whose code changed, and those that are new or gone, as ``sources.<module>``."""
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


def _walk(saved: dict[str, Any], current: dict[str, Any], table: str, defaults: Mapping[str, Any]) -> Iterator[Change]:
    for key in saved.keys() | current.keys():
        name = f"{table}.{key}" if table else key
        if key not in saved:
            yield from _walk_added(name, current[key], defaults)
        elif key not in current:
            yield Change(name=name, kind="removed", saved=saved[key])
        elif _is_table(saved[key]) and _is_table(current[key]):
            yield from _walk(saved[key], current[key], name, defaults)
        elif not _is_same(saved[key], current[key]):
            yield Change(name=name, kind="value", saved=saved[key], current=current[key])


def _walk_added(name: str, value: Any, defaults: Mapping[str, Any]) -> Iterator[Change]:
    # Defaults are of fields, not of tables; a field whose value is a table is compared with its default as a whole.
    if _is_table(value) and any(field.startswith(f"{name}.") for field in defaults):
        for key, inner in value.items():
            yield from _walk_added(f"{name}.{key}", inner, defaults)
        return
    is_default = name in defaults and _is_same(value, defaults[name])
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
    return old.name.rpartition(".")[0] == new.name.rpartition(".")[0] and _is_same(old.saved, new.current)


def _closest(change: Change, others: Sequence[Change]) -> Change | None:
    if len(others) < 2:
        return next(iter(others), None)
    by_key = {other.name.rpartition(".")[2]: other for other in others}
    near = difflib.get_close_matches(change.name.rpartition(".")[2], sorted(by_key), n=1)
    return by_key[near[0]] if near else None


def _is_same(a: Any, b: Any) -> bool:
    return canonical_json([a]) == canonical_json([b])  # as the fingerprint sees them: 1 is 1.0, and not true


def _is_table(value: Any) -> bool:
    """Whether it is a table of fields, and not a number that JSON lacks; see `to_plain`."""
    return isinstance(value, dict) and value.keys() not in ({"$int"}, {"$float"})


def _tables(name: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c``"""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


# ---- what is let through


def is_harmless(change: Change) -> bool:
    """Whether it is a new field with its default, as an upgrade of the recipe or of Holdfast brings: never refused."""
    return change.kind == "added" and change.is_default


def is_accepted(change: Change, accept: Sequence[str]) -> bool:
    """Whether the change is named: by its name, by a table that it is in, or by the last part of its name.

    A renamed field may be named by either name. Of a module's name the last part is not enough, since settings have
    such names too: ``model`` doesn't accept ``sources.my_package.model``, ``my_package.model`` does.
    """
    own = [name for name in (change.name, change.was) if name]
    last = "sources." if change.kind == "source" else None
    short = [name.removeprefix(last) if last else name.rpartition(".")[2] for name in own]
    return not {*short, *(table for name in own for table in _tables(name))}.isdisjoint(accept)


def check_drift(
    changes: Sequence[Change], accept: Sequence[str], saved_fingerprint: str, current_fingerprint: str
) -> list[Change]:
    """The changes, all of which are let through; for the lineage.

    Args:
        changes: what `compare` and `compare_sources` found.
        accept: the names that the person has accepted; those that match nothing don't matter.
        saved_fingerprint: empty where none was saved. Where it is the current one, only sources can have changed.

    Raises:
        ConfigDrift: some are neither harmless nor accepted, and every one of these is named; or the fingerprints
            differ and no change of a setting says why.
    """
    is_same = saved_fingerprint in ("", current_fingerprint)
    changes = [change for change in changes if change.kind == "source" or not is_same]
    refused = [change for change in changes if not is_harmless(change) and not is_accepted(change, accept)]
    is_unexplained = not is_same and all(change.kind == "source" for change in changes)
    if not refused and not is_unexplained:
        return changes
    first = "the recipe's code is not what the run was trained with"
    if is_unexplained or any(change.kind != "source" for change in refused):
        saved, current = saved_fingerprint[:SHOWN_HASH_CHARS], current_fingerprint[:SHOWN_HASH_CHARS]
        first = f"settings differ: saved {saved}, now {current}"
    if is_unexplained:
        first += "; which they were is not on record"
    raise ConfigDrift(
        "\n".join([first, *_list_grouped(refused)]),
        hint=_hint(refused, changes, is_unexplained),
        saved=saved_fingerprint,
        current=current_fingerprint,
        fields={change.name: [change.saved, change.current] for change in refused},
    )


def _list_grouped(changes: Iterable[Change]) -> Iterator[str]:
    rows: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for change in changes:
        rows[GROUPS[change.kind]].append(f"  {change}")
    for title, lines in rows.items():
        if lines:
            yield from (f"{title}:", *lines)


def _hint(refused: Sequence[Change], changes: Sequence[Change], is_unexplained: bool) -> str:
    what = ["values"] if is_unexplained or any(change.kind == "value" for change in refused) else []
    what += ["code"] if any(change.kind != "value" for change in refused) else []
    put_back, go_apart = f"put the saved {' and '.join(what)} back", "train as a run of another name (--set run=...)"
    if is_unexplained:
        return f"{put_back}, or {go_apart}"
    # Those accepted before stay in the list, which the option replaces.
    names = json.dumps([change.name for change in changes if not is_harmless(change)])
    return f"{put_back}, let this through with --set 'resume.accept_drift={names}', or {go_apart}"


# ---- the lineage


def to_lineage(changes: Iterable[Change]) -> dict[str, Any]:
    """The changes as JSON, by name. `from_lineage` reads it."""
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
    """The changes that `to_lineage` wrote."""
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

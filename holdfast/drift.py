"""Compare what a run was trained with with what it is to go on with, and decide which changes are allowed.

Pure: identities, as `holdfast.fingerprint` hashes them, and records of code, hyperparameters, files and packages go in;
a list of changes comes out.
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
Kind = Literal["value", "added", "removed", "renamed", "source", "built", "file", "package"]

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
    "built": "changed hyperparameters",
    "file": "changed files",
    "package": "changed packages",
}

# These are no settings: what names them, and how a message calls them.
PREFIXES: dict[Kind, str] = {"source": "sources.", "built": "built.", "file": "files.", "package": "packages."}
CALLED: dict[Kind, str] = {"source": "code", "built": "values", "file": "files"}
SHOWN_CHANGES = 12


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
        if self.kind in ("built", "package"):
            return f"saved {show(self.saved)}, now {show(self.current)}"
        among = "sources" if self.kind == "source" else "files that are read"
        if ABSENT in (self.saved, self.current):
            return f"not among the {among} before" if self.saved == ABSENT else f"no longer among the {among}"
        return "its code has changed" if self.kind == "source" else "its content has changed"


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
    # Defaults are of fields, not of tables; a field whose value is a table is compared with its default as a whole.
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
    return canonical_json([a]) == canonical_json([b])  # as the fingerprint sees them: 1 is 1.0, and not true


def _is_table(value: Any) -> bool:
    """Whether it is a table of fields, and not a number that JSON lacks; see `canonical`."""
    return isinstance(value, dict) and value.keys() not in ({"$int"}, {"$float"})


def _tables(name: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c``"""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


# ---- what is let through


def is_harmless(change: Change) -> bool:
    """Return whether a change is never refused.

    Such are a new field with its default, as an upgrade brings it; a package's version, on which the promise depends
    and nothing else; a module or a file that is read only now; and a file that is no longer read.
    """
    if change.kind == "package":
        return True
    if change.kind == "file" and ABSENT in (change.saved, change.current):
        return True
    return (change.kind == "source" and change.saved == ABSENT) or (change.kind == "added" and change.is_default)


def is_accepted(change: Change, accept: Sequence[str]) -> bool:
    """Return whether the change is named: by its name, by a table that it is in, or by the last part of its name.

    A renamed field may be named by either name. Of a module, a file or a built value the last part is not enough, since
    settings have such names too: ``model`` doesn't accept ``sources.my_package.model``, ``my_package.model`` does.
    """
    own = [name for name in (change.name, change.was) if name]
    prefix = PREFIXES.get(change.kind)
    short = [name.removeprefix(prefix) if prefix else name.rpartition(".")[2] for name in own]
    return not {*short, *(table for name in own for table in _tables(name))}.isdisjoint(accept)


def find_refused(changes: Sequence[Change], accept: Sequence[str]) -> list[Change]:
    """Return the changes that stop a run.

    Values that are built otherwise follow from an accepted change of settings, code or files: they stop a run only
    where nothing else has changed.
    """
    others = [change for change in changes if change.kind != "built" and not is_harmless(change)]
    judged = others or changes
    return [change for change in judged if not is_harmless(change) and not is_accepted(change, accept)]


def check_drift(
    changes: Sequence[Change], accept: Sequence[str], saved_fingerprint: str, current_fingerprint: str
) -> list[Change]:
    """Return the changes, all of which are allowed, for the lineage.

    Args:
        changes: what `compare` and `holdfast.recorded` found.
        accept: the names that the person has accepted; those that match nothing don't matter.
        saved_fingerprint: empty where none was saved. Where it is the current one, no setting can have changed.

    Raises:
        ConfigDrift: some are neither harmless nor accepted, and every one of these is named; or the fingerprints
            differ and no change of a setting says why.
    """
    has_same_settings = saved_fingerprint in ("", current_fingerprint)
    changes = [change for change in changes if change.kind in PREFIXES or not has_same_settings]
    refused = find_refused(changes, accept)
    is_unexplained = not has_same_settings and all(change.kind in PREFIXES for change in changes)
    if not refused and not is_unexplained:
        return changes
    first = _head(refused)
    if is_unexplained or any(change.kind not in PREFIXES for change in refused):
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


def _head(refused: Sequence[Change]) -> str:
    """Return an error's first line, where no setting is refused."""
    kinds = {change.kind for change in refused}
    if kinds == {"built"}:
        return "the recipe builds other values than when it was saved, though no setting, code or file has changed"
    what = {"source": "the recipe's code is", "file": "the files that the recipe reads are"}
    return f"{what['source' if 'source' in kinds else 'file']} not what the run was trained with"


def _list_grouped(changes: Iterable[Change]) -> Iterator[str]:
    rows: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for change in changes:
        rows[GROUPS[change.kind]].append(f"  {change}")
    for title, lines in rows.items():
        if lines:
            more = len(lines) - SHOWN_CHANGES
            yield from (f"{title}:", *lines[:SHOWN_CHANGES], *([f"  and {more} more"] if more > 0 else []))


def _hint(refused: Sequence[Change], changes: Sequence[Change], is_unexplained: bool) -> str:
    kinds = dict.fromkeys(CALLED.get(change.kind, "values" if change.kind == "value" else "code") for change in refused)
    what = sorted({*kinds, *(["values"] if is_unexplained else [])}, key=["values", "code", "files"].index)
    put_back, go_apart = f"put the saved {' and '.join(what)} back", "train as a run of another name (--set run=...)"
    if {change.kind for change in refused} == {"built"}:
        put_back = "an environment variable? a file? " + put_back
    if is_unexplained:
        return f"{put_back}, or {go_apart}"
    # Those accepted before stay in the list, which the option replaces.
    is_built_only = all(change.kind == "built" for change in changes if not is_harmless(change))
    named = [change for change in changes if not is_harmless(change) and (is_built_only or change.kind != "built")]
    names = [change.name for change in named] if len(named) <= SHOWN_CHANGES else _shorten_names(named)
    return f"{put_back}, let this through with --set 'resume.accept_drift={json.dumps(names)}', or {go_apart}"


def _shorten_names(changes: Iterable[Change]) -> list[str]:
    """Return names that accept the changes, where there are many: of built values and files, and of code, the table."""
    return list(dict.fromkeys(PREFIXES.get(change.kind, change.name).removesuffix(".") for change in changes))


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

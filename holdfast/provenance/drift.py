"""The decision on drift: which changes a run may continue with, and the error that names the refused changes."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence

from holdfast.errors import ConfigDrift
from holdfast.provenance.changes import PREFIXES, Change, Kind, list_tables
from holdfast.provenance.fingerprint import ABSENT, SHOWN_HASH_CHARS

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

# The nouns by which a message names changes other than changes of settings.
CALLED: dict[Kind, str] = {"source": "code", "built": "values", "file": "files"}
SHOWN_CHANGES = 12
# If the name of a built value contains this, the value is the digest of a function's bytecode.
CODE = f".code.{sys.implementation.cache_tag}"


def is_harmless(change: Change) -> bool:
    """Return whether a change never stops a run.

    These changes are harmless: a new field with its default, which an upgrade has added; a package's version, and the
    number of ranks, which affect only the promise of equal bits; the steps to skip, which `check_skips` judges; a
    module or a file that was not used before; and a file that is no longer read.
    """
    if change.kind == "package" or is_of_ranks(change) or is_of_skips(change):
        return True
    if change.kind == "file" and ABSENT in (change.saved, change.current):
        return True
    return (change.kind == "source" and change.saved == ABSENT) or (change.kind == "added" and change.is_default)


def is_of_ranks(change: Change) -> bool:
    """Return whether a change is a different number of ranks, on which the run's bytes depend."""
    return change.kind == "value" and change.name == "compute.ranks"


def is_of_skips(change: Change) -> bool:
    """Return whether a change is a different list of steps to skip."""
    return change.name == "skip"


def is_accepted(change: Change, accept: Sequence[str]) -> bool:
    """Return whether ``accept`` contains a change's name, the name of a table around it, or the name's last part.

    A renamed field may be accepted by its old or new name. For a module, a file or a built value the last part is not
    enough, because a setting may have the same last part: ``my_package.model`` accepts ``sources.my_package.model``,
    but ``model`` doesn't.
    """
    own = [name for name in (change.name, change.was) if name]
    prefix = PREFIXES.get(change.kind)
    short = [name.removeprefix(prefix) if prefix else name.rpartition(".")[2] for name in own]
    return not {*short, *(table for name in own for table in list_tables(name))}.isdisjoint(accept)


def find_refused(changes: Sequence[Change], accept: Sequence[str]) -> list[Change]:
    """Return the changes that stop a run.

    A built value is a value of an object that the recipe built. Changed built values stop a run only if nothing else
    has changed. If settings, code or files have changed, these changes explain the changed built values, and only the
    changes of settings, code and files are judged.
    """
    others = [change for change in changes if change.kind != "built" and not is_harmless(change)]
    judged = others or changes
    return [change for change in judged if not is_harmless(change) and not is_accepted(change, accept)]


def check_drift(
    changes: Sequence[Change], accept: Sequence[str], saved_fingerprint: str, current_fingerprint: str
) -> list[Change]:
    """Return the changes, for the commits' records, if all of them are allowed; otherwise raise ConfigDrift.

    Args:
        changes: the changes from `compare_identities` and `holdfast.provenance.recorded`.
        accept: the names in ``resume.accept_drift``; names that match no change are ignored.
        saved_fingerprint: the commit's fingerprint; empty if it was lost. If it equals the current one, no setting can
            have changed.

    Raises:
        ConfigDrift: some changes are neither harmless nor accepted, and the error names them; or the fingerprints
            differ, although no changed setting was found.
    """
    has_same_settings = saved_fingerprint in ("", current_fingerprint)
    changes = [change for change in changes if change.kind in PREFIXES or not has_same_settings]
    refused = find_refused(changes, accept)
    is_unexplained = not has_same_settings and all(change.kind in PREFIXES for change in changes)
    if not refused and not is_unexplained:
        return changes
    first = _first_line(refused)
    if is_unexplained or any(change.kind not in PREFIXES for change in refused):
        saved, current = saved_fingerprint[:SHOWN_HASH_CHARS], current_fingerprint[:SHOWN_HASH_CHARS]
        first = f"settings differ: saved {saved}, now {current}"
    if is_unexplained:
        first += "; the differing settings are not on record"
    raise ConfigDrift(
        "\n".join([first, *_list_grouped(refused, _name_functions(changes))]),
        hint=_hint(refused, changes, is_unexplained),
        saved=saved_fingerprint,
        current=current_fingerprint,
        fields={change.name: [change.saved, change.current] for change in refused},
    )


def _first_line(refused: Sequence[Change]) -> str:
    """Return the first line of the error, for refused changes of code, files or built values."""
    kinds = {change.kind for change in refused}
    if kinds == {"built"}:
        return (
            "the recipe builds different values than at the save, though no identity setting, code or file has changed"
        )
    what = {"source": "the recipe's code is", "file": "the files that the recipe reads are"}
    return f"{what['source' if 'source' in kinds else 'file']} not what the run was trained with"


def _list_grouped(changes: Iterable[Change], functions: str) -> Iterator[str]:
    """Yield the lines that list changes in groups: each group's title, and then its changes.

    Args:
        functions: the names of the functions whose code has changed; empty if none is known.
    """
    rows: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for change in changes:
        rows[GROUPS[change.kind]].append(f"  {change}")
    for title, lines in rows.items():
        if lines:
            more = len(lines) - SHOWN_CHANGES
            yield from (f"{title}:", *lines[:SHOWN_CHANGES], *([f"  and {more} more"] if more > 0 else []))
        if functions and lines and title == GROUPS["source"]:
            yield f"  functions with different code: {functions}"


def _name_functions(changes: Sequence[Change]) -> str:
    """Return the names of the functions whose bytecode has changed, separated by commas.

    The built values have a digest of each of the user's functions that the recipe refers to, directly or through other
    functions. For example, ``built.loop.captured.learn.code.cpython-311`` is the digest of the function ``learn``.
    """
    found = [change.name.partition(CODE)[0] for change in changes if change.kind == "built" and CODE in change.name]
    names = sorted({name.rpartition(".")[2] for name in found})
    more = f" and {len(names) - SHOWN_CHANGES} more" if len(names) > SHOWN_CHANGES else ""
    return f"{', '.join(names[:SHOWN_CHANGES])}{more}"


def _hint(refused: Sequence[Change], changes: Sequence[Change], is_unexplained: bool) -> str:
    kinds = dict.fromkeys(CALLED.get(change.kind, "values" if change.kind == "value" else "code") for change in refused)
    what = sorted({*kinds, *(["values"] if is_unexplained else [])}, key=["values", "code", "files"].index)
    put_back, go_apart = f"put the saved {' and '.join(what)} back", "train as a run of another name (--set run=...)"
    if {change.kind for change in refused} == {"built"}:
        put_back = "look for a changed number of epochs, environment variable or file, " + put_back
    if is_unexplained:
        return f"{put_back}, or {go_apart}"
    # The option --set replaces the whole list. So the hint includes the changes that are already accepted.
    is_built_only = all(change.kind == "built" for change in changes if not is_harmless(change))
    named = [change for change in changes if not is_harmless(change) and (is_built_only or change.kind != "built")]
    names = [change.name for change in named] if len(named) <= SHOWN_CHANGES else _shorten_names(named)
    return f"{put_back}, accept this with --set 'resume.accept_drift={json.dumps(names)}', or {go_apart}"


def _shorten_names(changes: Iterable[Change]) -> list[str]:
    """Return a short list of names for ``accept_drift`` that accepts these changes: each setting's name, otherwise a
    prefix.

    A prefix, such as ``sources``, accepts all changes of a kind.
    """
    return list(dict.fromkeys(PREFIXES.get(change.kind, change.name).removesuffix(".") for change in changes))

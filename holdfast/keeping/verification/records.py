"""Checks of a run's records: no record is damaged or missing, and each commit links to the commit before it."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast import checkpoint
from holdfast.errors import HoldfastError, NameMissing, RecordDamaged, Unreadable
from holdfast.journal import (
    AttemptRecord,
    AuditRecord,
    Commit,
    ConfigRecord,
    EndingRecord,
    FileRecord,
    FolderRecord,
    IndexRecord,
    Journal,
    Latest,
    Pin,
    Pruned,
    PruneReport,
    Quarantine,
    Record,
    RehearsalRecord,
    folder_record_name,
    read_record,
    record_name,
    signature_name,
)
from holdfast.journal.answers import ANSWERS, AnswerRecord
from holdfast.journal.audits import NAME
from holdfast.journal.configs import find_conflict
from holdfast.journal.coverage import hash_rested
from holdfast.journal.links import broken_links
from holdfast.journal.skips import SKIPS, SkipRecord
from holdfast.journal.snapshots import find_other_run, find_other_settings

# For each folder: the class of its records, and the field that repeats the number in a record's name.
NUMBERED: dict[str, tuple[type[Record], str]] = {
    "attempts": (AttemptRecord, "number"),
    "endings": (EndingRecord, "number"),
    "quarantine": (Quarantine, "commit"),
    "pruned": (Pruned, "commit"),
    "pins": (Pin, "commit"),
    "prunes": (PruneReport, "newest"),
    "rehearsals": (RehearsalRecord, "attempt"),
    SKIPS: (SkipRecord, "number"),
    "index": (IndexRecord, "number"),
}


# For each folder whose records' names have the numbers of a commit and of one of its audits: the class of its records.
PAIRED: dict[str, type[Record]] = {"audits": AuditRecord, ANSWERS: AnswerRecord}

# The type of the built-in map, or of a thread pool's map.
Map = Callable[..., Iterable[Any]]


@dataclass
class CheckedRecords:
    """The result of checking a run's records.

    Attributes:
        problems, notes: as in `VerifyReport`.
        count: the number of records that were read.
        commits: the commits whose records can be read, sorted by number.
        live: the commits in `commits` that are valid.
        quarantined: the commits in `commits` that are quarantined and not pruned.
        elsewhere: see `hash_rested`.
    """

    problems: list[str]
    notes: list[str]
    count: int
    commits: list[Commit]
    live: list[Commit]
    quarantined: list[Commit]
    elsewhere: int


def check_records(journal: Journal, map_: Map = map) -> CheckedRecords:
    """Read and check all records of a run.

    Args:
        map_: the function that runs the checks: the built-in map, or a thread pool's map.

    Raises:
        RunUnknown: there is no such run.
    """
    first, is_unpacked, problems = _check_run(journal)
    elsewhere = first if is_unpacked else 0
    others = list(_list_others(journal))
    problems += filter(None, map_(lambda other: _check_other(journal, *other), others))
    quarantined, pruned = set(journal.numbers("quarantine")), set(journal.numbers("pruned"))
    # Read these records before the commits, because a live attempt first writes a commit, and then the records that
    # name this commit.
    named = _list_named(journal) | pruned
    there = [number for number in journal.numbers("commits") if number >= first]
    newest = max(there, default=0)
    found = dict(zip(there, map_(lambda number: _read_commit(journal, number), there), strict=True))
    commits = [commit for commit in found.values() if isinstance(commit, Commit)]
    hashes = map_(lambda commit: journal.record_sha256(commit.number), commits)
    sha256 = dict(zip((commit.number for commit in commits), hashes, strict=True))
    problems += _check_numbers(first, {*there, *(number for number in quarantined if number >= first)}, named)
    problems += _check_links(found, sha256, quarantined)
    latest_problems, notes = _check_latest(journal, newest)
    if commits and journal.numbers("attempts") and not journal.store.exists("config.snapshot.json"):
        problems.append("config.snapshot.json is missing; the next attempt writes it again")
    elif other := find_other_run(journal):
        problems.append(f"{other}; the next attempt writes it again")
    elif not any(problem.startswith("config.snapshot.json:") for problem in problems) and (
        other := find_other_settings(journal, commits[-1] if commits else None)
    ):
        problems.append(f"{other}; nothing is pruned until the next attempt writes it again")
    notes += journal.strays
    problems += latest_problems
    counting = [commit for commit in commits if commit.number not in quarantined]
    live = [commit for commit in counting if commit.number not in pruned]
    problems += filter(None, map_(lambda commit: _check_folder(journal, commit), counting))
    damaged = {problem.partition(" ")[0].rstrip(":") for problem in problems}
    problems += sorted(_find_lost(journal, elsewhere, counting, live, damaged, map_))
    copies = [(commit, file) for commit in counting for file in commit.files if file.name in checkpoint.COPIES]
    problems += filter(None, map_(lambda copy: _check_copy(journal, copy[0], copy[1], newest), copies))
    notes += _list_unwritten(journal, [copy for copy in copies if copy[0].number == newest != elsewhere])
    return CheckedRecords(
        problems=problems,
        notes=notes,
        count=1 + len(others) + len(there) + len(copies),
        commits=commits,
        live=live,
        quarantined=[commit for commit in commits if commit.number in quarantined - pruned],
        elsewhere=elsewhere,
    )


def _check_run(journal: Journal) -> tuple[int, bool, list[str]]:
    """Return the number of the run's first commit, whether the run was unpacked, and a line for each problem."""
    try:
        run = journal.read_run()
        renamed = journal.find_rename()
        return run.first_commit, run.packed or run.first_commit > 1, [renamed] if renamed else []
    except (RecordDamaged, Unreadable) as error:
        is_unpacked = not journal.numbers("attempts")
        return min(journal.numbers("commits"), default=1), is_unpacked, [str(error)]


def _list_others(journal: Journal) -> Iterator[tuple[str, type[Record], dict[str, int]]]:
    """Yield the arguments of `_check_other` for each record except ``run.json``, ``latest.json`` and commits.

    The arguments are the record's name, its class, and the numbers in its name, which its fields have to repeat.
    """
    if journal.store.exists("config.snapshot.json"):
        yield "config.snapshot.json", ConfigRecord, {}
    for name in journal.store.list("configs"):
        yield f"configs/{name}", ConfigRecord, {}
    for folder, of_pair in PAIRED.items():
        for pair in filter(None, map(NAME.fullmatch, journal.store.list(folder))):
            yield f"{folder}/{pair[0]}", of_pair, {"commit": int(pair[1]), "number": int(pair[2])}
    for name in journal.store.list("folders"):
        yield f"folders/{name}", FolderRecord, {}
    for folder, (cls, field) in NUMBERED.items():
        for number in journal.numbers(folder):
            yield record_name(folder, number), cls, {field: number}


def _check_other(journal: Journal, name: str, cls: type[Record], expected: dict[str, int]) -> str | None:
    try:
        record = read_record(journal.store, cls, name)
    except (RecordDamaged, Unreadable) as error:
        return str(error)
    except NameMissing:  # if the name is still listed, it isn't a file; otherwise a pin was removed meanwhile
        folder, _, file = name.rpartition("/")
        return f"{name} is not a file" if file in journal.store.list(folder) else None
    for field, number in expected.items():
        if getattr(record, field) != number:
            return f"{name} holds the record of a different number, {getattr(record, field)}"
    if isinstance(record, FolderRecord) and name != folder_record_name(record.path):
        return f"{name} holds the record of another folder, {record.path}"
    if isinstance(record, ConfigRecord) and name not in ("config.snapshot.json", record.name, record.snapshot_name):
        return f"{name} contains settings with a different fingerprint, {record.fingerprint}"
    if isinstance(record, ConfigRecord) and (conflict := find_conflict(record)):
        return f"{name}: {conflict}"
    return None


def _check_folder(journal: Journal, commit: Commit) -> str:
    """Return a line if the record of a commit's folder assigns the folder to another commit that could use it."""
    name = folder_record_name(commit.path)
    with contextlib.suppress(NameMissing, RecordDamaged, Unreadable):  # reported elsewhere
        number = read_record(journal.store, FolderRecord, name).commit
        owner = journal.find_commit(number)
        if number != commit.number and (number == 0 or (owner is not None and owner.path == commit.path)):
            return f"{name} assigns the folder of commit {commit.number} to {f'commit {number}' if number else 'none'}"
    return ""


def _find_lost(
    journal: Journal, elsewhere: int, counting: Iterable[Commit], live: Collection[Commit], damaged: Collection[str],
    map_: Map,
) -> Iterator[str]:  # fmt: skip
    """Yield a line for each lost record on which a commit relies, or which the index lists.

    Args:
        elsewhere: see `hash_rested`.
        counting: the commits that aren't quarantined.
        live: the commits in ``counting`` that aren't pruned. Only their signatures must exist.
        damaged: the names of records for which there is a line already.
        map_: see `check_records`.
    """
    wanted = hash_rested(counting, elsewhere)
    entries = journal.numbers("index")
    gaps = set(range(1, max(entries, default=0))).difference(entries)
    yield from (f"{record_name('index', number)} is missing" for number in gaps)
    for entry in filter(None, map_(lambda number: _read_entry(journal, number), entries)):
        if entry.is_there:
            wanted[entry.name] = ""
        else:
            wanted.pop(entry.name, None)
    unneeded = {signature_name(each.number, each.attempt) for each in counting if each not in live}
    wanted = {name: sha256 for name, sha256 in wanted.items() if name not in unneeded | {*damaged}}
    there = {folder: set(journal.store.list(folder)) for folder in {name.rpartition("/")[0] for name in wanted}}
    for name, sha256 in wanted.items():
        folder, _, file = name.rpartition("/")
        if file not in there[folder]:
            yield f"{name} is missing"
            continue
        if name.startswith("signatures/") and not journal.store.exists(name):  # other records were read before
            yield f"{name} is not a file"
        with contextlib.suppress(NameMissing, Unreadable):  # the record is a pin that was removed meanwhile
            if sha256 and (found := journal.hash_record(name)) != sha256:
                yield f"{name} has the SHA-256 {found} but was committed with {sha256}"


def _read_entry(journal: Journal, number: int) -> IndexRecord | None:
    with contextlib.suppress(NameMissing, RecordDamaged, Unreadable):  # `_check_other` reports the damage
        return read_record(journal.store, IndexRecord, record_name("index", number))
    return None


def _list_named(journal: Journal) -> set[int]:
    """Return the numbers of the commits that other records name."""
    named = {number for folder in ("metrics", "shown", "pins", "prunes") for number in journal.numbers(folder)}
    with contextlib.suppress(NameMissing, RecordDamaged, Unreadable):
        latest = read_record(journal.store, Latest, "latest.json").commit
        named.update([latest] if journal.can_reach(latest) else [])
    return named


def _read_commit(journal: Journal, number: int) -> Commit | HoldfastError:
    try:
        return journal.read_commit(number)
    except (NameMissing, RecordDamaged, Unreadable) as error:
        return error


def _check_numbers(first: int, there: Collection[int], named: Collection[int]) -> Iterator[str]:
    """Yield a line for each gap in the commits' numbers. Holdfast never deletes a commit's record, so a gap is a loss.

    Args:
        first: the number of the run's first commit.
        there: the numbers on the store.
        named: the numbers that other records name.
    """
    before = first - 1
    for number in (*sorted(there), max([before, *there, *named]) + 1):
        if number - before > 1:
            lost = [record_name("commits", each) for each in (before + 1, number - 1)]
            yield f"{lost[0]} is missing" if lost[0] == lost[1] else f"{lost[0]} to {lost[1]} are missing"
        before = number


def _check_links(
    found: dict[int, Commit | HoldfastError], sha256: dict[int, str], quarantined: set[int]
) -> Iterator[str]:
    """Yield a line for each commit that can't be read, and for each broken link from a commit to its predecessors."""
    for number, commit in found.items():
        if isinstance(commit, HoldfastError):
            if number not in quarantined:
                yield str(commit)
            continue
        if number in quarantined:  # a quarantined commit's links don't matter, because no run continues from it
            continue
        before, parent = (
            each if isinstance(each, Commit) else None for each in map(found.get, (number - 1, commit.parent))
        )
        yield from broken_links(commit, before, sha256.get(number - 1, ""), parent)


def _check_latest(journal: Journal, newest: int) -> tuple[list[str], list[str]]:
    """Return the problems and the notes about ``latest.json``."""
    try:
        latest = read_record(journal.store, Latest, "latest.json")
    except NameMissing:
        if "latest.json" in journal.store.list():
            return ["latest.json is not a file"], []
        return [], ["latest.json is missing; the next attempt writes it again"] if newest else []
    except RecordDamaged as error:
        return [f"{error}; the next attempt writes it again"], []
    except Unreadable as error:
        return [str(error)], []
    if latest.commit < newest:
        return [], [f"latest.json names commit {latest.commit} of {newest}; the next attempt renews it"]
    return [], []


def _check_copy(journal: Journal, commit: Commit, expected: FileRecord, newest: int) -> str | None:
    """Check the copy of a checkpoint's file that stays when the checkpoint is deleted, such as its metrics.

    Return a line if the copy is missing or differs from the commit; otherwise None.
    """
    name = _name_copy((commit, expected))
    folder, _, file = name.partition("/")
    try:
        found = checkpoint.hash_file(journal.store, folder, file)
    except NameMissing:
        if file in journal.store.list(folder):
            return f"{name} is not a file"
        if commit.number == newest:  # the attempt was killed before the copy; the next attempt makes the copy
            return None
        return f"{name} is missing"
    except Unreadable as error:
        return str(error)
    if found.sha256 == expected.sha256:
        return None
    return f"{name} has the SHA-256 {found.sha256} but was committed as {expected.sha256}"


def _list_unwritten(journal: Journal, copies: Iterable[tuple[Commit, FileRecord]]) -> Iterator[str]:
    """Yield a line for each missing copy of the newest commit's files, as after a kill between commit and copy."""
    for name in map(_name_copy, copies):
        if not journal.store.exists(name):
            yield f"{name} is missing; the next attempt writes it again"


def _name_copy(copy: tuple[Commit, FileRecord]) -> str:
    """Return the name of the copy of a commit's file that stays when the checkpoint is deleted."""
    commit, file = copy
    return checkpoint.COPIES[file.name](commit.number)

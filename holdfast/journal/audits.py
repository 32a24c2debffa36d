"""A run's audits: their records, the commits that they certify, and the resumes that they prove."""

import contextlib
import re
from collections.abc import Iterable, Iterator

from holdfast.errors import NameMissing, NameTaken, RecordDamaged, Unreadable
from holdfast.journal.journal import Journal
from holdfast.journal.records import AuditRecord, Commit, audit_name, read_record
from holdfast.journal.trainers import OTHER_NODE, read_machines

NAME = re.compile(r"(\d{8})-(\d{8})\.json")
UNREADABLE = (NameMissing, RecordDamaged, Unreadable)

# For each commit that has audits, by number: the numbers of its audits.
Audits = dict[int, list[int]]


def list_audits(journal: Journal) -> Audits:
    """Return, with one request, the numbers of the audits of each commit that has audits."""
    found: Audits = {}
    for name in map(NAME.fullmatch, journal.store.list("audits")):
        if name:
            found.setdefault(int(name[1]), []).append(int(name[2]))
    return found


def read_audits(journal: Journal, commit: int, numbers: Iterable[int]) -> Iterator[AuditRecord]:
    """Yield the audits of a commit; skip records that can't be read, and those of another commit."""
    for number in numbers:
        with contextlib.suppress(*UNREADABLE):
            audit = read_record(journal.store, AuditRecord, audit_name(commit, number))
            if audit.commit == commit:  # skip a forged number such as 10**15, from which readers would make a range
                yield audit


def record_audit(journal: Journal, audit: AuditRecord) -> AuditRecord:
    """Write the record of an audit under the next free number of its commit, and return it.

    Raises:
        StoreError: the store can't be written.
    """
    number = max(list_audits(journal).get(audit.commit, [0]))
    while True:
        number += 1
        audit = audit.model_copy(update={"number": number})
        with contextlib.suppress(NameTaken):  # another machine's audit took this number first
            journal.store.create(audit_name(audit.commit, number), audit.to_bytes())
            journal.enter(audit_name(audit.commit, number))
            return audit


def find_certifying(journal: Journal, commit: Commit, numbers: Iterable[int]) -> Iterator[AuditRecord]:
    """Yield the audits that certify a commit, among the commit's audits with these numbers; see `find_certified`."""
    for audit in read_audits(journal, commit.number, numbers):
        with contextlib.suppress(*UNREADABLE):
            is_same = audit.checkpoint_sha256 == commit.checkpoint_sha256
            hosts = read_machines(journal, commit) if is_same else frozenset()
            if is_same and not hosts & {audit.host, OTHER_NODE}:
                yield audit


def list_unproved(journal: Journal, numbers: Iterable[int]) -> list[int]:
    """Return the commits that began with a resume which no audit has trained through to the same bytes."""
    audits, left = list_audits(journal) if (known := [*numbers]) else {}, []
    for number in known:
        commit = journal.find_commit(number)
        found = read_audits(journal, number, audits.get(number, ()))
        if commit is None or not any(e.resumes and e.checkpoint_sha256 == commit.checkpoint_sha256 for e in found):
            left.append(number)
    return left


def list_refused(journal: Journal) -> set[int]:
    """Return the commits that the gate (the checks before a resume) refused when an audit was to begin from them."""
    audits = (each for number, known in list_audits(journal).items() for each in read_audits(journal, number, known))
    return {audit.from_commit for audit in audits if not audit.checkpoint_sha256}

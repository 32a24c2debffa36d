"""The audits on record, and the certified commits: those that another machine has trained again to the same bytes."""

import contextlib
import re
from collections.abc import Iterable

from holdfast.errors import NameMissing, NameTaken, RecordDamaged, Unreadable
from holdfast.journal.journal import Journal
from holdfast.journal.records import AuditRecord, Commit, audit_name, read_record

NAME = re.compile(r"(\d{8})-(\d{8})\.json")


def list_audits(journal: Journal) -> dict[int, list[int]]:
    """Return the numbers of the audits of each commit that has any, in one request."""
    found: dict[int, list[int]] = {}
    for name in map(NAME.fullmatch, journal.store.list("audits")):
        if name:
            found.setdefault(int(name[1]), []).append(int(name[2]))
    return found


def record_audit(journal: Journal, audit: AuditRecord) -> AuditRecord:
    """Write the record of an audit under the next free number of its commit, and return it.

    Raises:
        StoreError: the store can't be written.
    """
    number = max(list_audits(journal).get(audit.commit, [0]))
    while True:
        number += 1
        audit = audit.model_copy(update={"number": number})
        with contextlib.suppress(NameTaken):  # an audit on another machine was faster
            journal.store.create(audit_name(audit.commit, number), audit.to_bytes())
            return audit


def find_certified(journal: Journal, commits: Iterable[Commit]) -> tuple[Commit, AuditRecord] | None:
    """Return the first certified commit, with the audit that certifies it; None if there is none.

    An audit certifies a commit if it ended with the commit's bytes and ran on another host than the attempt that
    trained the commit: a machine that computes wrongly would repeat its own fault.
    """
    audits = list_audits(journal)
    for commit in commits:
        for number in audits.get(commit.number, ()):
            with contextlib.suppress(NameMissing, RecordDamaged, Unreadable):
                audit = read_record(journal.store, AuditRecord, audit_name(commit.number, number))
                is_same = audit.checkpoint_sha256 == commit.checkpoint_sha256
                if is_same and audit.host not in _list_hosts(journal, commit):
                    return commit, audit
    return None


def _list_hosts(journal: Journal, commit: Commit) -> list[str]:
    """Return the hosts whose attempts may have trained a commit.

    Raises:
        NameMissing, RecordDamaged, Unreadable: an attempt's record can't be read.
    """
    # An adopted checkpoint was trained by the ranks of an earlier attempt, not by the attempt that commits it.
    earlier = commit.attempt - 1 if commit.why == "adopted" else commit.attempt
    return [journal.read_attempt(number).host for number in {earlier or 1, commit.attempt}]

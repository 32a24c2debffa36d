"""The check that ``config.snapshot.json`` has this run's own settings, which decide what a prune deletes."""

import contextlib
import hashlib

from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal.journal import Journal
from holdfast.journal.records import MAX_RECORD_BYTES, Commit, ConfigRecord

SNAPSHOT = "config.snapshot.json"


def find_other_run(journal: Journal) -> str:
    """Return a message if the snapshot names a different run than this one; otherwise an empty text."""
    read = _read(journal)
    named = read[1].config.get("run", journal.run) if read else journal.run
    return "" if named in (journal.run, _read_name(journal)) else f"{SNAPSHOT} has the settings of a run {named!r}"


def find_other_settings(journal: Journal, newest: Commit | None) -> str:
    """Return a message if the snapshot doesn't have the settings of the run's last attempt; otherwise an empty text.

    The newest commit names the hash of the settings. If an attempt has begun since that commit, its settings are a
    different record of the run. A commit of an earlier version names no hash, so any settings are accepted.

    Args:
        newest: the run's newest commit; None before the first commit.
    """
    read, known = _read(journal), _list_hashes(newest)
    if read is None or newest is None or not known or read[0] in known:
        return ""
    sha256, record = read
    names = (record.name, record.snapshot_name) if journal.attempts() > newest.attempt else ()
    if any(journal.hash_record(name) == sha256 for name in names):
        return ""
    return f"{SNAPSHOT} doesn't have the settings with which attempt {newest.attempt} trained"


def is_of(journal: Journal, commit: Commit) -> bool:
    """Return whether the hash in a commit shows that its attempt trained with the settings of the snapshot."""
    read = _read(journal)
    return read is not None and read[0] in _list_hashes(commit)


def _read(journal: Journal) -> tuple[str, ConfigRecord] | None:
    """Return the snapshot with its SHA-256; None if it is lost or damaged, which `holdfast verify` reports."""
    with contextlib.suppress(NameMissing, RecordDamaged):
        data = journal.store.read(SNAPSHOT, 0, MAX_RECORD_BYTES + 1)
        return hashlib.sha256(data).hexdigest(), ConfigRecord.from_bytes(data, SNAPSHOT)
    return None


def _list_hashes(commit: Commit | None) -> set[str]:
    """Return the hashes of the settings that a commit's attempt had; empty for a commit of an earlier version."""
    records = commit.records if commit else {}
    found = {name: sha256 for name, sha256 in records.items() if name.startswith("configs/") and sha256}
    # the settings first used with a fingerprint
    later = {name: sha256 for name, sha256 in found.items() if "-" in name}
    return {*(later or found).values()}


def _read_name(journal: Journal) -> str:
    with contextlib.suppress(RecordDamaged, NameMissing):
        return journal.read_run().run
    return journal.run

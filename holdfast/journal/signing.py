"""The signature of a commit on the store: making and checking it."""

from collections.abc import Sequence

from holdfast.errors import NameMissing, NotTrusted
from holdfast.journal.journal import Journal
from holdfast.journal.records import MAX_RECORD_BYTES, Commit, record_name, signature_name
from holdfast.journal.signature import MAX_ENVELOPE_BYTES, SigningKey, TrustedKey, verify_signature


def sign_commit(key: SigningKey, run: str, commit: Commit) -> bytes:
    """Sign a commit of a run. Return the envelope, which proves that the key's holder made the commit."""
    return key.sign(run, record_name("commits", commit.number), commit.to_bytes(), list_files(commit))


def check_signed(journal: Journal, commit: Commit, keys: Sequence[TrustedKey]) -> None:
    """Check that one of the keys signed the commit's record on the store, and that the record equals ``commit``.

    Raises:
        NotTrusted: no trusted key signed the record, or the record differs.
    """
    name = record_name("commits", commit.number)
    hint = "set signing_key to sign later commits; without resume.trusted_keys, unsigned commits are accepted"
    try:
        envelope = journal.store.read(signature_name(commit.number, commit.attempt), 0, MAX_ENVELOPE_BYTES + 1)
    except NameMissing:
        raise NotTrusted(f"commit {commit.number} of run {journal.run!r} is not signed", hint=hint) from None
    record = journal.store.read(name, 0, MAX_RECORD_BYTES)
    # Earlier versions wrote both forms of a signature, and no hash of run.json.
    is_lower = bool(commit.records.get("run.json"))
    verify_signature(envelope, journal.run, name, record, list_files(commit), keys, is_lower=is_lower)
    if Commit.from_bytes(record, name) != commit:
        raise NotTrusted(f"the file {name} changed while it was read")


def list_files(commit: Commit) -> dict[str, str]:
    """Return the SHA-256 of each file of a commit's checkpoint, by its name in the run's folder."""
    return {f"{commit.path}/{file.name}": file.sha256 for file in commit.files}

"""The bytes of checkpoints, held against their commits."""

from collections.abc import Iterator

from holdfast import checkpoint
from holdfast.checkpoint.verifying import Watch
from holdfast.errors import CheckpointDamaged, NameMissing, RecordDamaged
from holdfast.journal import Commit, Journal
from holdfast.verification.report import CheckedCheckpoint


def check_checkpoint(
    journal: Journal, commit: Commit, standing: str, *, deep: bool, watch: Watch
) -> tuple[CheckedCheckpoint, list[str]] | None:
    """What was read, and a line for each thing that is wrong; None if retention has given it up meanwhile.

    Args:
        watch: called with the size of each piece that was read.
    """
    try:
        damaged = checkpoint.verify(journal.store, commit, watch)
    except NameMissing:  # it went after a look at its size
        damaged = checkpoint.verify(journal.store, commit)
    problems = [str(damage) for damage in damaged]
    if deep and not damaged:
        problems += _look_into(journal, commit)
    if problems and journal.is_pruned(commit.number):
        return None
    checked = CheckedCheckpoint(
        commit=commit.number,
        path=commit.path,
        checkpoint_sha256=commit.checkpoint_sha256,
        size_bytes=commit.size_bytes,
        standing=standing,
        damaged=[vars(damage) for damage in damaged],
    )
    return checked, problems


def _look_into(journal: Journal, commit: Commit) -> Iterator[str]:
    """Where what the bytes say contradicts the commit."""
    try:
        checkpoint.read_payload(journal.store, commit)
        metadata = checkpoint.read_metadata(journal.store, commit.path)
    except (CheckpointDamaged, RecordDamaged, NameMissing) as error:
        yield str(error)
        return
    if metadata is None:
        return
    yield from checkpoint.find_disagreements(commit, metadata)
    if journal.read_config(commit.config_fingerprint) is None:
        yield f"commit {commit.number}: configs/{commit.config_fingerprint}.json is lost"


def check_uncommitted(journal: Journal, committed: set[str]) -> Iterator[CheckedCheckpoint]:
    """What no commit names, as far as it is there."""
    for path in journal.store.list():
        if not checkpoint.is_folder_name(path) or path in committed:
            continue
        try:
            files = [checkpoint.hash_file(journal.store, path, name) for name in journal.store.list(path)]
        except NameMissing:  # a prune deletes it while we read
            continue
        parts = [file for file in files if checkpoint.is_part(file.name)]
        yield CheckedCheckpoint(
            commit=None,
            path=path,
            checkpoint_sha256=checkpoint.content_id(parts) if parts else "",
            size_bytes=sum(file.size_bytes for file in files),
            standing="uncommitted",
            damaged=[],
        )

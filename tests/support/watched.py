"""A run to watch, made from records alone: as many commits as asked for, by attempts that ended differently."""

from pathlib import Path

from holdfast.checkpoint import Metadata
from holdfast.journal import Commit, Journal, now, record_name
from holdfast.journal.endings import Ending
from holdfast.store import open_store
from tests.support.makers import IDENTITY, METADATA_FIELDS, SETTINGS, STEPS_PER_EPOCH, make_commit, make_latest

# How the attempts before the last ended.
REASONS = ("preempted", "vanished", "out_of_memory")
CHUNK_S = 2.0


def make_long_run(store: str, run: str, commits: int, epochs: int | None = None, *, is_ended: bool = True) -> Journal:
    """Make a run with a commit for each epoch, and four attempts, the first three of which were interrupted.

    Args:
        store: a folder.
        epochs: the length of the run; by default it is complete.
        is_ended: whether the ending of the last attempt is on record.
    """
    journal = Journal(open_store(store), run)
    journal.begin("m:f")
    config = {"recipe": "m:f", "run": run, "epochs": epochs or commits}
    journal.record_config(SETTINGS, IDENTITY, config)
    folder = Path(store) / run
    per_attempt = -(-commits // (len(REASONS) + 1))
    for number in range(1, len(REASONS) + 2):
        journal.claim_attempt(number, "preempted" if number > 1 else "fresh", "host", number, {})
    (folder / "commits").mkdir()
    newest = make_commit(1)
    for number in range(1, commits + 1):
        newest = _make(number, min((number - 1) // per_attempt + 1, len(REASONS) + 1))
        (folder / record_name("commits", number)).write_bytes(newest.to_bytes())
    for number, reason in enumerate(REASONS, start=1):
        journal.end_attempt(number, Ending(reason, "as it was told", number * per_attempt * STEPS_PER_EPOCH))
    if is_ended:
        journal.end_attempt(len(REASONS) + 1, Ending("completed", "", newest.step))
    _write_metadata(folder, newest)
    journal.publish_latest(make_latest(newest))
    return Journal(open_store(store), run)


def add_commit(journal: Journal) -> Commit:
    """Publish the next commit of the last attempt."""
    commit = _make(journal.newest_number() + 1, journal.attempts())
    journal.publish_commit(commit)
    _write_metadata(Path(journal.store.url), commit)
    journal.publish_latest(make_latest(commit))
    return commit


def _make(number: int, attempt: int) -> Commit:
    return make_commit(number, attempt, train_s=CHUNK_S, save_s=0.1, metrics={"avg_loss": 4.0 / (number + 1)})


def _write_metadata(folder: Path, commit: Commit) -> None:
    fields = METADATA_FIELDS | {
        "epoch": commit.epoch, "created_at": now(), "optimizer_steps_total": commit.step, "checkpoint_size_bytes": 1,
        "checkpoint_sha256": commit.checkpoint_sha256, "parts": commit.files, "part_bytes": 1, "environment": {},
        "probe": {"sha256": "0" * 64, "gradient": "", "values": {"entropy": 0.5}, "sample": []},
    }  # fmt: skip
    (folder / commit.path).mkdir(exist_ok=True)
    (folder / commit.path / "metadata.json").write_bytes(Metadata.model_validate(fields).to_bytes())

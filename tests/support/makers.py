"""Makers of small runs with real records and real checkpoints, without training."""

import hashlib
from pathlib import Path
from typing import Any

from holdfast import checkpoint
from holdfast.attempt import Line
from holdfast.checkpoint import METADATA, METRICS, PAYLOAD, Payload, Saved, Tensor
from holdfast.config import RunConfig
from holdfast.errors import CheckpointDamaged
from holdfast.journal import Commit, FileRecord, Journal, Latest, metrics_name, now
from holdfast.journal.signature import SigningKey, TrustedKey, generate_key, load_signing_key, load_trusted_key
from holdfast.keeping.verification import verify_run
from holdfast.provenance.fingerprint import fingerprint
from holdfast.store import Store

Keys = list[tuple[SigningKey, TrustedKey]]

STEPS_PER_EPOCH = 10
FILES = (PAYLOAD, METADATA, METRICS)  # the files of a small checkpoint
IDENTITY = {"recipe": "m:f", "seed": 1234, "settings": {"lr": 0.1}}
SETTINGS = fingerprint(IDENTITY)
CONFIG: dict[str, Any] = RunConfig(recipe="m:f", run="run", settings={"lr": 0.1}).model_dump(mode="json")
# The metadata of a checkpoint, for tests that don't depend on it.
METADATA_FIELDS: dict[str, Any] = {
    "epoch": 1, "created_at": "2026-01-01T00:00:00+00:00", "optimizer_steps_total": 10, "optimizer_steps_epoch": 0,
    "steps_per_epoch": 10, "grad_accum": 1, "avg_loss": 1.0, "scheduler_type": "linear", "current_lrs": [0.1],
    "learning_rate_history": [[0.1]], "learning_rate_history_len": 1, "metrics": {}, "model_params": 6,
    "previous_checkpoint_sha256": "", "config_fingerprint": "0" * 64,
}  # fmt: skip


def make_commit(number: int, attempt: int = 1, step: int | None = None, **fields: Any) -> Commit:
    """Return a commit whose files don't exist."""
    sha256 = f"{number:064x}"
    known: dict[str, Any] = {
        "number": number, "parent": number - 1, "attempt": attempt, "step": step or number * STEPS_PER_EPOCH,
        "epoch": number, "path": f"epoch-{number:04d}", "metrics": {"avg_loss": 1 / number},
        "files": [FileRecord(name="checkpoint.safetensors", size_bytes=1, sha256=sha256)],
        "checkpoint_sha256": sha256, "previous_checkpoint_sha256": f"{number - 1:064x}" if number > 1 else "",
        "previous_record_sha256": "",
        "config_fingerprint": SETTINGS, "why": "chunk", "created_at": now(),
    }  # fmt: skip
    return Commit(**known | fields)


def commit_of(saved: Saved) -> Commit:
    """Return the first commit of a run, with a saved checkpoint."""
    return Commit(
        number=1, parent=0, attempt=1, step=saved.step, epoch=1, path=saved.path, files=saved.files, metrics={},
        why="chunk",
        checkpoint_sha256=saved.metadata.checkpoint_sha256, previous_checkpoint_sha256="", previous_record_sha256="",
        config_fingerprint="0" * 64, created_at=now(),
    )  # fmt: skip


def make_latest(commit: Commit) -> Latest:
    return Latest(
        epoch=commit.epoch, path=commit.path, created_at=commit.created_at, model_params=1,
        optimizer_steps_total=commit.step, scheduler_type="constant", checkpoint_sha256=commit.checkpoint_sha256,
        commit=commit.number, attempt=commit.attempt, config_fingerprint=commit.config_fingerprint,
    )  # fmt: skip


def publish(journal: Journal, *commits: Commit) -> None:
    for commit in commits:
        journal.publish_commit(commit)
        journal.publish_copy(metrics_name(commit.number), b"")
        journal.publish_latest(make_latest(commit))


def make_line(store: Store, run: str = "run", epochs: int = 9, **options: Any) -> Line:
    """Begin or continue a run without training; return the line of its next attempt."""
    journal = Journal(store, run)
    journal.begin("m:f")
    attempt = journal.attempts() + 1
    claim(journal, attempt)
    journal.record_config(SETTINGS, IDENTITY, CONFIG | {"epochs": epochs, "run": run})
    line = Line(journal, attempt, SETTINGS, STEPS_PER_EPOCH, **options)
    resume(line)
    return line


def resume(line: Line) -> None:
    """Set the line's head to the newest checkpoint that can be loaded."""
    line.resume(lambda commit: load(line.journal.store, commit))


def load(run: Store, commit: Commit) -> CheckpointDamaged | None:
    """Read a checkpoint as a rank does; return its damage, or None if there is none."""
    try:
        checkpoint.read_payload(run, commit)
    except CheckpointDamaged as error:
        return error
    return None


def save_next(line: Line, steps: int = STEPS_PER_EPOCH, **options: Any) -> Saved:
    """Save the checkpoint of the next chunk without committing it."""
    step, parent = (line.head.step, line.head.checkpoint_sha256) if line.head else (0, "")
    return save(line.journal.store, step + steps, parent, **{"steps": steps} | options)


def train(line: Line, steps: int = STEPS_PER_EPOCH, **options: Any) -> Commit:
    """Save and commit the checkpoint of the next chunk."""
    return line.commit(save_next(line, steps, **options), "chunk")


def claim(journal: Journal, number: int) -> None:
    journal.claim_attempt(number, "fresh", "host", 1, {})


def save(
    run: Store, step: int, parent: str = "", size_bytes: int = 64, steps: int = STEPS_PER_EPOCH, shown: bytes = b"",
    **fields: Any,
) -> Saved:  # fmt: skip
    """Save a complete checkpoint. Its bytes follow from its parent's, so one wrong step changes all later checkpoints.

    Args:
        steps: the number of steps in its trail.
        shown: the content of its ``shown.jsonl``; empty for no such file.
    """
    data = hashlib.sha256(f"{parent} {step}".encode()).digest() * (size_bytes // 32)
    epoch, within = divmod(step, STEPS_PER_EPOCH)
    known: dict[str, Any] = {
        "epoch": epoch, "created_at": now(), "optimizer_steps_total": step, "optimizer_steps_epoch": within,
        "steps_per_epoch": STEPS_PER_EPOCH, "grad_accum": 1, "avg_loss": 1 / step, "scheduler_type": "constant",
        "current_lrs": [0.1], "learning_rate_history": [[0.1]] * epoch, "learning_rate_history_len": epoch,
        "metrics": {"score": step / 100}, "model_params": size_bytes, "previous_checkpoint_sha256": parent,
        "config_fingerprint": SETTINGS,
    }  # fmt: skip
    payload = Payload({"weight": Tensor("U8", (size_bytes,), (data,))}, {"step": step})
    trail = "".join(f'{{"step": {each}}}\n' for each in range(step - steps + 1, step + 1))
    return checkpoint.save(run, payload, known | fields, trail, shown=shown)


def head_step(line: Line) -> int:
    """Return the newest step of a line that has committed."""
    assert line.head is not None
    return line.head.step


def make_key(path: Path) -> tuple[SigningKey, TrustedKey]:
    """Make a key to sign with; return its two halves."""
    generate_key(path)
    return load_signing_key(str(path)), load_trusted_key(f"{path}.pub")


def assert_good(store: Store, *trusted: TrustedKey, notes: tuple[str, ...] = ()) -> None:
    """Check that verifying everything of the run finds no problems, and exactly these notes."""
    report = verify_run(Journal(store, "run"), everything=True, deep=True, trusted_keys=trusted)
    assert (report.problems, report.notes) == ([], [*notes])


def root(line: Line) -> Path:
    """Return the folder of a run on this machine's disk."""
    return Path(line.journal.store.url)


def damage(line: Line, path: str, name: str = checkpoint.PAYLOAD) -> None:
    """Change the first byte of a checkpoint's file."""
    file = root(line) / path / name
    file.write_bytes(b"?" + file.read_bytes()[1:])


def write_later_format(journal: Journal) -> None:
    """Turn a run into one of a later format, which this version can't read."""
    record = journal.read_run().model_copy(update={"format": 9})
    journal.store.replace("run.json", record.to_bytes())
    assert b'"format": 9' in journal.store.read("run.json")

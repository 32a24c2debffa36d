"""A checkpoint's metadata, its content id and its folder's name."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from holdfast.config import PART_BYTES
from holdfast.errors import NameMissing, RecordDamaged
from holdfast.journal import (
    FOLDER,
    MAX_RECORD_BYTES,
    Commit,
    FileRecord,
    LaterTime,
    Origin,
    Record,
    metrics_name,
    read_record,
    shown_name,
)
from holdfast.machine.slow_ranks import SlowRank
from holdfast.recipe.probe import Probe
from holdfast.store import Store

METADATA = "metadata.json"
METRICS = "metrics.jsonl"
SHOWN = "shown.jsonl"
# The files whose copies are kept when the checkpoint is deleted. Each value is a function that returns the copy's name
# for a commit number.
COPIES = {METRICS: metrics_name, SHOWN: shown_name}


class Metadata(Record):
    """The content of ``metadata.json``: fields of a checkpoint that can be read without its payload.

    Attributes:
        trained_at: when the checkpoint's last step ended; empty if an earlier version wrote the checkpoint.
        train_s: the seconds that the steps since the previous save took; 0 if an earlier version wrote the checkpoint.
        optimizer_steps_epoch: the number of completed steps of the newest epoch; ``steps_per_epoch`` at the epoch's
            end. Earlier versions wrote 0 at an epoch's end, so use `is_at_epoch_end`.
        learning_rate_history: for each of the last 1,000 completed epochs, the learning rates of the epoch's first
            step, one for each parameter group. Earlier versions wrote the rates of the epoch's last step.
        learning_rate_history_len: the number of completed epochs.
        epoch_first_lrs: the learning rates of the first step of the epoch in progress; empty at an epoch's end; None
            if an earlier version wrote the checkpoint.
        anneals: the value of each `Anneal` of the recipe for the next step, by name.
    """

    epoch: int
    created_at: str
    trained_at: LaterTime = ""
    train_s: float = Field(0.0, ge=0)
    is_last: bool = Field(
        False, description="whether the ranks ended with this checkpoint, and trained no step after it"
    )
    writer: str = Field(
        "", description="random token of the save: if two writers have equal states, only one gets the folder"
    )
    optimizer_steps_total: int
    optimizer_steps_epoch: int
    steps_per_epoch: int
    grad_accum: int
    avg_loss: float | None
    loss: float | None = Field(
        None, description="mean loss since the previous checkpoint; None if unknown, as in older checkpoints"
    )
    scheduler_type: str
    current_lrs: list[float]
    learning_rate_history: list[list[float]]
    learning_rate_history_len: int
    epoch_first_lrs: list[float] | None = None
    metrics: dict[str, float | None]
    anneals: dict[str, float] = Field(default_factory=dict)
    anneal_offset: int = 0
    probe: Probe = Probe()
    rank_probes: list[Probe] = Field(
        default_factory=list,
        description="the probe of each rank, if the run has several; a single probe if all are equal",
    )
    replayed: dict[str, float] | None = None
    first_batch: str = ""
    model_params: int
    model_configs: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="the configuration files of the parts of the model, as transformers writes them, by part",
    )
    checkpoint_sha256: str
    checkpoint_size_bytes: int
    parts: list[FileRecord] = Field(default_factory=list)
    part_bytes: int = PART_BYTES
    shown: FileRecord | None = Field(None, description="``shown.jsonl``; None if its steps have shown nothing")
    previous_checkpoint_sha256: str
    config_fingerprint: str
    environment: dict[str, Any] = Field(
        default_factory=dict,
        description="the machine that trained it, and the record of code, packages, files and built values",
    )
    origin: Origin | None = Field(None, description="the source of an imported checkpoint; None if the run trained it")

    @property
    def is_at_epoch_end(self) -> bool:
        """Return whether the checkpoint was saved after an epoch's last step."""
        return self.optimizer_steps_total % self.steps_per_epoch == 0


def find_disagreements(commit: Commit, metadata: Metadata) -> list[str]:
    """Return a line of text for each field with different values in a commit and in its checkpoint's metadata."""
    pairs = {
        "step": (commit.step, metadata.optimizer_steps_total),
        "epoch": (commit.epoch, metadata.epoch),
        "checkpoint_sha256": (commit.checkpoint_sha256, metadata.checkpoint_sha256),
        "previous_checkpoint_sha256": (commit.previous_checkpoint_sha256, metadata.previous_checkpoint_sha256),
        "config_fingerprint": (commit.config_fingerprint, metadata.config_fingerprint),
    }
    return [
        f"{commit.path}: {name} was saved as {saved} but committed as {committed}"
        for name, (committed, saved) in pairs.items()
        if committed != saved
    ]


class Saved(Record):
    """A complete, durable checkpoint that no commit names yet.

    Attributes:
        train_s: seconds that the steps since the previous save took.
        slow_s: seconds of `train_s` that were lost because the previous save ran beside these steps.
        stall_s: seconds from the end of the checkpoint's last step until training could continue, including a wait for
            the previous save.
        save_s: seconds from the start of the copy of the state until the checkpoint was durable.
        restart_s: seconds from the start of the ranks, or of their attempt, until the order to train.
            Each duration is 0 if it is unknown.
        near_problem: a message for the user: why the near folder has no copy of this checkpoint. Empty if the folder
            has a copy, if there is no near folder, or if the previous save failed for the same reason.
        slow_rank: the rank for which the other ranks waited; None if they didn't wait.
        warnings: problems of the program to show a person, such as a module that steps change but no checkpoint saves.
        unkept: the names of such modules and of other copies of the weights.
    """

    path: str
    files: list[FileRecord]
    metadata: Metadata
    train_s: float = 0.0
    slow_s: float = 0.0
    stall_s: float = 0.0
    save_s: float = 0.0
    restart_s: float = 0.0
    near_problem: str = ""
    slow_rank: SlowRank | None = None
    warnings: tuple[str, ...] = ()
    unkept: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.metadata.optimizer_steps_total


# ---- names


def content_id(parts: Sequence[FileRecord]) -> str:
    """Return a checkpoint's content id.

    The content id is the SHA-256 of a single part, or of the output of ``sha256sum`` for several parts.
    """
    if len(parts) == 1:
        return parts[0].sha256
    listing = "".join(f"{part.sha256}  {part.name}\n" for part in sorted(parts, key=lambda part: part.name))
    return hashlib.sha256(listing.encode()).hexdigest()


def folder_name(step: int, steps_per_epoch: int) -> str:
    """Return a checkpoint's name: ``epoch-0004`` at the end of epoch 4, ``epoch-0005-step-00000420`` inside epoch 5."""
    epochs, within = divmod(step, steps_per_epoch)
    return f"epoch-{epochs + 1:04d}-step-{step:08d}" if within else f"epoch-{epochs:04d}"


def is_folder_name(name: str) -> bool:
    """Return whether a name in a run's folder is the name of a checkpoint's folder."""
    return re.match(FOLDER, name) is not None


def step_of(name: str, steps_per_epoch: int) -> int:
    """Return the step of a checkpoint from the name that `folder_name` made."""
    _, epoch, *step = name.partition(".")[0].split("-")
    return int(step[1]) if step else int(epoch) * steps_per_epoch


def read_metadata(folder: Store, path: str) -> Metadata | None:
    """Return a checkpoint's metadata; None if the file is missing, because the save was never completed.

    Raises:
        RecordDamaged: the metadata can't be read.
    """
    try:
        return read_record(folder, Metadata, f"{path}/{METADATA}")
    except NameMissing:
        return None


def read_committed(folder: Store, commit: Commit) -> Metadata | None:
    """Return the metadata of a commit's checkpoint; None if the checkpoint was deleted.

    Raises:
        RecordDamaged: the metadata can't be read, or isn't the file that was committed.
    """
    name = f"{commit.path}/{METADATA}"
    try:
        data = folder.read(name, 0, MAX_RECORD_BYTES + 1)
    except NameMissing:
        return None
    expected = next((file.sha256 for file in commit.files if file.name == METADATA), None)
    found = hashlib.sha256(data).hexdigest()
    if expected not in (None, found):
        raise RecordDamaged(f"{name} can't be read: it has the SHA-256 {found} but was committed with {expected}")
    return Metadata.from_bytes(data, name)

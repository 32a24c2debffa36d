"""What a checkpoint says of itself, and how it is named."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from holdfast.config import PART_BYTES
from holdfast.journal import FOLDER, Commit, FileRecord, Record
from holdfast.probe import Probe

METADATA = "metadata.json"
METRICS = "metrics.jsonl"


class Metadata(Record):
    """``metadata.json``: facts about a checkpoint that can be read without its payload.

    Attributes:
        optimizer_steps_epoch: steps done in the newest epoch; ``steps_per_epoch`` at its end. Earlier versions wrote 0
            there, so ask `is_at_epoch_end`.
        learning_rate_history: for each completed epoch, the rates (one a parameter group) of its first step. Earlier
            versions wrote those of its last step.
        epoch_first_lrs: the same of the epoch in progress; empty at an epoch's end; None where an earlier version wrote
            the checkpoint.
        anneals: their values for the next step.
    """

    epoch: int
    created_at: str
    writer: str = Field("", description="a random token of the save: of two that save equal states one has the folder")
    optimizer_steps_total: int
    optimizer_steps_epoch: int
    steps_per_epoch: int
    grad_accum: int
    avg_loss: float | None
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
        default_factory=list, description="the probe of each of several ranks; one where all are equal"
    )
    replayed: dict[str, float] | None = None
    first_batch: str = ""
    model_params: int
    checkpoint_sha256: str
    checkpoint_size_bytes: int
    parts: list[FileRecord] = Field(default_factory=list)
    part_bytes: int = PART_BYTES
    previous_checkpoint_sha256: str
    config_fingerprint: str
    environment: dict[str, Any] = Field(
        default_factory=dict,
        description="what it was trained on, and the record of code, packages, files and built values",
    )

    @property
    def is_at_epoch_end(self) -> bool:
        """True if the checkpoint was made after an epoch's last step."""
        return self.optimizer_steps_total % self.steps_per_epoch == 0


def find_disagreements(commit: Commit, metadata: Metadata) -> list[str]:
    """Return a line for each field in which a commit says something else than its checkpoint does."""
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
        train_s: seconds that its steps took, since the save before; 0 where nobody knows, and so with the others.
        stall_s: seconds from the end of its last step until training could go on, a wait for the save before included.
        save_s: seconds from when its state was first copied until it was durable.
        restart_s: seconds from the start of the ranks, or of their attempt, until they were ordered to train.
    """

    path: str
    files: list[FileRecord]
    metadata: Metadata
    train_s: float = 0.0
    stall_s: float = 0.0
    save_s: float = 0.0
    restart_s: float = 0.0

    @property
    def step(self) -> int:
        return self.metadata.optimizer_steps_total


# ---- names


def content_id(parts: Sequence[FileRecord]) -> str:
    """What names a checkpoint's bytes: the hash of its one part, or of what ``sha256sum`` prints for all of them."""
    if len(parts) == 1:
        return parts[0].sha256
    listing = "".join(f"{part.sha256}  {part.name}\n" for part in sorted(parts, key=lambda part: part.name))
    return hashlib.sha256(listing.encode()).hexdigest()


def folder_name(step: int, steps_per_epoch: int) -> str:
    """``epoch-0004`` at the end of epoch 4; ``epoch-0005-step-00000420`` inside epoch 5."""
    epochs, within = divmod(step, steps_per_epoch)
    return f"epoch-{epochs + 1:04d}-step-{step:08d}" if within else f"epoch-{epochs:04d}"


def is_folder_name(name: str) -> bool:
    """Whether a name in a run's folder is a checkpoint's."""
    return re.match(FOLDER, name) is not None


def step_of(name: str, steps_per_epoch: int) -> int:
    """The step that `folder_name` was given."""
    _, epoch, *step = name.partition(".")[0].split("-")
    return int(step[1]) if step else int(epoch) * steps_per_epoch

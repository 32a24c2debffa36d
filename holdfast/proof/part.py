"""The audit of one rank's part: a single process trains one rank's samples of a step, and compares the gradient.

Only the first step of a chunk can be audited in this way, because it depends only on the checkpoint before it and the
rank's samples. Each later step also depends on the gradients of all ranks.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast import checkpoint
from holdfast.checkpoint.departure import list_part_differences
from holdfast.errors import GateTripped, WrongUse
from holdfast.journal import Commit, Journal
from holdfast.machine.part import RankPart
from holdfast.proof.audit import list_notes, refuse_untrained
from holdfast.proof.replay import make_pruned_error, ranks_at
from holdfast.recipe.permission import BY_DEFAULT, Trust


class PartAudit(BaseModel):
    """The result of an audit of one rank's part of a step.

    Attributes:
        step: the step, the first of the commit's chunk.
        rank, ranks: the audited rank, and the number of ranks that trained the step.
        shares: the virtual ranks whose samples the rank has trained; empty without virtual ranks.
        differs_in: the names of the recorded values that differ, with their ranks; a cause comes before its effects.
        gate: why the gate refused the checkpoint to start from; empty if the gate passed it.
        notes: reasons why equal bits aren't promised here, and changes since the commit.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    commit: int
    path: str
    step: int
    rank: int
    ranks: int
    shares: list[int]
    differs_in: list[str] = []
    gate: str = ""
    notes: list[str] = []

    @property
    def is_identical(self) -> bool:
        return not self.differs_in and not self.gate

    @property
    def is_failed(self) -> bool:
        """Return whether the bits differ although equal bits are promised."""
        return not self.is_identical and not self.notes

    def __str__(self) -> str:
        shares = f" (share{'s' if len(self.shares) > 1 else ''} {', '.join(map(str, self.shares))})" * bool(self.shares)
        what = f"commit {self.commit} ({self.path}), step {self.step}, rank {self.rank} of {self.ranks}{shares}"
        if self.is_identical:
            return f"{what}: trained alone, it has the recorded gradient"
        if self.gate:
            return f"{what} can't be trained from the checkpoint before it\n  {self.gate}"
        lines = [f"{what}: trained alone, it differs from the record in {checkpoint.shorten(self.differs_in, 3)}"]
        return "\n".join([*lines, *(f"  equal bytes are not promised here: {note}" for note in self.notes)])


def audit_part(journal: Journal, commit: Commit, rank: int, trust: Trust = BY_DEFAULT) -> PartAudit:
    """Train one rank's part of the first step of a commit's chunk in a single process; compare it with the trail.

    The result is not recorded, because verdicts compare content ids, and a part of a step has no content id.

    Args:
        rank: the rank's number in the run.
        trust: which recipe to use, and whether to accept the recipe in the run's records.

    Raises:
        WrongUse: the trail has no such rank, or no gradient of single ranks; several ranks trained each sample
            together; this process takes other samples than the rank took; the checkpoint before the step was pruned; or
            the recipe is not trusted.
        CheckpointDamaged: the checkpoint before the step is damaged.
        RunStopped: the process ended early.
    """
    refuse_untrained(journal, commit)
    parent = journal.read_parent(commit)
    if parent is not None and journal.is_pruned(parent.number):
        raise make_pruned_error(journal, parent, commit)
    step = (parent.step if parent else 0) + 1
    parts, part = _find_part(journal, commit, rank, step)
    known: dict[str, Any] = {
        "run": journal.run, "commit": commit.number, "path": commit.path, "step": step, "rank": rank,
        "ranks": part.ranks, "shares": [*part.shares],
    }  # fmt: skip
    try:
        with ranks_at(journal, parent, commit, trust, part=part) as (ranks, present):
            notes = list_notes(journal, commit, present)
            ranks.rehearse(step, commit.config_fingerprint, is_kept=False, is_detailed=False)
            (line,) = ranks.await_rehearsed().lines
    except GateTripped as error:
        return PartAudit(**known, gate=str(error))
    again = line.get("parts", [])
    if _list_indices(parts) != _list_indices(again):
        raise WrongUse(
            f"--rank {rank}: alone, this process takes other samples in step {step} than rank {rank} has taken",
            hint="a pass of a torch DataLoader begins with this step, and the main rank has drawn its order; or the "
            "program divides its data by run.rank: audit another commit's chunk, or leave --rank out",
        )
    return PartAudit(**known, differs_in=list_part_differences(parts, again), notes=notes)


def _list_indices(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the digests of the samples' indices, from a rank's entries in the trail.

    An entry names its samples by two digests, of the indices and of the content, with a hyphen between them. A stream's
    samples have no indices and their names no hyphen; these entries are left out.
    """
    names = [str(each["samples"]) for each in parts if "samples" in each]
    return [name.partition("-")[0] for name in names if "-" in name]


def _find_part(journal: Journal, commit: Commit, rank: int, step: int) -> tuple[Sequence[dict[str, Any]], RankPart]:
    """Return a rank's entries in the trail's line of a step, and the part of the step that the rank trained."""
    lines = [line for line in checkpoint.read_commit_lines(journal.store, commit) if line["step"] == step]
    if any(line.get("skipped") for line in lines):
        raise WrongUse(
            f"--rank {rank}: step {step} of run {journal.run!r} was skipped: its batch was drawn and not trained",
            hint="--rank judges only the first step of a chunk; without --rank, an audit judges the whole chunk",
        )
    parts = [each for line in lines for each in line.get("parts", [])]
    ranks = sorted({each["rank"] for each in parts})
    own = [each for each in parts if each["rank"] == rank]
    if not any("gradient" in each for each in own or parts):
        raise WrongUse(
            f"--rank {rank}: the trail of commit {commit.number} has no gradient of a single rank",
            hint="none is recorded by one rank without virtual ranks, by ranks that hold shards, in a step that "
            "averages gradients before its last backward pass, in a skipped step, or by earlier versions: audit the "
            "chunk on as many ranks as trained it, without --rank",
        )
    if not own:
        raise WrongUse(
            f"--rank {rank}: ranks 0 to {ranks[-1]} have trained step {step} of run {journal.run!r}",
            hint=f"give one of them, for example --rank {ranks[-1]}",
        )
    if any("model_part" in each for each in own):
        raise WrongUse(
            f"--rank {rank}: several ranks have trained each sample of step {step} together, each with a part of the "
            "model: one process alone can't",
            hint="audit the chunk without --rank; --ranks needs only enough ranks to hold the model once",
        )
    shares = tuple(each["share"] for each in own if "share" in each)
    return own, RankPart(rank, len(ranks), shares)

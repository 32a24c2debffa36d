"""The explanation of a step whose loss may have jumped: the cause is the machine, the data or the parameters.

The step is trained again, from a checkpoint before it. If its bits differ from the bits on record, a machine has
computed wrongly, or the program isn't deterministic. If the bits are equal, the losses of the step's samples
are compared with the losses of the previous step's samples under the same parameters: if only this step's losses are
high, the data is bad; if both are high, the parameters are bad.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from holdfast import checkpoint
from holdfast.checkpoint.departure import find_departure
from holdfast.checkpoint.observed import Activation, SampleLoss, Update
from holdfast.config.steps import Steps
from holdfast.errors import WrongUse
from holdfast.journal import Commit, Journal
from holdfast.journal.configs import read_given
from holdfast.journal.spikes import WINDOW, UsualLoss, make_usual
from holdfast.proof.audit import describe_source, list_notes
from holdfast.proof.differing import Differing, to_fields
from holdfast.proof.replay import has_settings_of, ranks_at
from holdfast.provenance.canonical import finite_or_none
from holdfast.recipe.trust import BY_DEFAULT, Trust
from holdfast.terminal import counted
from holdfast.terminal.columns import tabulate

log = logging.getLogger(__name__)

Cause = Literal["bits", "data", "dynamics", "none", "unknown"]
# The replay trains LEAD steps before the explained step, to learn the usual range of each layer's outputs. If it would
# have to begin more than FURTHER steps before the nearest checkpoint, it begins with the nearest checkpoint instead.
LEAD, FURTHER = 8, 100
MEANINGS: dict[Cause, str] = {
    "bits": "the machine or the program: trained again, the step gives different bits. holdfast audit on another "
    "machine "
    "tells which of the two is the cause",
    "data": "data: with the same parameters, samples of this step have losses far above those of the step before",
    "dynamics": "dynamics: with the parameters before this step, the samples of the step before have high losses, too. "
    "An earlier update was too large: check whether the learning rate is too high",
    "none": "the loss of this step is not far from the losses before it",
    "unknown": "unknown cause: the bits are equal to the record, so the machine is not the cause",
}


class Explanation(Differing, BaseModel):
    """The explanation of one step.

    Attributes:
        step: the number of the explained step.
        commit: the number of the commit that has the step.
        start: the step after which the replay began.
        loss, grad_norm: the loss and the gradient norm of the step on record; None if not on record, or not finite.
        usual: the recorded losses of the steps before; None if fewer than three are on record.
        samples: the losses of the samples of the step and of the step before.
        updates: the largest changes of parameters in the step and in the step before.
        activations: the layers whose outputs left their range, in the order in which they were computed.
        notes: what was not observed.
        unpromised: changes since the commit, and the reasons why equal bits aren't promised here.
    """

    run: str
    step: int
    commit: int
    start: int
    loss: float | None
    grad_norm: float | None
    usual: UsualLoss | None
    samples: list[SampleLoss]
    updates: list[Update]
    activations: list[Activation]
    notes: list[str]
    unpromised: list[str]

    @property
    def cause(self) -> Cause:
        """Return the cause of the step's loss, a key of `MEANINGS`."""
        if self.first_step is not None and not self.unpromised:
            return "bits"
        if self.usual is not None and not self.usual.is_far(math.nan if self.loss is None else self.loss):
            return "none"
        before = [each.loss for each in self.samples if each.step < self.step]
        if usual := make_usual([loss for loss in before if math.isfinite(loss)]):
            if self.usual is not None and self.usual.is_far(usual.median):
                return "dynamics"
            if any(usual.is_far(each.loss) for each in self.samples if each.step == self.step):
                return "data"
        elif before:
            return "dynamics"  # no sample has a finite loss, so the parameters are the cause
        return "unknown"

    def list_far(self) -> list[SampleLoss]:
        """Return the step's samples, those with the largest losses first."""
        own = [each for each in self.samples if each.step == self.step]
        return sorted(own, key=lambda each: -(math.inf if math.isnan(each.loss) else each.loss))

    def describe(self, most: int) -> str:
        """Return the explanation for a person.

        Args:
            most: the largest number of samples, updates and layers to show.
        """
        return "\n".join([*self._describe_step(), *self._describe_rows(most), *self._describe_notes()])

    def _describe_step(self) -> Iterator[str]:
        norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:.4g}"
        yield f"step {self.step} of run {self.run} (commit {self.commit}): loss {_spell(self.loss)}{norm}"
        if self.usual:
            yield (
                f"  the {self.usual.count} steps before: median {self.usual.median:.4g}, "
                f"median absolute deviation {self.usual.deviation:.2g}"
            )
        same = "different bits than on record" if self.first_step else "the bits on record"
        yield f"  trained again from step {self.start}: {same}"
        yield from self.describe_first()
        yield f"cause: {MEANINGS[self.cause]}"

    def _describe_rows(self, most: int) -> Iterator[str]:
        if far := self.list_far()[:most]:
            yield "samples with the largest losses:"
            rows = [(str(each.index), each.content, _spell(each.loss), _spell(each.grad_norm)) for each in far]
            yield from (f"  {line}" for line in tabulate([("index", "content", "loss", "gradient norm"), *rows]))
            before = make_usual([each.loss for each in self.samples if each.step < self.step])
            if before:
                yield (
                    f"  the {before.count} samples of step {self.step - 1}, with the same parameters: "
                    f"median {before.median:.4g}"
                )
        if self.updates:
            yield "largest updates, relative to the parameter's norm:"
            chosen = [each for step in (self.step - 1, self.step) for each in self._updates_of(step)[:most]]
            changes = [(each.name, str(each.step), f"{each.size:.2g}") for each in chosen]
            yield from (f"  {line}" for line in tabulate([("parameter", "step", "change"), *changes]))
        if self.activations:
            first = self.activations[0]
            yield (
                f"first layer whose output left its range: {first.layer} on rank {first.rank}: "
                f"{first.largest:.4g}, at most {first.before:.4g} in the steps before"
            )

    def _updates_of(self, step: int) -> list[Update]:
        return [each for each in self.updates if each.step == step]

    def _describe_notes(self) -> Iterator[str]:
        yield from (f"  not observed: {note}" for note in self.notes)
        if self.first_step is not None:
            yield from (f"  equal bits are not promised here: {note}" for note in self.unpromised)


def explain_step(journal: Journal, step: int, most: int = 5, trust: Trust = BY_DEFAULT) -> Explanation:
    """Train a committed step again from a checkpoint before it, and observe it.

    Args:
        step: the step's number, from 1.
        most: how many of the step's samples get a gradient norm, and how many updates are kept.
        trust: the reader's own configuration, or the parts of the run's records to accept.

    Raises:
        WrongUse: the step isn't committed, or the checkpoint before it was pruned, or the recipe is not trusted.
        CheckpointDamaged, GateTripped: the checkpoint before it can't be restored.
        RunStopped: the ranks ended early.
    """
    commit, start = _find_commits(journal, step)
    begin = start.step if start else 0
    settings = journal.read_config(commit.config_fingerprint)
    if settings and step in Steps.parse(read_given(settings).skip):  # the trail may be lost
        raise WrongUse(f"step {step} of run {journal.run!r} was skipped: its batch was read, but not trained")
    trail = checkpoint.read_trail_before(journal, commit, step, WINDOW)
    log.info("training %s again, from step %d", counted(step - begin, "step"), begin)
    with ranks_at(journal, start, commit, trust) as (ranks, present):
        unpromised = [f"commit {commit.number} was pruned, and with its checkpoint the record of its machine"]
        if not journal.is_pruned(commit.number):
            unpromised = list_notes(journal, commit, present)
        found = ranks.observe(step, most)
    line: dict[str, Any] = next((line for line in trail if line["step"] == step), {})
    window = [each for line in trail if (each := _read_number(line, "loss")) is not None and line["step"] < step]
    return Explanation(
        run=journal.run,
        step=step,
        commit=commit.number,
        start=begin,
        loss=_read_number(line, "loss"),
        grad_norm=_read_number(line, "grad_norm"),
        usual=make_usual(window[-WINDOW:]),
        samples=found.samples,
        updates=found.updates,
        activations=found.activations,
        notes=found.notes,
        unpromised=unpromised,
        **to_fields(find_departure(trail, found.lines)),
    )


def _find_commits(journal: Journal, step: int) -> tuple[Commit, Commit | None]:
    """Return the commit that contains a step, and the commit to begin with; None to begin with the run's first step.

    Raises:
        WrongUse: no commit has the step, or the checkpoint before it was pruned.
    """
    newest = journal.newest()
    if newest is None or not 0 < step <= newest.step:
        committed = f"its newest commit has step {newest.step}" if newest else "it has no commits"
        raise WrongUse(f"step {step} of run {journal.run!r} is not committed: {committed}")
    commit = newest
    while (parent := journal.read_parent(commit)) and parent.step >= step:
        commit = parent
    if journal.is_given(commit):
        raise WrongUse(f"step {step} of run {journal.run!r} was not trained here: it was {describe_source(commit)}")
    starts = [*_list_starts(journal, commit)]
    if not starts:
        raise WrongUse(
            f"step {step} of run {journal.run!r} can't be trained again: no checkpoint before it is left",
            hint="retention.keep_last, retention.keep_every and holdfast pin keep more checkpoints",
        )
    steps = [start.step if start else 0 for start in starts]
    leads = [place for place, begin in enumerate(steps) if begin < step - LEAD and steps[0] - begin <= FURTHER]
    return commit, starts[leads[0] if leads else 0]


def _list_starts(journal: Journal, commit: Commit) -> Iterator[Commit | None]:
    """Yield the commits from which a commit's steps can be trained again, newest first; None for the run's beginning.

    All steps after such a start, up to ``commit``, were trained with the settings of ``commit``.
    """
    before = commit
    while has_settings_of(journal, before, commit) and not journal.is_given(before):
        parent = journal.read_parent(before)
        if parent is None:
            yield None
            return
        before = parent
        if not (journal.is_pruned(before.number) or journal.is_quarantined(before.number)):
            yield before


def _read_number(line: dict[str, Any], name: str) -> float | None:
    value = line.get(name)
    return finite_or_none(value) if isinstance(value, float) else None


def _spell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"

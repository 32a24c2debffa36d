"""`holdfast audit`: train committed steps of a run again, and compare the result with the checkpoint bit by bit."""

import logging
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, Field

from holdfast import checkpoint
from holdfast.attempt.lineage import Past, Present, changes_since, promise_for
from holdfast.checkpoint import Saved
from holdfast.errors import GateTripped, StoreError, WrongUse
from holdfast.extending import call_each, find_extensions
from holdfast.journal import AuditRecord, Commit, Journal, now
from holdfast.journal.audits import record_audit
from holdfast.journal.records import describe_rehearsals
from holdfast.journal.trainers import may_follow_resume
from holdfast.journal.verdict import AuditVerdict, Consequences, OnFault
from holdfast.machine.host import name_host
from holdfast.proof.differing import SHOWN_NAMES, Differing, find_difference
from holdfast.proof.replay import (
    has_settings_of,
    make_pruned_error,
    replayed,
)
from holdfast.provenance.drift import is_of_skips
from holdfast.recipe.trust import BY_DEFAULT, Trust
from holdfast.store import Store
from holdfast.terminal import counted

log = logging.getLogger(__name__)

# The keys of an environment that `holdfast.rank.record.CodeRecord` writes.
OF_THE_CODE = {"sources", "source_bytes", "packages", "package_files", "holdfast", "files", "built"}
EARLIER = "state that an earlier resume lost, because this replay began after that resume; --from begins earlier"


class Audit(Differing, BaseModel):
    """The result of an audit of one commit.

    Attributes:
        start, stop: the steps ``(start, stop]`` (all after ``start``, up to ``stop``) that were trained again, without
            a resume.
        from_commit: the number of the commit with whose checkpoint the replay began; 0 for the beginning of the run.
        resumes: the steps at which the run may have resumed. The replay doesn't resume at these steps, so it shows a
            faulty resume as a difference.
        unchecked: a text that says which part of the training was not checked, and why; empty if all was checked.
        expected, found: the committed content id, and the content id of the replay. ``found`` is empty if the gate
            refused the start.
        gate: why the gate refused the checkpoint to start from; empty if the gate passed it.
        ranks: the number of ranks that the caller chose for the replay; None for the run's own number.
        notes: reasons why equal bits aren't promised here, and changes since the commit.
        verdict: a sentence on the run's rehearsals up to the commit; see `describe_resume`. It isn't a verdict of
            audits.
        environment: the machine of the replay; empty if the gate refused the start.
    """

    run: str
    commit: int
    path: str
    start: int
    stop: int
    from_commit: int = 0
    resumes: list[int] = []
    unchecked: str = ""
    expected: str
    found: str = ""
    gate: str = ""
    ranks: int | None = None
    notes: list[str] = []
    verdict: str = ""
    environment: dict[str, Any] = Field(default={}, exclude=True)

    @property
    def is_identical(self) -> bool:
        return self.expected == self.found

    @property
    def is_failed(self) -> bool:
        """Return whether the bits differ although equal bits are promised."""
        return not self.is_identical and not self.notes

    def __str__(self) -> str:
        across = f", across the resume at {', '.join(map(str, self.resumes))}" if self.resumes else ""
        what = f"commit {self.commit} ({self.path}, steps {self.start}-{self.stop}{across})"
        on = f" on {counted(self.ranks, 'rank')}" if self.ranks else ""
        if self.is_identical:
            lines = [f"{what}: replayed{on} to the same bytes, {self.expected}"]
        elif self.gate:
            lines = [f"{what} can't be replayed from commit {self.from_commit}", f"  {self.gate}"]
        else:
            lines = [f"{what}: the replay{on} ends on different bytes: {self.found[:12]}, not {self.expected[:12]}"]
            lines += self.describe_difference()
        is_told = self.unchecked and (self.is_identical or self.unchecked != EARLIER)
        lines += [f"  not checked: {self.unchecked}"] if is_told else []
        lines += [f"  {self.verdict}"] if self.verdict else []
        notes = [] if self.is_identical else self.notes
        return "\n".join([*lines, *(f"  equal bytes are not promised here: {note}" for note in notes)])


def audit_commit(
    journal: Journal, commit: Commit, start: int | None = None, ranks: int | None = None, trust: Trust = BY_DEFAULT
) -> Audit:
    """Replay the steps up to a commit in fresh processes, and compare the content ids; if they differ, the trails, too.

    Args:
        start: the number of the commit to begin with, 0 for the beginning of the run. By default the replay begins with
            the commit's parent. If the run may have been resumed from the parent, the replay begins one commit earlier:
            a replay from the parent would begin with the same resume, and so repeat the faults of that resume.
        ranks: the number of ranks of the replay; None for the run's own number.
        trust: the reader's own configuration, or the parts of the run's records to accept.

    Raises:
        WrongUse: the start isn't an ancestor of the commit, or its checkpoint was pruned; or equal bytes aren't
            promised on this number of ranks, or the recipe is not trusted.
        CheckpointDamaged: the start, or the commit itself, is damaged.
        RunStopped: the replay ended early.
    """
    refuse_untrained(journal, commit)
    span = choose_span(journal, commit) if start is None else _span_from(journal, commit, start)
    begin = span.start
    known: dict[str, Any] = {
        "run": journal.run, "commit": commit.number, "path": commit.path, "start": begin.step if begin else 0,
        "stop": commit.step, "from_commit": begin.number if begin else 0, "resumes": span.resumes,
        "unchecked": span.unchecked, "expected": commit.checkpoint_sha256, "ranks": ranks,
        "verdict": describe_rehearsals(commit, journal.store.url) if commit.rehearsed or commit.inexact else "",
    }  # fmt: skip
    try:
        with replayed(journal, begin, commit, trust, ranks) as (saved, folder, present):
            notes = list(dict.fromkeys(note for each in span.commits for note in list_notes(journal, each, present)))
            found = saved.metadata.checkpoint_sha256
            known |= {"found": found, "notes": notes, "environment": _describe_machine(present)}
            if found == commit.checkpoint_sha256:
                return Audit(**known)
            return Audit(**known, **_difference(journal, span, saved, folder))
    except GateTripped as error:
        # The gate refused the state that was restored, so the replay differs even before its first step.
        return Audit(**known, gate=str(error), different=error.data.get("different", []))


def keep_audit(journal: Journal, audit: Audit, seed: int | None = None, share: float | None = None) -> None:
    """Write an audit's record to the run. If the store is read-only here, log a warning instead.

    Args:
        seed: the seed with which the commit was chosen; None if a person chose it.
        share: the fraction of the run's training time that audits may take; None if no such share chose the commit.
    """
    record = AuditRecord(
        commit=audit.commit,
        number=1,
        from_commit=audit.from_commit,
        checkpoint_sha256=audit.found,
        notes=audit.notes,
        host=name_host(),
        environment=audit.environment,
        created_at=now(),
        resumes=audit.resumes,
        first_step=audit.first_step,
        first_differs_in=audit.first_differs_in[:SHOWN_NAMES],
        first_tensors=audit.first_tensors[:SHOWN_NAMES],
        seed=seed,
        share=share,
    )
    try:
        record_audit(journal, record)
    except StoreError as error:
        log.warning("the audit's result can't be recorded: %s", error)


def follow_verdict(journal: Journal, verdict: AuditVerdict, on_fault: OnFault = "record") -> Consequences:
    """Let the extensions follow a verdict: they may quarantine a machine, and hold or roll back the run.

    Args:
        on_fault: what the user asked for if the verdict names a machine.
    """
    found: list[Consequences] = [*call_each("verdict", journal, verdict, on_fault)]
    return Consequences([line for each in found for line in each.lines], next((e.ask for e in found if e.ask), None))


def check_on_fault(on_fault: OnFault) -> None:
    """Check that an extension can do what the user asks for.

    Raises:
        WrongUse: no extension follows verdicts.
    """
    if on_fault != "record" and not any(each.verdict for each in find_extensions()):
        raise WrongUse(f"--on-fault {on_fault}: no installed extension does this after a verdict")


def _describe_machine(present: Present) -> dict[str, Any]:
    """Return a replay's environment without the entries that describe code, which the commit's records already have."""
    return {name: value for name, value in present.environment.items() if name not in OF_THE_CODE}


@dataclass(frozen=True)
class Span:
    """The steps that an audit trains again.

    Args:
        start: the commit to begin with; None for the beginning of the run.
        commits: the commits of these steps, oldest first; the last one is audited.
        unchecked: see `Audit`.
    """

    start: Commit | None
    commits: list[Commit]
    unchecked: str = ""

    @property
    def resumes(self) -> list[int]:
        """Return the steps at which the run may have been resumed, but where the replay trains on without a resume."""
        pairs = pairwise(self.commits)
        return [before.step for before, commit in pairs if may_follow_resume(before, commit)]


def choose_span(journal: Journal, commit: Commit) -> Span:
    """Return the steps that an audit of a commit trains again by default; see `audit_commit`.

    Raises:
        NameMissing, RecordDamaged: the record of an earlier commit can't be read.
    """
    parent = journal.read_parent(commit)
    if parent is None or not (may_follow_resume(parent, commit) or journal.is_unpacked(parent)):
        return Span(parent, [commit], EARLIER if parent is not None and parent.attempt > 1 else "")
    before = journal.read_parent(parent)
    settings = journal.read_config(commit.config_fingerprint)
    reason = ""
    if before is None and settings is not None and settings.identity.get("init_from"):
        reason = "the run began with another run's weights"
    elif journal.is_given(parent):
        reason = f"the run began with {'another program' if parent.origin else 'another run'}'s checkpoint"
    elif not has_settings_of(journal, parent, commit):
        reason = "the settings were changed at that step"
    elif before is not None and (journal.is_pruned(before.number) or journal.is_quarantined(before.number)):
        given_up = "pruned" if journal.is_pruned(before.number) else "quarantined"
        reason = f"commit {before.number} was {given_up}, so the replay can't begin before commit {parent.number}"
    if reason:
        return Span(parent, [commit], f"the replay begins with the resume at step {parent.step}: {reason}")
    return Span(before, [parent, commit])


def _span_from(journal: Journal, commit: Commit, number: int) -> Span:
    """Return the span from the commit of this number (0 for the beginning of the run) to ``commit``.

    Raises:
        WrongUse: the start isn't an ancestor of the commit or was pruned, or the settings were changed in between.
    """
    commits, start = [commit], commit
    furthest: Commit | None = None
    while start.number > number and (parent := journal.read_parent(start)):
        start = parent
        furthest = furthest if journal.is_pruned(start.number) else start
        commits.insert(0, start)
    if journal.is_given(start) and (number == 0 or number == commit.number):
        raise _not_trained(journal, start)
    if number == 0 and not start.parent:
        span = Span(None, commits)
    elif start.number == number and number != commit.number:
        span = Span(commits.pop(0), commits)
    else:
        raise WrongUse(
            f"--from {number}: commit {commit.number} of run {journal.run!r} doesn't continue from commit {number}",
            hint=f"give an ancestor of commit {commit.number}, or 0 for the beginning of the run",
        )
    if span.start is not None and journal.is_pruned(number):
        error = make_pruned_error(journal, span.start, commit)
        hint = (
            f"begin with the oldest checkpoint that is left: --from {furthest.number}"
            if furthest
            else "use --from 0, the beginning of the run"
        )
        raise WrongUse(error.message, hint=hint)
    for each in span.commits:
        if not has_settings_of(journal, each, commit):
            raise WrongUse(
                f"--from {number}: the run's settings were changed after commit {each.number}",
                hint="an audit trains with one set of settings: give a commit after the change",
            )
    return span


def refuse_untrained(journal: Journal, commit: Commit) -> None:
    """Raise WrongUse if a commit was imported or unpacked: this run has not trained it, so it can't be replayed."""
    if journal.is_given(commit):
        raise _not_trained(journal, commit)


def _not_trained(journal: Journal, commit: Commit) -> WrongUse:
    return WrongUse(
        f"commit {commit.number} of run {journal.run!r} was not trained here: it was {describe_source(commit)}",
        hint="audit a later commit: its audit can begin with this commit",
    )


def describe_source(commit: Commit) -> str:
    """Return the source of a commit's checkpoint that the run hasn't trained, as the end of a sentence."""
    return f"imported from {commit.origin}" if commit.origin else "unpacked from another run's checkpoint"


def list_notes(journal: Journal, commit: Commit, present: Present) -> list[str]:
    """Return the changes since a commit, and the reasons why equal bits aren't promised here."""
    past = Past.read(journal, commit)
    # A changed package is left out here, because the reasons of `promise_for` name the package. A different version of
    # Holdfast stays in, because these reasons don't name it: every version of Holdfast has to compute the same bits.
    found = changes_since(past, present)
    changes = [str(change) for change in found if change.kind != "package" and not is_of_skips(change)]
    return [*changes, *promise_for(past, present).reasons]


def _difference(journal: Journal, span: Span, saved: Saved, folder: Store) -> dict[str, Any]:
    commit = span.commits[-1]
    expected = [line for each in span.commits for line in checkpoint.read_commit_lines(journal.store, each)]
    ends = checkpoint.read_payload(journal.store, commit), checkpoint.read_saved(folder, saved)
    return find_difference((expected, checkpoint.read_checkpoint_lines(folder, saved.path)), ends)


def list_replayable(journal: Journal) -> list[Commit]:
    """Return the commits that can be replayed from their parent's checkpoint, newest first."""
    there = {commit.number: commit for commit in journal.candidates()}
    return [
        each for each in there.values() if not (journal.is_given(each) or (each.parent and each.parent not in there))
    ]


def choose_commits(journal: Journal, number: int, seed: int | None = None) -> list[Commit]:
    """Return random commits that can be replayed, oldest first; all if there are at most ``number`` of them.

    Args:
        seed: equal seeds choose the same commits; None for a random choice.
    """
    replayable = list_replayable(journal)
    chosen = random.Random(seed).sample(replayable, min(number, len(replayable)))
    return sorted(chosen, key=lambda commit: commit.number)

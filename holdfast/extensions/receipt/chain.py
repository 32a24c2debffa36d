"""The chain of commits that led to a checkpoint, as a receipt describes it."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from holdfast.errors import RecordDamaged, WrongUse
from holdfast.journal import AttemptRecord, Commit, Journal, record_name
from holdfast.journal.audits import find_certifying, list_audits
from holdfast.journal.trainers import list_trainers
from holdfast.provenance.fingerprint import to_plain

# A pair: a commit, and the SHA-256 of its record's bytes.
Hashed = tuple[Commit, str]


class ReceiptPart(BaseModel):
    """The base class of a receipt's parts. Unknown fields are refused, because no check would cover them."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ChainLink(ReceiptPart):
    """One commit of the chain.

    Attributes:
        parent: the number of the commit from which this commit was trained; 0 for the first commit.
        checkpoint_sha256: the checkpoint's content id.
        record_sha256: the SHA-256 of the commit's record.
        settings: the fingerprint of the commit's settings.
        attempts: the attempts that may have trained this commit.
        certified_by: the hosts that have trained the commit again to the same bytes, without the hosts of these
            attempts.
        rehearsed: the steps of the last rehearsals with equal bits, in this commit or its ancestors.
        inexact: how a rehearsal in this commit or its ancestors differed, if the run continued nevertheless.
        origin: where the checkpoint was imported from; None if it was not imported.
    """

    commit: int = Field(ge=1)
    parent: int = Field(ge=0)
    step: int
    checkpoint_sha256: str
    record_sha256: str
    settings: str
    attempts: list[int]
    certified_by: list[str]
    rehearsed: list[int]
    inexact: str
    origin: dict[str, Any] | None


class AttemptFacts(ReceiptPart):
    """The machine and the code of an attempt, and the changes that it accepted; see `AttemptRecord`."""

    host: str
    environment: dict[str, Any]
    lineage: dict[str, Any]


class Chain(ReceiptPart):
    """The statement of a receipt about a run.

    Attributes:
        chain: the commits from the run's first commit to the receipt's commit, oldest first.
        settings: the settings on which the trained numbers depend, and the digest of the data, by the fingerprint of
            both.
        attempts: the attempts that trained the chain, by number.
        exported: the part of the model whose weights are in the signed files; empty for the whole model, None if the
            checkpoint's own files are signed.
    """

    run: str
    holdfast: str
    created_at: str
    chain: list[ChainLink] = Field(min_length=1)
    settings: dict[str, dict[str, Any]]
    attempts: dict[int, AttemptFacts]
    exported: str | None

    @property
    def commit(self) -> ChainLink:
        """Return the link of the commit that the receipt is about."""
        return self.chain[-1]


def list_line(journal: Journal, number: int) -> list[Hashed]:
    """Return a commit and all its ancestors, oldest first, each with the SHA-256 of its record.

    Raises:
        RecordDamaged: a commit's record is lost, or can't be read.
    """
    line: list[Hashed] = []
    while True:
        commit, sha256 = journal.read_hashed(number)
        if commit is None or commit.parent >= number:
            raise RecordDamaged(f"run {journal.run!r} has no {record_name('commits', number)} that can be read")
        line.append((commit, sha256))
        if journal.is_given(commit) or not commit.parent:
            return line[::-1]
        number = commit.parent


def describe_line(journal: Journal, line: Sequence[Hashed]) -> tuple[list[ChainLink], dict[int, AttemptFacts]]:
    """Return a link for each commit, and the facts of the attempts that trained these commits.

    Raises:
        NameMissing, RecordDamaged: the record of an attempt is lost or damaged.
    """
    audits = list_audits(journal)
    links: list[ChainLink] = []
    attempts: dict[int, AttemptFacts] = {}
    for commit, sha256 in line:
        trainers = [] if journal.is_given(commit) else list_trainers(journal, commit)
        links.append(_describe(journal, commit, sha256, trainers, audits.get(commit.number, ())))
        attempts |= {each.number: _describe_attempt(each) for each in trainers}
    return links, attempts


def read_settings(journal: Journal, line: Sequence[Hashed]) -> dict[str, dict[str, Any]]:
    """Return the settings that the commits of a chain were trained with, by fingerprint: those that change the results.

    Raises:
        WrongUse: the settings of a commit were lost.
    """
    settings: dict[str, dict[str, Any]] = {}
    for commit, _ in line:
        if commit.config_fingerprint in settings:
            continue
        record = journal.read_config(commit.config_fingerprint)
        if record is None:
            raise WrongUse(f"the settings of commit {commit.number} of run {journal.run!r} were lost")
        settings[commit.config_fingerprint] = to_plain(record.identity)
    return settings


def _describe(
    journal: Journal, commit: Commit, sha256: str, trainers: Sequence[AttemptRecord], audits: Sequence[int]
) -> ChainLink:
    """Return a commit as a link of the chain.

    Args:
        sha256: the SHA-256 of the commit's record.
        trainers: the attempts that may have trained it.
        audits: the numbers of the commit's audits.
    """
    certifying = find_certifying(journal, commit, audits)
    return ChainLink(
        commit=commit.number,
        parent=commit.parent,
        step=commit.step,
        checkpoint_sha256=commit.checkpoint_sha256,
        record_sha256=sha256,
        settings=commit.config_fingerprint,
        attempts=[each.number for each in trainers],
        certified_by=sorted({each.host for each in certifying}),
        rehearsed=commit.rehearsed,
        inexact=commit.inexact,
        origin=commit.origin.model_dump() if commit.origin else None,
    )


def _describe_attempt(attempt: AttemptRecord) -> AttemptFacts:
    return AttemptFacts(host=attempt.host, environment=attempt.environment, lineage=attempt.lineage)

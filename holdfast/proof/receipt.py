"""A receipt: a signed file about a checkpoint and the chain of commits that led to it, which a stranger can check.

A receipt is a DSSE envelope around an in-toto statement. Its subjects are the files of the checkpoint and the record of
its commit; its predicate has the chain: what was trained with which settings, code, data and machines, and which
commits other machines have trained again. A stranger with the run's store, code and data checks that the store has this
chain, and trains chunks again that a public seed chooses. `holdfast/FORMAT.md` lists the fields.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast import __version__
from holdfast.errors import NotTrusted, WrongUse
from holdfast.journal import AttemptRecord, Commit, Journal, list_audits, list_trainers, now, record_name
from holdfast.journal.audits import find_certifying
from holdfast.journal.records import RunRecord
from holdfast.journal.signature import PAYLOAD_TYPE, STATEMENT_TYPE, SigningKey, TrustedKey, open_envelope
from holdfast.journal.signing import list_files
from holdfast.proof.audit import Audit, audit_commit
from holdfast.provenance.canonical import dump_json
from holdfast.provenance.fingerprint import fingerprint
from holdfast.recipe.permission import BY_DEFAULT, Trust
from holdfast.terminal import counted

PREDICATE_TYPE = "urn:holdfast:receipt:v1"
MAX_RECEIPT_BYTES = 2**28
CHUNKS = 3  # chunks that are trained again by default
SHOWN_FORGED = (1, 2, 5)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ChainLink(_Part):
    """One commit of the chain.

    Attributes:
        parent: the commit that it was trained from; 0 for none.
        checkpoint_sha256: the checkpoint's content id.
        record_sha256: the SHA-256 of the commit's record.
        settings: the fingerprint of its settings.
        attempts: the attempts that may have trained it.
        certified_by: the hosts, other than those of the attempts, that have trained it again to the same bytes.
        rehearsed: the steps of the last rehearsals of its line that were equal.
        inexact: how a rehearsal of its line differed, where the run went on all the same.
        origin: where an imported checkpoint comes from.
    """

    commit: int = Field(ge=1)
    parent: int = Field(ge=0)
    step: int
    checkpoint_sha256: str
    record_sha256: str
    settings: str
    attempts: list[int]
    certified_by: list[str] = []
    rehearsed: list[int] = []
    inexact: str = ""
    origin: dict[str, Any] | None = None


class AttemptFacts(_Part):
    """The machine and the code of an attempt, and what it had changed; see `AttemptRecord`."""

    host: str
    environment: dict[str, Any]
    lineage: dict[str, Any]


class Chain(_Part):
    """The predicate of a receipt.

    Attributes:
        chain: the commits from the run's first to the receipt's, oldest first.
        settings: what the trained numbers depend on (the identity), by fingerprint; it has the digest of the data.
        attempts: the attempts that trained the chain, by number.
    """

    run: str
    holdfast: str
    created_at: str
    chain: list[ChainLink] = Field(min_length=1)
    settings: dict[str, dict[str, Any]]
    attempts: dict[int, AttemptFacts]


class _Digest(_Part):
    sha256: str


class _Subject(_Part):
    name: str
    digest: _Digest


class _Statement(_Part):
    type: str = Field(alias="_type")
    subject: list[_Subject]
    predicate_type: str = Field(alias="predicateType")
    predicate: Chain


@dataclass(frozen=True)
class Receipt:
    """A receipt whose signature is good.

    Attributes:
        key_id: the id of the key that has signed it.
        subjects: the SHA-256 of each file of the checkpoint, and of the commit's record, by name in the run's folder.
    """

    key_id: str
    subjects: dict[str, str]
    chain: Chain

    @property
    def commit(self) -> ChainLink:
        """Return the link of the commit that the receipt is about."""
        return self.chain.chain[-1]


def make_receipt(journal: Journal, commit: Commit, key: SigningKey) -> bytes:
    """Return a signed receipt of a commit.

    Raises:
        WrongUse: the settings of a commit were lost.
        NameMissing, RecordDamaged: a record of the chain is lost or damaged.
    """
    run, audits = journal.read_run(), list_audits(journal)
    line = _list_line(journal, run, commit)
    trainers = {each.number: [] if _is_given(run, each) else list_trainers(journal, each) for each in line}
    settings: dict[str, dict[str, Any]] = {}
    for found in line:
        if found.config_fingerprint in settings:
            continue
        record = journal.read_config(found.config_fingerprint)
        if record is None:
            raise WrongUse(f"the settings of commit {found.number} of run {journal.run!r} were lost")
        settings[found.config_fingerprint] = record.identity
    links = [_describe(journal, found, trainers[found.number], audits.get(found.number, ())) for found in line]
    chain = Chain(
        run=journal.run,
        holdfast=__version__,
        created_at=now(),
        chain=links,
        settings=settings,
        attempts={each.number: _describe_attempt(each) for found in trainers.values() for each in found},
    )
    subjects = _list_subjects(commit, links[-1].record_sha256)
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": each}} for name, each in subjects.items()],
        "predicateType": PREDICATE_TYPE,
        "predicate": chain.model_dump(mode="json"),
    }
    return key.seal(dump_json(statement))


def open_receipt(envelope: bytes, trusted: Sequence[TrustedKey]) -> Receipt:
    """Return a receipt that one of the keys has signed.

    Raises:
        NotTrusted: none of the keys has signed it, or it is no receipt.
    """
    if len(envelope) > MAX_RECEIPT_BYTES:
        _refuse(f"it has over {MAX_RECEIPT_BYTES} bytes")
    key_id, payload_type, payload = open_envelope(envelope, trusted, "the signature of the receipt")
    try:
        statement = _Statement.model_validate_json(payload)
    except ValidationError as error:
        _refuse(f"the signed statement is no receipt: {error.errors()[0]['msg']}")
    types = (payload_type, statement.type, statement.predicate_type)
    if types != (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE):
        _refuse(f"the signed statement is no receipt: its types are {types}")
    return Receipt(key_id, {each.name: each.digest.sha256 for each in statement.subject}, statement.predicate)


def check_receipt(journal: Journal, receipt: Receipt) -> list[Commit]:
    """Check that a run on a store has the chain of a receipt; return the chain's commits, oldest first.

    The chain's checkpoints are not read: retention may have pruned most. `holdfast verify` reads those that there are.

    Raises:
        NotTrusted: the chain contradicts itself, or the run's records.
    """
    chain = receipt.chain
    if chain.run != journal.run:
        _refuse(f"it is about run {chain.run!r}, not {journal.run!r}")
    for print_, identity in chain.settings.items():
        if fingerprint(identity) != print_:
            _refuse(f"the settings {print_[:12]} have another fingerprint")
    run = journal.read_run()
    commits: list[Commit] = []
    for link in chain.chain:
        name = record_name("commits", link.commit)
        commit, sha256 = journal.read_hashed(link.commit)
        if commit is None or sha256 != link.record_sha256:
            _refuse(f"run {journal.run!r} has {'another' if commit else 'no'} {name}")
        if commits and commit.parent != commits[-1].number:
            _refuse(f"commit {commit.number} does not continue from commit {commits[-1].number}")
        if not commits and commit.parent and not _is_given(run, commit):
            _refuse(f"the chain begins with commit {commit.number}, which continues from commit {commit.parent}")
        told = link.checkpoint_sha256, link.settings, link.step
        if told != (commit.checkpoint_sha256, commit.config_fingerprint, commit.step):
            _refuse(f"its line about commit {commit.number} is not what {name} has")
        if link.settings not in chain.settings:
            _refuse(f"the settings of commit {commit.number} are missing")
        commits.append(commit)
    if receipt.subjects != _list_subjects(commits[-1], receipt.commit.record_sha256):
        _refuse(f"its files are not those of commit {commits[-1].number}")
    return commits


class ReceiptAudit(BaseModel):
    """The result of an audit of a receipt.

    Attributes:
        audits: the audits of the chosen commits.
        replayable: the number of commits that can be trained again here, because their start is still there.
        unchecked: the commits that can't be trained again.
        seed: the public seed that chose the commits.
    """

    run: str
    commit: int
    key_id: str
    commits: int
    audits: list[Audit]
    replayable: int
    unchecked: list[int]
    seed: int

    @property
    def is_good(self) -> bool:
        """Return whether each of the chosen chunks ended on the same bytes."""
        return all(each.is_identical for each in self.audits)

    def chance(self, forged: int) -> float:
        """Return the probability that a chain with so many forged chunks passes, if the seed isn't known beforehand."""
        if forged > self.replayable - len(self.audits):
            return 0.0
        return math.comb(self.replayable - forged, len(self.audits)) / math.comb(self.replayable, len(self.audits))

    def __str__(self) -> str:
        lines = [
            f"receipt of commit {self.commit} of run {self.run}, signed by {self.key_id[:16]}: its "
            f"{counted(self.commits, 'commit')} are those of the store",
            *map(str, self.audits),
            f"{len(self.audits)} of {counted(self.replayable, 'chunk')} trained again, chosen by seed {self.seed}: "
            + ("all end on the same bytes" if self.is_good else "NOT all end on the same bytes"),
        ]
        if self.is_good:
            shown = [number for number in SHOWN_FORGED if number <= self.replayable]
            chances = ", ".join(f"{number}: {100 * self.chance(number):.3g} %" for number in shown)
            lines.append(f"the probability that as many forged chunks among these would have passed: {chances}")
        if self.unchecked:
            numbers = ", ".join(map(str, self.unchecked))
            lines.append(f"not checked, because the checkpoint before was pruned: {numbers}")
        return "\n".join(lines)


def audit_receipt(
    journal: Journal, receipt: Receipt, chunks: int, seed: int, trust: Trust = BY_DEFAULT
) -> ReceiptAudit:
    """Check a receipt against a run's records, and train chunks of its chain again that a seed chooses.

    Args:
        chunks: the number of chunks to train again; all if there are no more.
        seed: the seed. Choose it after the receipt was made: who knows it beforehand can forge other chunks.
        trust: how to choose the recipe, and whether to accept the one in the run's records.

    Raises:
        NotTrusted: the receipt contradicts the run's records.
        WrongUse: no chunk can be trained again, or the recipe is not trusted.
        CheckpointDamaged: a checkpoint is damaged.
        RunStopped: a replay ended early.
    """
    commits = check_receipt(journal, receipt)
    run = journal.read_run()
    own = [each for each in commits if not _is_given(run, each)]
    replayable = [each for each in own if not (each.parent and journal.is_pruned(each.parent))]
    if not replayable:
        raise WrongUse(
            f"no commit of run {journal.run!r} can be trained again: all checkpoints before them were pruned",
            hint="retention.keep_every keeps checkpoints for such audits",
        )
    chosen = random.Random(seed).sample(replayable, min(chunks, len(replayable)))
    return ReceiptAudit(
        run=journal.run,
        commit=commits[-1].number,
        key_id=receipt.key_id,
        commits=len(commits),
        audits=[audit_commit(journal, each, trust=trust) for each in sorted(chosen, key=lambda each: each.number)],
        replayable=len(replayable),
        unchecked=[each.number for each in own if each not in replayable],
        seed=seed,
    )


def _list_line(journal: Journal, run: RunRecord, commit: Commit) -> list[Commit]:
    """Return a commit after all its ancestors, oldest first."""
    line = [commit]
    while not _is_given(run, line[-1]) and (parent := journal.read_parent(line[-1])):
        line.append(parent)
    return line[::-1]


def _is_given(run: RunRecord, commit: Commit) -> bool:
    """Return whether a run began with this commit's checkpoint, which it hasn't trained."""
    return bool(commit.origin) or (run.packed and commit.number == run.first_commit)


def _describe(journal: Journal, commit: Commit, trainers: Sequence[AttemptRecord], audits: Sequence[int]) -> ChainLink:
    """Return the link of a commit.

    Args:
        trainers: the attempts that may have trained it.
        audits: the numbers of its audits.
    """
    certifying = find_certifying(journal, commit, audits)
    return ChainLink(
        commit=commit.number,
        parent=commit.parent,
        step=commit.step,
        checkpoint_sha256=commit.checkpoint_sha256,
        record_sha256=journal.record_sha256(commit.number),
        settings=commit.config_fingerprint,
        attempts=[each.number for each in trainers],
        certified_by=sorted({each.host for each in certifying}),
        rehearsed=commit.rehearsed,
        inexact=commit.inexact,
        origin=commit.origin.model_dump() if commit.origin else None,
    )


def _describe_attempt(attempt: AttemptRecord) -> AttemptFacts:
    return AttemptFacts(host=attempt.host, environment=attempt.environment, lineage=attempt.lineage)


def _list_subjects(commit: Commit, record_sha256: str) -> dict[str, str]:
    """Return the SHA-256 of a commit's record, and of each file of its checkpoint, by name in the run's folder."""
    return {record_name("commits", commit.number): record_sha256} | list_files(commit)


def _refuse(problem: str) -> NoReturn:
    raise NotTrusted(f"the receipt: {problem}", hint="don't trust this checkpoint; ask whoever signed the receipt")

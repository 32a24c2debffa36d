"""A person's answers to the verdicts of audits: the reason why the run continues although its bytes may be wrong."""

import contextlib

from pydantic import Field

from holdfast.errors import NameTaken
from holdfast.journal.audits import UNREADABLE, Audits, list_audits
from holdfast.journal.chains import list_doubts
from holdfast.journal.journal import Journal
from holdfast.journal.records import Record, Time, audit_name, now, read_record
from holdfast.journal.skips import name_writer
from holdfast.journal.verdict import AuditVerdict

ANSWERS = "answers"


class AnswerRecord(Record):
    """``answers/00000007-00000002.json``: a person's answer to the verdict on commit 7 after its second audit."""

    commit: int = Field(ge=1)
    number: int = Field(
        ge=1, description="the number of the commit's newest audit; after a later audit the verdict needs a new answer"
    )
    reason: str
    by: str = Field(description="who answered: the user and the host")
    created_at: Time

    def __str__(self) -> str:
        return f"answered by {self.by} on {self.created_at}: {self.reason}"


def answer_name(commit: int, number: int) -> str:
    """Return the name of the answer to a commit's verdict after this audit: ``answers/00000007-00000002.json``."""
    return audit_name(commit, number).replace("audits/", f"{ANSWERS}/", 1)


def record_answer(journal: Journal, commit: int, reason: str) -> AnswerRecord:
    """Record a person's answer to the verdict on a commit. An earlier answer after the same audit stays.

    Raises:
        StoreError: the store can't be written.
    """
    number = max(list_audits(journal).get(commit, [1]))
    record = AnswerRecord(commit=commit, number=number, reason=reason, by=name_writer(), created_at=now())
    name = answer_name(commit, number)
    with contextlib.suppress(NameTaken):
        journal.store.create(name, record.to_bytes())
        journal.enter(name)
    return record


def find_answer(journal: Journal, commit: int, audits: Audits) -> AnswerRecord | None:
    """Return the answer to the verdict on a commit; None if nobody has answered since the commit's last audit."""
    newest = max(audits.get(commit, []), default=0)
    if newest:
        with contextlib.suppress(*UNREADABLE):
            return read_record(journal.store, AnswerRecord, answer_name(commit, newest))
    return None


def list_unanswered(journal: Journal, audits: Audits | None = None) -> list[AuditVerdict]:
    """Return the verdicts that put the run's bytes in doubt and that nobody has answered, oldest commit first.

    A verdict counts as answered in three cases: its commit is quarantined, as after a rollback; two other machines have
    refuted the verdict; or a person has given a reason, and no later audit of the commit was made.

    Args:
        audits: the result of `list_audits`; None to read it from the journal.
    """
    audits = list_audits(journal) if audits is None else audits
    return [each for each in list_doubts(journal, audits) if find_answer(journal, each.commit, audits) is None]


def describe_answered(journal: Journal, audits: Audits | None = None) -> list[str]:
    """Return a line for each verdict that a person has answered, with the answer; see `list_unanswered`."""
    audits = list_audits(journal) if audits is None else audits
    found = ((each, find_answer(journal, each.commit, audits)) for each in list_doubts(journal, audits))
    return [f"commit {each.commit}: {answer}" for each, answer in found if answer is not None]


def describe_unanswered(journal: Journal, audits: Audits | None = None) -> list[str]:
    """Return a line for each verdict of `list_unanswered`, with the command that answers it."""
    return [_describe(each, journal.store.url) for each in list_unanswered(journal, audits)]


def _describe(verdict: AuditVerdict, url: str) -> str:
    if verdict.ask is not None:
        return f"{verdict.describe()}; next: {str(verdict.ask).replace('RUN', url, 1)}"
    back = f"holdfast audit {url} --commit {verdict.commit} --on-fault rollback, or " if verdict.host else ""
    return f"{verdict.describe()}; to answer: {back}holdfast release {url} --reason TEXT"

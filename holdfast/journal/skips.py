"""The skip list of a run: the steps whose batches are drawn but not trained, and the author of the list.

``skips/00000001.json`` is the first list; each later list replaces the previous one. The records are created once, and
each commit names the skip list that was in force during its training.
"""

import contextlib
import getpass
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from holdfast.config.steps import Steps
from holdfast.errors import NameMissing, NameTaken, NotTrusted, RecordDamaged
from holdfast.journal.journal import Journal
from holdfast.journal.records import MAX_RECORD_BYTES, Record, Time, now, record_name
from holdfast.machine.host import name_host

if TYPE_CHECKING:
    from holdfast.journal.signature import SigningKey, TrustedKey

SKIPS = "skips"

StepsText = Annotated[str, AfterValidator(lambda text: str(Steps.parse(text)))]


class SkipRecord(Record):
    """``skips/00000001.json``: the steps that a run skips from now on, besides its configuration's steps."""

    number: int = Field(ge=1)
    skip: StepsText = Field(description="all steps to skip, such as 1200-1210,1300; empty for none")
    changed: StepsText = Field(description="the steps that this list adds to the previous list, or removes")
    is_off: bool = Field(description="whether this list removes the changed steps")
    first_commit: int = Field(ge=1, description="the first commit that no longer counts, because it has a changed step")
    by: str = Field(description="the author of the list: user and host")
    reason: str
    created_at: Time

    @property
    def names(self) -> list[str]:
        """The names of the record and of its signature, if there is one."""
        return [record_name(SKIPS, self.number), sign_name(self.number)]

    def __str__(self) -> str:
        did = "took back the skip of" if self.is_off else "skipped"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.by} {did} {Steps.parse(self.changed).named} on {self.created_at}{reason}"


def sign_name(number: int) -> str:
    """Return the name of the signature of a skip record: ``signatures/skip-00000001.json``."""
    return f"signatures/skip-{number:08d}.json"


def read_skips(journal: Journal, keys: Sequence["TrustedKey"] = ()) -> SkipRecord | None:
    """Return the skip list in force; None if the run never had one.

    Args:
        keys: the list must be signed with one of these keys; if there are none, any list is accepted.

    Raises:
        RecordDamaged: the record can't be read. An older list isn't used instead, because it has different steps.
        NotTrusted: none of the keys has signed the list.
    """
    number = max(journal.numbers(SKIPS), default=0)
    return read_skip(journal, number, keys) if number else None


def list_skips(journal: Journal) -> list[SkipRecord]:
    """Return all readable skip lists of a run, oldest first."""
    found = []
    for number in journal.numbers(SKIPS):
        with contextlib.suppress(NameMissing, RecordDamaged):
            found.append(read_skip(journal, number))
    return found


def read_skip(journal: Journal, number: int, keys: Sequence["TrustedKey"] = ()) -> SkipRecord:
    """Return the skip list of this number; see `read_skips`."""
    name = record_name(SKIPS, number)
    data = journal.store.read(name, 0, MAX_RECORD_BYTES + 1)
    try:
        record = SkipRecord.from_bytes(data, name)
        if record.number != number:
            raise RecordDamaged(
                f"{name} can't be read: it contains the record of a different skip list, {record.number}"
            )
    except RecordDamaged as error:
        error.hint = error.hint or f"restore {name} from a backup: without this file nobody knows which steps to skip"
        raise
    if keys:
        check_skip_signed(journal, record, data, keys)
    return record


def check_skip_signed(journal: Journal, record: SkipRecord, data: bytes, keys: Sequence["TrustedKey"]) -> None:
    """Check that one of the keys signed a skip list.

    Args:
        data: the bytes of the record on the store.

    Raises:
        NotTrusted: no trusted key signed the list, or the record was changed.
    """
    from holdfast.journal.signature import MAX_ENVELOPE_BYTES, verify_signature  # few lists are signed

    name, signature = record.names
    try:
        envelope = journal.store.read(signature, 0, MAX_ENVELOPE_BYTES + 1)
    except NameMissing:
        raise NotTrusted(
            f"skip list {record.number} of run {journal.run!r} ({Steps.parse(record.changed).named}) is not signed",
            hint="sign it: holdfast skip with the same steps and --key KEY; without resume.trusted_keys, unsigned "
            "lists are accepted",
        ) from None
    verify_signature(envelope, journal.run, name, data, {}, keys)


def write_skips(
    journal: Journal, number: int, skip: Steps, changed: Steps, first_commit: int, key: "SigningKey | None" = None, *,
    is_off: bool = False, reason: str = "",
) -> SkipRecord:  # fmt: skip
    """Write a skip list, first its signature and then its record. Return the record.

    Args:
        number: the newest list's number plus one.
        skip: all steps to skip.
        changed: the steps that this list adds to the previous list or removes from it.
        first_commit: the first commit that no longer counts, because the list changes its steps.

    Raises:
        NameTaken: another process has created the list of this number.
    """
    record = SkipRecord(
        number=number, skip=str(skip), changed=str(changed), is_off=is_off, first_commit=first_commit,
        by=name_writer(), reason=reason, created_at=now(),
    )  # fmt: skip
    name, signature = record.names
    if journal.store.exists(name):
        raise NameTaken(name)
    data = record.to_bytes()
    if key is not None:
        journal.store.replace(signature, key.sign(journal.run, name, data, {}))
    journal.store.create(name, data)
    journal.enter(name)
    if key is not None:
        journal.enter(signature)
    return record


def sign_skips(journal: Journal, record: SkipRecord, key: "SigningKey") -> None:
    """Sign a run's list of steps to skip; replace its signature if it has one."""
    name, signature = record.names
    journal.store.replace(signature, key.sign(journal.run, name, journal.store.read(name), {}))
    journal.enter(signature)


def name_writer() -> str:
    """Return the user and the host of this process."""
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container's user may have no name
        return f"{getpass.getuser()}@{name_host()}"
    return name_host()

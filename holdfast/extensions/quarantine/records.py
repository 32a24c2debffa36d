"""The machines that a store has in quarantine, because audits have found that they compute wrongly.

A record ``_machines/<host>/00000001.json`` beside the runs quarantines a machine, or only some of its GPUs. The record
with the next number releases the machine, and so on. Records are created once, and the newest record of a machine
decides. No run can be named ``_machines``, because a run's name begins with a letter or a digit.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from pydantic import Field

from holdfast.errors import NameMissing, NameTaken, RecordDamaged, StoreDenied, Unreadable, WrongUse
from holdfast.journal.names import sort_names
from holdfast.journal.records import Record, Time, now, read_record, record_name, seconds_of
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.journal.verdict import AuditVerdict

MACHINES = "_machines"

log = logging.getLogger(__name__)


class MachineRecord(Record):
    """``_machines/<host>/00000001.json``: the quarantine of a machine, or its release."""

    number: int = Field(ge=1)
    host: str
    gpus: list[str] = Field(description="the UUIDs of the GPUs at fault; empty for the whole machine")
    is_quarantined: bool = Field(description="true for a quarantine, false for a release")
    reason: str
    run: str = Field(description="the run in which the fault was found; empty in a release")
    commit: int = Field(ge=0, description="the commit whose audits have found the fault; 0 in a release")
    deviating: int = Field(ge=0, description="the number of trainings that ended on different bytes; 0 in a release")
    created_at: Time

    def __str__(self) -> str:
        gpus = f", GPU {', '.join(self.gpus)}" if self.gpus else ""
        return f"{self.host}{gpus}, since {self.created_at}: {self.reason}"


def list_quarantined(store: Store) -> list[MachineRecord]:
    """Return the machines in quarantine, sorted by name, with one request if the store never had a quarantine.

    If the user has no right to list the folder of these records, return an empty list.
    """
    with contextlib.suppress(StoreDenied):
        newest = [next(_read_newest_first(store, folder), None) for folder in store.list(MACHINES)]
        found = [record for record in newest if record and record.is_quarantined]
        return sorted(found, key=lambda each: each.host)
    return []


def list_doubted(store: Store, at: str) -> list[MachineRecord]:
    """Return the quarantines that cast doubt on results that their machines computed at a given time.

    These are the quarantines in force now, and the quarantines that a person has ended after the given time. They may
    have begun later than that time, because a machine computes wrongly before an audit finds it. The call costs one
    request if the store never had a quarantine.
    """
    with contextlib.suppress(StoreDenied):
        return [record for folder in store.list(MACHINES) for record in _read_doubted(store, folder, at)]
    return []


def _read_doubted(store: Store, folder: str, at: str) -> Iterator[MachineRecord]:
    for record in _read_newest_first(store, folder):
        if record.is_quarantined:
            yield record
        elif seconds_of(record.created_at) < seconds_of(at):
            return


def quarantine_machine(store: Store, run: str, verdict: "AuditVerdict") -> MachineRecord | None:
    """Quarantine the machine that a verdict names. Return the new record; None if nothing has to be recorded.

    Nothing has to be recorded if the machine is in quarantine with these GPUs, or if it was released and hasn't
    deviated since.

    Raises:
        StoreError: the store can't be written.
    """
    records = _read_records(store, quote(verdict.host, safe=""))
    if find_release(records, verdict):
        return None
    known = [each for each in records if (each.run, each.commit) == (run, verdict.commit)]
    last = records[-1] if records and records[-1].is_quarantined else None
    is_covered = last and (not last.gpus or (verdict.gpus and {*verdict.gpus} <= {*last.gpus}))
    if is_covered or any(each.deviating >= verdict.deviating for each in known):
        return None
    gpus = sorted({*verdict.gpus, *(last.gpus if last and verdict.gpus else ())})
    return _create(
        store, len(records), host=verdict.host, gpus=gpus, is_quarantined=True, run=run, commit=verdict.commit,
        reason=f"commit {verdict.commit} of run {run}: {verdict.reason}", deviating=verdict.deviating,
    )  # fmt: skip


def read_release(store: Store, verdict: "AuditVerdict") -> str:
    """Return the time at which a person released a verdict's machine from quarantine.

    Return an empty text if nobody has, or if the machine has computed wrongly since then.
    """
    return find_release(_read_records(store, quote(verdict.host, safe="")), verdict)


def find_release(records: Sequence[MachineRecord], verdict: "AuditVerdict") -> str:
    """Return from the machine's records what `read_release` reads from the store."""
    released = [each.created_at for each in records if not each.is_quarantined and each.created_at >= verdict.at]
    return released[0] if released and verdict.at else ""


def release_machine(store: Store, host: str) -> MachineRecord:
    """Release a machine from quarantine; return the record of the release.

    Raises:
        WrongUse: the machine is not in quarantine.
        StoreError: the store can't be written.
    """
    records = _read_records(store, quote(host, safe=""))
    if not records or not records[-1].is_quarantined:
        raise WrongUse(
            f"{host} is not quarantined in {store.url}",
            hint=f"holdfast doctor --store {store.url} lists the quarantined machines",
        )
    return _create(
        store, records[-1].number, host=host, gpus=[], is_quarantined=False, run="", commit=0, deviating=0,
        reason="released by a person",
    )  # fmt: skip


def _read_records(store: Store, folder: str) -> list[MachineRecord]:
    """Return the readable records of a machine, oldest first."""
    return [*_read_newest_first(store, folder)][::-1]


def _read_newest_first(store: Store, folder: str) -> Iterator[MachineRecord]:
    """Yield the readable records of a machine, newest first. Read each record only when the caller asks for it."""
    for number in reversed(sort_names(store.list(f"{MACHINES}/{folder}"), ".json").numbers):
        try:
            yield read_record(store, MachineRecord, record_name(f"{MACHINES}/{folder}", number))
        except (NameMissing, RecordDamaged, Unreadable) as error:
            log.warning("%s", error)


def _create(store: Store, number: int, **fields: object) -> MachineRecord:
    """Create the next record of a machine. If another process takes the number first, try the next number."""
    while True:
        number += 1
        record = MachineRecord.model_validate(fields | {"number": number, "created_at": now()})
        with contextlib.suppress(NameTaken):
            store.create(record_name(f"{MACHINES}/{quote(record.host, safe='')}", number), record.to_bytes())
            return record

"""What follows from the verdict of audits on a machine: its quarantine, and the hold or the rollback of the run."""

import logging

from holdfast.errors import StoreError
from holdfast.extensions.quarantine.records import list_quarantined, quarantine_machine
from holdfast.extensions.quarantine.rollback import choose_to_certify, find_base, roll_back, stop_run
from holdfast.journal import Journal
from holdfast.journal.judgement import read_verdict
from holdfast.journal.verdict import Ask, AuditVerdict, Consequences, OnFault
from holdfast.store import open_store

log = logging.getLogger(__name__)


def act_on_verdict(journal: Journal, verdict: AuditVerdict, on_fault: OnFault) -> Consequences:
    """Act on a verdict. Return lines that tell the user what was done, and the audit that is needed next, if any.

    If the verdict names a machine, quarantine the machine, and hold or roll back the run as ``on_fault`` says; see
    `keep_verdict`. If no commit is known to be right, a rollback isn't possible yet: return the audit that may find
    such a commit; see `choose_to_certify`. If the verdict certifies a commit and ``on_fault`` is ``rollback``, make
    the rollbacks that weren't possible before; see `go_back_now`.
    """
    if verdict.kind == "certified":
        return Consequences(go_back_now(journal) if on_fault == "rollback" else [])
    lines = keep_verdict(journal, verdict, on_fault)
    is_asked = on_fault == "rollback" and verdict.kind == "machine"
    right = choose_to_certify(journal, verdict) if is_asked else None
    return Consequences(lines, Ask(right.number, from_commit=find_base(journal, verdict)) if right else None)


def keep_verdict(journal: Journal, verdict: AuditVerdict, on_fault: OnFault = "record") -> list[str]:
    """Quarantine the machine that the audits' verdict names as faulty, and hold or roll back the run if asked.

    Do nothing if the verdict names no machine. If the store is read-only here, log a warning instead.

    Args:
        on_fault: the further action. ``record``: none. ``rollback``: quarantine the commits of that machine, see
            `roll_back`. ``stop``: hold the run, see `stop_run`.

    Returns:
        Lines that tell the user what was done.
    """
    if verdict.kind != "machine":
        return []
    lines = []
    try:
        lines.append(_quarantine_machine(journal, verdict))
        if on_fault == "rollback":
            lines.append(roll_back(journal, verdict))
        elif on_fault == "stop":
            lines.append(stop_run(journal, verdict))
    except StoreError as error:
        log.warning("the consequences of the verdict on %s can't be recorded: %s", verdict.host, error)
    return [line for line in lines if line]


def go_back_now(journal: Journal) -> list[str]:
    """Roll back the commits of a run that quarantined machines have trained; return lines that tell the user so.

    Call this after an audit on another machine has certified a commit. A rollback needs such a checkpoint, which is
    known to be right, and the run may have had none when the machines were quarantined.
    """
    lines = []
    for record in list_quarantined(open_store(journal.store_url)):
        commit = journal.find_commit(record.commit) if record.run == journal.run else None
        if commit is not None and not journal.is_quarantined(commit.number):
            verdict = read_verdict(journal, commit)
            lines += keep_verdict(journal, verdict, "rollback") if verdict else []
    return lines


def _quarantine_machine(journal: Journal, verdict: AuditVerdict) -> str:
    """Quarantine the machine that a verdict names; return a line for the user, empty if no record was made."""
    url = journal.store_url
    record = quarantine_machine(open_store(url), journal.run, verdict)
    if record is None:
        return ""
    gpus = f", GPU {', '.join(record.gpus)}," if record.gpus else ""
    release = f"holdfast doctor --store {url} --release {verdict.host}"
    return f"{verdict.host}{gpus} is quarantined in {url}; once it is repaired: {release}"

"""The journal of a run: the records that decide who may write the run and which checkpoints count."""

from typing import TYPE_CHECKING, Any

from holdfast.journal.records import (
    FOLDER,
    MAX_RECORD_BYTES,
    REPORT,
    AttemptRecord,
    AuditRecord,
    Commit,
    ConfigRecord,
    EndingRecord,
    FileRecord,
    FolderRecord,
    IndexRecord,
    LaterTime,
    Latest,
    Origin,
    Pin,
    Pruned,
    PruneEntry,
    PruneReport,
    Quarantine,
    Record,
    RehearsalRecord,
    RehearsedSteps,
    RunRecord,
    audit_name,
    config_name,
    folder_record_name,
    format_time,
    metrics_name,
    now,
    read_commit,
    read_record,
    record_name,
    seconds_of,
    shown_name,
    signature_name,
)

if TYPE_CHECKING:
    from holdfast.journal.journal import Journal

__all__ = [
    "FOLDER",
    "MAX_RECORD_BYTES",
    "REPORT",
    "AttemptRecord",
    "AuditRecord",
    "Commit",
    "ConfigRecord",
    "EndingRecord",
    "FileRecord",
    "FolderRecord",
    "IndexRecord",
    "Journal",
    "LaterTime",
    "Latest",
    "Origin",
    "Pin",
    "PruneEntry",
    "PruneReport",
    "Pruned",
    "Quarantine",
    "Record",
    "RehearsalRecord",
    "RehearsedSteps",
    "RunRecord",
    "audit_name",
    "config_name",
    "folder_record_name",
    "format_time",
    "metrics_name",
    "now",
    "read_commit",
    "read_record",
    "record_name",
    "seconds_of",
    "shown_name",
    "signature_name",
]


def __getattr__(name: str) -> Any:
    """Import and return `Journal` when it is first used: a rank reads records, and has no journal to write to."""
    if name != "Journal":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.journal.journal import Journal

    return Journal

"""Settings of earlier versions. A configuration may have them, and gets a line of advice on each."""

from collections.abc import Mapping
from typing import Any

# The new name of each setting that was renamed.
MOVED = {
    "chunk.auto": "chunk.steps",
    "preemption.drain_file": "resume.drain_file",
    "parity.every": "checkpoint.read_back_every",
    "report.every": "log.report_every_s",
}
# The replacement of each setting that was removed.
GONE = {
    "compute.ray_address": "the environment variable RAY_ADDRESS names the Ray cluster",
    "preemption.cloud": "Holdfast reads the cloud's name from the machine's firmware",
    "preemption.metadata_url": "Holdfast asks the cloud's own metadata server",
    "retention.debris_after_s": "unfinished files of a dead attempt are deleted after a day",
    "retention.max_epochs": "a checkpoint stays as long as another rule of retention keeps it",
    "supervision.backoff_s": "the first wait before a new attempt takes a second",
    "supervision.if_running": "a second train command watches the running attempt",
}


def read_earlier(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration without its settings of earlier versions, and a line of advice on each such setting."""
    found, lines = dict(fields), []
    for name in (*MOVED, *GONE):
        table, _, key = name.partition(".")
        section = found.get(table)
        if not isinstance(section, Mapping) or key not in section:
            continue
        found[table] = {other: value for other, value in section.items() if other != key}
        if not found[table]:
            del found[table]
        if name in GONE:
            lines.append(f"{name} is gone: {GONE[name]}")
            continue
        lines.append(f"{name} is now {MOVED[name]}")
        value = section[key]
        if name == "chunk.auto":
            value = "auto" if value else None
        table, _, moved = MOVED[name].partition(".")
        now = found.get(table, {})
        # If the new table isn't a mapping, change nothing, because the validation refuses the value.
        if isinstance(now, Mapping) and now.get(moved) is None:
            found[table] = {**now, moved: value}
    return found, lines

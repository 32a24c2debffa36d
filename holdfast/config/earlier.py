"""Settings of earlier versions. A configuration may have them, and gets a line of advice on each."""

from collections.abc import Mapping
from typing import Any

ABSENT: Any = object()  # in place of a setting that a configuration doesn't have
# The new name of each setting that was renamed.
MOVED = {
    "chunk.auto": "chunk.steps",
    "preemption.drain_file": "resume.drain_file",
    "parity.every": "checkpoint.read_back_every",
    "report.every": "log.report_every_s",
    "resume.hung_after_s": "extensions.hangs.hung_after_s",
    "resume.requeue": "extensions.slurm.requeue",
}
# The default of each setting that moved into an extension's table. It is left out, because every record has it.
DEFAULTS = {"resume.hung_after_s": "auto", "resume.requeue": "auto"}
# The replacement of each setting that was removed.
GONE = {
    "compute.ray_address": "the environment variable RAY_ADDRESS names the Ray cluster",
    "near.every_steps": "a shorter chunk.steps saves more often, to near.folder first",
    "on_spike": "a run names the command that explains a jump of its loss; holdfast skip leaves the batch out",
    "preemption.cloud": "Holdfast reads the cloud's name from the machine's firmware",
    "preemption.metadata_url": "Holdfast asks the cloud's own metadata server",
    "retention.debris_after_s": "unfinished files of a dead attempt are deleted after a day",
    "retention.max_epochs": "a checkpoint stays as long as another rule of retention keeps it",
    "supervision.backoff_s": "the first wait before a new attempt takes a second",
    "supervision.if_running": "a second train command watches the running attempt",
}
# The new name of each recipe that left the wheel. The records of a run keep the name with which it was trained.
RECIPES = {
    "holdfast.recipes.cards:cards": "examples.cards:cards",
    "holdfast.recipes.chat:chat": "examples.chat:chat",
}
_KILL_COST = "log.metrics exports the age of the newest commit: the training time that a kill would cost"
# The replacement of each value that a list accepted and that was removed.
GONE_VALUES = {
    "log.sinks": {
        "mlflow": "holdfast docs metrics shows a class to copy, which continues the same curve as my_mlflow:MLflow",
        "trackio": "holdfast docs metrics shows a class to copy, which continues the same curve as my_trackio:Trackio",
    },
    "log.observers": {
        "holdfast.attempt.published:KillCostAnnotations": _KILL_COST,
        "holdfast.attempt.published:KillCostFile": _KILL_COST,
    },
}


def read_earlier(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration without its settings of earlier versions, and a line of advice on each such setting."""
    found, lines = dict(fields), []
    for name in (*MOVED, *GONE):
        if (value := _take(found, name)) is ABSENT:
            continue
        if name in GONE:
            lines.append(f"{name} is gone: {GONE[name]}")
            continue
        lines.append(f"{name} is now {MOVED[name]}")
        if name == "chunk.auto":
            value = "auto" if value else None
        if value != DEFAULTS.get(name, ABSENT):
            _put(found, MOVED[name].split("."), value)
    for name in GONE_VALUES:
        lines += _remove_values(found, name)
    return found, lines


def _take(fields: dict[str, Any], name: str) -> Any:
    """Remove a setting from a configuration, and its table if nothing is left in it. Return its value, or `ABSENT`."""
    table, _, key = name.rpartition(".")
    if not table:
        return fields.pop(key, ABSENT)
    section = fields.get(table)
    if not isinstance(section, Mapping) or key not in section:
        return ABSENT
    fields[table] = {other: value for other, value in section.items() if other != key}
    if not fields[table]:
        del fields[table]
    return section[key]


def _put(fields: dict[str, Any], names: list[str], value: Any) -> None:
    """Set a setting, given by its table's name and its own, unless the configuration has it already."""
    first, *rest = names
    if not rest:
        fields[first] = value if fields.get(first) is None else fields[first]
        return
    # If a table isn't a mapping, change nothing, because the validation refuses the value.
    if isinstance(table := fields.get(first, {}), Mapping):
        fields[first] = {**table}
        _put(fields[first], rest, value)


def _remove_values(fields: dict[str, Any], name: str) -> list[str]:
    """Remove values from a list that only earlier versions accept. Return a line of advice for each removed value."""
    table, _, key = name.partition(".")
    section, gone = fields.get(table), GONE_VALUES[name]
    if not isinstance(section, Mapping) or not isinstance(given := section.get(key), list | tuple):
        return []
    removed = [each for each in given if isinstance(each, str) and each in gone]
    if removed:
        fields[table] = {**section, key: [each for each in given if each not in removed]}
    return [f"{name}: {each} is gone: {gone[each]}" for each in removed]

"""The two halves of a settings record: the given configuration, and the identity whose hash is the fingerprint.

Both halves have to agree, because a replay trains with the configuration, but commits name the fingerprint.
"""

import copy
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter, ValidationError

from holdfast.config import RunConfig
from holdfast.errors import RecordDamaged, WrongUse
from holdfast.journal.journal import Journal
from holdfast.journal.records import ConfigRecord
from holdfast.provenance.fingerprint import ABSENT, diff, fingerprint

NEEDED = ("recipe", "seed", "settings")


def read_given(record: ConfigRecord) -> RunConfig:
    """Return the recorded configuration.

    Raises:
        WrongUse: a later version of Holdfast wrote the record, with settings that this version doesn't know.
        RecordDamaged: the configuration contradicts the identity, or the identity's hash isn't the fingerprint.
    """
    config, unknown = _read(record)
    if unknown:
        raise WrongUse(f"{record.name}: this version knows no setting {unknown[0]!r}", hint="upgrade holdfast")
    if conflict := _compare(record, config):
        raise RecordDamaged(f"{record.name}: {conflict}", hint="holdfast verify checks all records of the run")
    return config


def find_conflict(record: ConfigRecord) -> str:
    """Return a message that says where the recorded configuration contradicts the identity; empty if they agree.

    The identity may have further fields: the recipe's defaults, the data, and the commit from which the run began.
    """
    try:
        return _compare(record, _read(record)[0])
    except RecordDamaged as error:
        return error.message


def _read(record: ConfigRecord) -> tuple[RunConfig, list[str]]:
    """Return the configuration without settings unknown to this version, and the names of the removed settings."""
    fields, unknown = copy.deepcopy(record.config), list[str]()
    while True:  # a section is checked as a whole only once it has no unknown settings
        try:
            return RunConfig.model_validate(fields), unknown
        except ValidationError as error:
            for each in error.errors(include_url=False):
                *parents, name = each["loc"]
                if each["type"] != "extra_forbidden":
                    raise RecordDamaged(f"config.{'.'.join(map(str, each['loc']))}: {each['msg']}") from None
                unknown.append(".".join(map(str, each["loc"])))
                holder: Any = fields
                for parent in parents:
                    holder = holder[parent]
                del holder[name]


def _compare(record: ConfigRecord, config: RunConfig) -> str:
    if fingerprint(record.identity) != record.fingerprint:
        return "the record's fingerprint isn't the hash of its settings"
    if missing := [name for name in NEEDED if name not in record.identity]:
        return f"its identity has no {missing[0]}"
    for name, (identity, given) in diff(record.identity, config.identity).items():
        # The version that wrote the record didn't have this setting.
        is_later = identity == ABSENT and not name.startswith("settings.")
        is_newest = name == "init_from.commit" and given is None
        is_same = _is_same_time(identity, given) or (name.startswith("settings.") and _is_converted(identity, given))
        if not (given == ABSENT or is_later or is_newest or is_same):
            return f"the record's configuration has {name} = {given!r}, but its fingerprint is of {identity!r}"
    return ""


def _is_same_time(one: object, other: object) -> bool:
    """Return whether two texts mean the same time. Records contain times from TOML in two formats."""
    try:
        return datetime.fromisoformat(str(one)) == datetime.fromisoformat(str(other))
    except (ValueError, TypeError):
        return False


def _is_converted(identity: object, given: object) -> bool:
    """Return whether a recipe's parameter is a number that was given as text, such as 9 as ``"9"``."""
    if type(identity) not in (bool, int, float) or not isinstance(given, str):
        return False
    try:
        return bool(TypeAdapter(type(identity)).validate_python(given) == identity)
    except ValidationError:
        return False


def read_config(journal: Journal) -> RunConfig | None:
    """Return the settings that a run was last trained with; None if this version can't read them."""
    snapshot = journal.read_snapshot()
    try:
        return RunConfig.model_validate(snapshot.config) if snapshot else None
    except ValidationError:  # a version of Holdfast with different settings wrote the snapshot
        return None

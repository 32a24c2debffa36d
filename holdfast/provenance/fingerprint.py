"""The fingerprint of a configuration, the SHA-256 of its canonical JSON, and the comparison of its fields.

`RunConfig.identity` in `holdfast.config.fields` decides which settings the fingerprint covers.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from holdfast.errors import ConfigDrift
from holdfast.provenance.canonical import dump_json, mark_float, mark_int

SHOWN_HASH_CHARS = 16
ABSENT = "(absent)"
# The prefix in the names of a loop's variables; see `holdfast.training.built`.
VARIABLES = "loop.variables."


def fingerprint(cfg: object) -> str:
    """Return the SHA-256 (hex) of a configuration. Equal settings have an equal fingerprint on every machine.

    Dataclasses (also nested), pydantic models and mappings become canonical JSON. Fields whose name begins with ``_``
    are skipped. The order of fields doesn't count, and ``1`` equals ``1.0``. Any other object is hashed as
    ``str(cfg)``, so its fingerprint is only as stable as this string.

    Source: RFC 8785 (JSON Canonicalization Scheme).
    """
    return hashlib.sha256(canonical_json(cfg)).hexdigest()


def canonical_json(cfg: object) -> bytes:
    """Return the bytes that `fingerprint` hashes."""
    fields = to_plain(cfg)
    return dump_json(fields) if isinstance(fields, dict | list) else str(cfg).encode()


def validate_fingerprint(cfg: object, saved: str, saved_cfg: object | None = None) -> None:
    """Raise ConfigDrift unless ``cfg`` has the fingerprint ``saved``. An empty ``saved`` skips the check.

    Args:
        saved_cfg: the configuration from which ``saved`` was computed, if it is known.

    Raises:
        ConfigDrift: the fingerprints differ. The message has both fingerprints, cut to 16 characters. If ``saved_cfg``
            is given, it also has both values of each field that differs; ``data["fields"]`` has the full values.
    """
    current = fingerprint(cfg)
    if not saved or current == saved:
        return
    fields = {} if saved_cfg is None else diff(saved_cfg, cfg)
    lines = [f"  {name}: saved {old!r}, now {new!r}" for name, (old, new) in fields.items()]
    raise ConfigDrift(
        "\n".join([f"settings differ: saved {saved[:SHOWN_HASH_CHARS]}, now {current[:SHOWN_HASH_CHARS]}", *lines]),
        hint="put the saved values back, or train with the new values as a run of another name (--set run=...)",
        saved=saved,
        current=current,
        fields={name: list(pair) for name, pair in fields.items()},
    )


def diff(saved: object, current: object) -> dict[str, tuple[Any, Any]]:
    """Return each field that differs, by dotted name, as ``(saved, current)``; "(absent)" for a missing value."""
    old, new = flatten(to_plain(saved)), flatten(to_plain(current))
    return {
        name: (old.get(name, ABSENT), new.get(name, ABSENT))
        for name in sorted(old.keys() | new.keys())
        if name not in old or name not in new or canonical_json([old[name]]) != canonical_json([new[name]])
    }


def to_plain(value: object) -> Any:
    """Convert a value to plain JSON without loss. A value of a type that JSON lacks becomes ``str(value)``."""
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return mark_int(value)
    if isinstance(value, float):
        return mark_float(value)
    if isinstance(value, BaseModel):
        declared = {name: getattr(value, name) for name in type(value).model_fields}
        return _plain_fields(declared | (value.model_extra or {}))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain_fields({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return _plain_fields(value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_plain(item) for item in value), key=dump_json)
    return str(value)


def _plain_fields(fields: Mapping[Any, object]) -> dict[str, Any]:
    return {str(name): to_plain(value) for name, value in fields.items() if not str(name).startswith("_")}


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values in nested tables by their dotted names. An empty table counts as a value."""
    if not isinstance(value, dict) or (not value and name):
        return {name or "(value)": value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{name}.{key}" if name else key)
    return flat

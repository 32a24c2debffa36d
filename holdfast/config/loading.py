"""Reading a configuration from a TOML file and ``--set`` options, with hints for mistakes."""

import difflib
import logging
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from holdfast.config.earlier import read_earlier
from holdfast.config.fields import MEANINGS, RunConfig, Section
from holdfast.config.hints import hint_for
from holdfast.config.limits import MAX_FILE_BYTES, MAX_JSON_BYTES, find_infinite
from holdfast.errors import ConfigError
from holdfast.store.failures import without_secrets

log = logging.getLogger(__name__)

NEAR = 0.6  # the minimum similarity at which a known name is suggested; see difflib
NEAR_NAME = 0.8  # the same for a field's own name, without its table
SHOWN_CHARS = 200  # how many characters of a value a message shows


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration from a TOML file, and apply ``key=value`` overrides.

    Args:
        overrides: ``a.b=value``, with the value in TOML. A value that is not TOML counts as a string, because the shell
            removes a string's quotes.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown (the message names the most similar known key), a
            value is out of range, or ``compute.nodes = "slurm"`` is set outside of a Slurm job.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)  # bounded, because reading a device may never end
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration {path}", hint=_hint_for_path(Path(path))) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration {str(path)!r} can't be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the configuration {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        fields = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        hint = _hint_for_path(Path(path)) if str(path).endswith(".py") else "https://toml.io shows the format"
        raise ConfigError(f"{path} is not TOML: {error}", hint=hint) from None
    for override in overrides:
        _set(fields, override)
    compute = fields.get("compute")
    if isinstance(compute, dict) and compute.get("nodes") == "slurm":
        from holdfast.config.slurm import settle_nodes  # imported only in a job

        settle_nodes(compute)
    for line in read_earlier(fields)[1]:
        log.warning("%s: %s", path, line)
    return parse_config(fields, where=str(path))


def parse_config(fields: Mapping[str, Any], where: str = "the configuration") -> RunConfig:
    """Validate a mapping, and return the configuration. Errors name the field.

    Args:
        where: the source of the mapping, for messages.

    Raises:
        ConfigError: as in `load_config`.
    """
    try:
        return _check_size(RunConfig.model_validate(fields), where)
    except ValidationError as error:
        # Report only one mistake. Prefer an unknown key: if a key is misspelt, the right key is reported as missing,
        # too.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        first = problems[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        raise ConfigError(f"{where}: unknown key {_shorten(name)}", hint=_hint_for_key(name, first["input"])) from None
    if first["type"] == "missing":
        raise ConfigError(f"{where}: {name} is missing", hint=f'add {name} = "..." at the top') from None
    found = first["input"]
    expected = MEANINGS.get(first.get("ctx", {}).get("pattern", "")) or first["msg"].removeprefix("Value error, ")
    shown = _shorten(without_secrets(repr(found)))
    raise ConfigError(f"{where}: {_shorten(name) or 'the file'} = {shown}: {expected}") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: the most similar known name or, if none is similar, all known names."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"


def _check_size(config: RunConfig, where: str) -> RunConfig:
    """Return the configuration unchanged after checking that its JSON fits a rank's environment variable.

    Raises:
        ConfigError: a number is NaN or infinite, or the JSON is too long.
    """
    if name := find_infinite(config.settings, "settings") or find_infinite(config.extensions, "extensions"):
        raise ConfigError(
            f"{where}: {_shorten(name)}: expected a finite number",
            hint="leave the setting out for its default, or set it to a large number",
        )
    if (size := len(config.model_dump_json())) > MAX_JSON_BYTES:
        hint = "put long values into a file of your own, and give the recipe its path as the setting"
        raise ConfigError(
            f"{where}: the settings have {size} bytes as JSON; at most {MAX_JSON_BYTES} are allowed", hint=hint
        )
    return config


def _hint_for_key(name: str, value: Any) -> str:
    """Return the hint for an unknown key: Holdfast's name for the setting, a similar name, or ``settings.<key>``."""
    if hint := hint_for(name, value):
        return hint
    known = sorted(_known_keys(RunConfig))
    if difflib.get_close_matches(name, known, n=1, cutoff=NEAR) or "." in name:
        table = name.rpartition(".")[0]
        return did_you_mean(name, [each for each in known if each.startswith(f"{table}.")] if table else known)
    own = f"settings.{_shorten(name)}"
    if near := _find_fields(name, value, known):
        meant = f"did you mean {' or '.join(near)}?"
        return meant if isinstance(value, Mapping) else f"{meant} If it is a setting of your recipe, write {own}"
    return f"did you mean {own}? Settings of your recipe belong under [settings]"


def _find_fields(name: str, value: Any, known: Sequence[str]) -> list[str]:
    """Return the fields, in any table, whose own name equals an unknown key or is the most similar to this key.

    Args:
        name: the unknown key.
        value: the key's value. If it is a table, search for the table's first key instead.
    """
    while isinstance(value, Mapping) and value:
        name, value = next(iter(value.items()))
    by_name: dict[str, list[str]] = {}
    for field in known:
        by_name.setdefault(field.rpartition(".")[2], []).append(field)
    near = difflib.get_close_matches(str(name), sorted(by_name), n=1, cutoff=NEAR_NAME)
    return by_name[near[0]] if near else []


def _shorten(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"


def _set(fields: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {override}: expected key=value", hint="for example --set settings.lr=0.001")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    try:
        set_field(fields, key, value)
    except ConfigError as error:
        raise ConfigError(f"--set {error}") from None


def set_field(fields: dict[str, Any], name: str, value: Any) -> None:
    """Set a field, given by its dotted name, and create missing tables.

    Raises:
        ConfigError: a table in the dotted name is already a value.
    """
    *tables, last = name.split(".")
    for table in tables:
        if fields.get(table) is None:
            fields[table] = {}
        fields = fields[table]
        if not isinstance(fields, dict):
            raise ConfigError(f"{name}: {table} is a single value, so it has no keys")
    fields[last] = value


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from _known_keys(kind, f"{prefix}{name}.")


def _hint_for_path(path: Path) -> str:
    found = sorted(path.parent.glob("*.toml")) if path.parent.is_dir() else []
    return did_you_mean(str(path), map(str, found)) if found else "give the path of a TOML file"

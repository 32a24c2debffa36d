"""The check that the operator allows a run to use a store.

The worker's environment variable ``HOLDFAST_ALLOWED_STORES`` lists folders or URLs, separated by commas, for example
``/data/runs, s3://team/runs``. An entry allows the store at this URL and all stores below it. If the variable is unset,
all stores are allowed; if it is empty, no store is allowed. A store whose class the user has written,
``my_store:MyStore://folder``, is allowed only if an entry names it. The reason: its URL decides which code is imported,
and a run's records may contain any URL.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.errors import ConfigError

STORES = "HOLDFAST_ALLOWED_STORES"
SCRATCH = "holdfast-"
SAME_SCHEME = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "file": "", "local": ""}


def check_store(url: str) -> None:
    """Raise ConfigError unless the operator allows a store. Don't open the store.

    Links and ``..`` in a folder's path are resolved before the check. A URL with ``.`` or ``..`` between slashes is
    refused.
    """
    allowed = list_allowed(STORES)
    if names_code(url) and allowed is None:
        scheme = url.partition("://")[0]
        raise ConfigError(
            f"store = {url!r}: the URL's scheme {scheme} names Python code, which this machine doesn't allow",
            hint=f"to allow it: export {STORES}='{scheme}://', with the other stores that you use, separated by commas",
        )
    if allowed is None:
        return
    parts = split_store(url)
    prefixes = [split_store(entry) for entry in allowed]
    if parts and any(prefix and parts[: len(prefix)] == prefix for prefix in prefixes):
        return
    if not _is_scratch(parts):
        raise ConfigError(
            f"store = {url!r} is not allowed on this machine",
            hint=f"{STORES} allows {spell_allowed(allowed)}; the machine's operator can add the store to that variable",
        )


def names_code(url: str) -> bool:
    """Return whether a URL's scheme names a class that the user has written: ``my_store:MyStore://folder``."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and ":" in scheme


def split_store(url: str) -> tuple[str, ...]:
    """Return a store's scheme and the parts of its normalized path; empty if the URL can't be normalized."""
    scheme, separator, path = url.partition("://")
    scheme = SAME_SCHEME.get(scheme, scheme)
    if not separator or scheme == "":
        try:
            return "", *Path(os.path.realpath(Path(path if separator else url).expanduser())).parts
        except (ValueError, RuntimeError):  # the path has a null character, or the home of an unknown user
            return ()
    parts = tuple(part for part in path.split("/") if part)
    return () if {".", ".."} & set(parts) else (scheme, *parts)


def _is_scratch(parts: Sequence[str]) -> bool:
    """Return whether a store is in a temporary folder that this user's process made for a proof or a replay."""
    temporary = split_store(tempfile.gettempdir())
    if parts[: len(temporary)] != temporary or not "".join(parts[len(temporary) :][:1]).startswith(SCRATCH):
        return False
    try:
        found = os.lstat(Path(*parts[1 : len(temporary) + 1]))
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def list_allowed(variable: str) -> list[str] | None:
    """Return the entries of an environment variable that lists what is allowed; None if the variable is unset."""
    text = os.environ.get(variable)
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]


def spell_allowed(allowed: Sequence[str]) -> str:
    """Return a text that lists the recipes or stores that the operator allows, for a message."""
    return ", ".join(allowed) or "nothing"

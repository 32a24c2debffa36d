"""The state folder of `make up`, and the secret of its Prefect server."""

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError

STATE = Path(os.environ.get("HOLDFAST_STATE") or Path.home() / ".local" / "state" / "holdfast")
STARTED = "started.json"
AUTH = "auth"
USER = "holdfast"
CHOOSE = "HOLDFAST_STATE=/another/folder make up"


def new_auth() -> str:
    """Return a new secret with 256 random bits, in Prefect's form ``user:password``."""
    return f"{USER}:{secrets.token_hex(32)}"


def open_state(folder: Path, what: str = "state folder", hint: str = CHOOSE) -> None:
    """Make the state folder, or check that you own it. Deny others the folder (mode 0700) and its files (0600).

    Args:
        what: the name of the folder in error messages.
        hint: the hint in error messages.

    Raises:
        ConfigError: another user owns the folder, or it can't be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"the {what} {folder} can't be created: {error.strerror}", hint=hint) from None
    if found.st_uid != os.geteuid():
        raise ConfigError(f"the {what} {folder} belongs to the user with the id {found.st_uid}, not to you", hint=hint)
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    for path in folder.iterdir():  # an earlier version wrote some files with the default permissions
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o077:
            path.chmod(path.stat().st_mode & 0o700)


def private(path: str, flags: int) -> int:
    """Open a file; create a missing file with mode 0600. Pass this function to `open` as its opener."""
    return os.open(path, flags, 0o600)


def make_secret(path: Path, value: str) -> str:
    """Write a secret atomically to a new file that only you may read (mode 0600). Return the file's content.

    If the file exists, keep and return its content.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as writer:
            writer.write(value)
            writer.flush()
            os.fsync(file)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
    return path.read_text("utf-8")


def read_started(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the record of each process that `make up` has started, by name; empty if the record can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / STARTED).read_text("utf-8")))
    return {}


def find_auth(url: str) -> str:
    """Return the secret of the server at an API's URL, if `make up` started it; empty for any other server."""
    if url and read_started(STATE).get("server", {}).get("url") == url.rstrip("/"):
        with contextlib.suppress(OSError):
            return (STATE / AUTH).read_text("utf-8")
    return ""

"""The commands `pack` and `unpack`."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.errors import ConfigError, HoldfastError, NameTaken, StoreDenied
from holdfast.extensions.pack.pack import pack, unpack
from holdfast.journal.finding import find_commit, open_journal, warn_if_quarantined
from holdfast.keeping.export import creating
from holdfast.store import open_store
from holdfast.terminal.options import split_out


def pack_command(run: str, /, *what: Annotated[str, Parameter(name="[COMMIT] OUT.tar")]) -> None:
    """Write a checkpoint into one tar file. Equal checkpoints make equal files, on every machine.

    Args:
        run: <store>/<run>.
        what: The commit (its number, its folder, or best; by default the newest) and the file to make.
    """
    *commit, out = split_out(what, "OUT.tar", "for example: holdfast pack runs/language best.tar")
    journal = open_journal(run)
    journal.read_run()
    found = find_commit(journal, *commit)
    path = Path(out).absolute()
    try:
        if os.path.lexists(path):  # refuse before reading the whole checkpoint
            raise NameTaken(out)
        with creating(path) as writer:
            sha256 = pack(journal, found, writer)
    except NameTaken:
        raise ConfigError(f"{out} exists", hint="choose a different name, or remove the existing file") from None
    print(f"{sha256}  {out}")
    print(f"commit {found.number} of run {journal.run}: step {found.step}, {found.checkpoint_sha256}")
    warn_if_quarantined(journal, found)


def unpack_command(tar: Path, store: str, /) -> None:
    """Verify a packed checkpoint, and make a new run of the original name from it.

    Args:
        tar: A file that holdfast pack has written.
        store: The folder, or URL of a bucket's folder, to put the run into.
    """
    try:
        with tar.open("rb") as file:
            journal = unpack(file, open_store(store))
    except StoreDenied as error:
        raise ConfigError(error.message, hint=error.hint) from None
    except OSError as error:
        if isinstance(error, HoldfastError):
            raise
        raise ConfigError(f"{tar} can't be read: {error.strerror}") from None
    found = find_commit(journal)
    print(f"run {journal.run} is in {store}: commit {found.number}, step {found.step}, {found.checkpoint_sha256}")

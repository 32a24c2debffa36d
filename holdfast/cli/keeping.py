"""Keeping checkpoints: which stay, which travel, and who vouches for them."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.cli.app import Flag, Json, app, print_json
from holdfast.errors import ConfigError, HoldfastError, NameTaken, WrongUse
from holdfast.journal import Commit, Journal, PruneReport
from holdfast.journal.finding import find_commit, open_journal
from holdfast.pack import pack as pack_checkpoint
from holdfast.pack import unpack as unpack_checkpoint
from holdfast.retention import prune_run, summarize
from holdfast.signature import generate_key
from holdfast.store import open_store
from holdfast.store.local import LocalStore


@app.command
def prune(run: str, /, *, dry_run: Flag = False, json: Json = False) -> None:
    """Delete the checkpoints that the run's own retention doesn't keep, and what dead attempts have left.

    Args:
        run: <store>/<run>.
        dry_run: Only show what would be deleted.
        json: Print JSON.
    """
    report = prune_run(open_journal(run), dry_run=dry_run)
    if json:
        print_json(report.model_dump(mode="json") if report else None)
    elif report is None:
        print("the run has no commit yet")
    else:
        show(report)


def show(report: PruneReport) -> None:
    """The report, as a person reads it."""
    for entry in report.kept + report.protected:
        print(f"{'keeps':14}{entry.checkpoint_sha256}  {entry.path}  ({entry.why})")
    verb = "would delete" if report.dry_run else "deleted"
    for entry in report.pruned:
        print(f"{verb:14}{entry.checkpoint_sha256}  {entry.path}")
    for path in report.unfinished + report.debris:
        print(f"{verb:14}{path}, which no commit needs")
    print(summarize(report))


@app.command
def pin(run: str, commit: str, /) -> None:
    """Keep a checkpoint, whatever the retention.

    Args:
        run: <store>/<run>.
        commit: The commit's number, or the name of its folder.
    """
    journal, found = _open_commit(run, commit)
    journal.pin(found.number)
    print(f"commit {found.number} ({found.path}) is pinned; holdfast unpin lets it go")


@app.command
def unpin(run: str, commit: str, /) -> None:
    """Leave a checkpoint to the retention again.

    Args:
        run: <store>/<run>.
        commit: The commit's number, or the name of its folder.
    """
    journal, found = _open_commit(run, commit)
    journal.unpin(found.number)
    print(f"commit {found.number} ({found.path}) is left to the retention")


@app.command
def quarantine(run: str, commit: str, reason: str, /) -> None:
    """Give a checkpoint up for good: the run continues from the one before.

    Args:
        run: <store>/<run>.
        commit: The commit's number, or the name of its folder.
        reason: Why; it stays on record.
    """
    journal, found = _open_commit(run, commit)
    journal.quarantine(found.number, reason, journal.attempts())
    print(f"commit {found.number} ({found.path}) is in quarantine; the run continues from the one before")


def _open_commit(run: str, commit: str) -> tuple[Journal, Commit]:
    journal = open_journal(run)
    journal.read_run()
    return journal, find_commit(journal, commit)


@app.command(usage="Usage: holdfast pack RUN [COMMIT] OUT.tar")
def pack(run: str, /, *what: Annotated[str, Parameter(name="[COMMIT] OUT.tar")]) -> None:
    """Write a checkpoint into one tar file, the same to the byte wherever it is made.

    Args:
        run: <store>/<run>.
        what: The commit (its number or its folder; otherwise the newest) and the file to make.
    """
    if not 1 <= len(what) <= 2:
        raise WrongUse("expected [COMMIT] OUT.tar after the run", hint="holdfast pack runs/language best.tar")
    *commit, out = what
    journal = open_journal(run)
    journal.read_run()
    found = find_commit(journal, *commit)
    path = Path(out).absolute()
    try:
        if path.exists():  # sooner than after reading everything in vain
            raise NameTaken(out)
        with LocalStore(str(path.parent)).creating(path.name) as writer:
            sha256 = pack_checkpoint(journal, found, writer)
    except NameTaken:
        raise ConfigError(f"{out} exists", hint="give another name, or remove it") from None
    print(f"{sha256}  {out}")
    print(f"commit {found.number} of run {journal.run}: step {found.step}, {found.checkpoint_sha256}")


@app.command
def unpack(tar: Path, store: str, /) -> None:
    """Verify a packed checkpoint, and make a run of its own of it, under the name that it had.

    Args:
        tar: What pack has made.
        store: The folder, or URL of a bucket's folder, to put the run into.
    """
    try:
        with tar.open("rb") as file:
            journal = unpack_checkpoint(file, open_store(store))
    except OSError as error:
        if isinstance(error, HoldfastError):
            raise
        raise ConfigError(f"{tar} can't be read: {error.strerror}") from None
    found = find_commit(journal)
    print(f"run {journal.run} is in {store}: commit {found.number}, step {found.step}, {found.checkpoint_sha256}")


@app.command
def keygen(path: Path, /) -> None:
    """Make a key to sign commits with, and its public half beside it.

    Args:
        path: Where the private key goes; the public one goes to <path>.pub.
    """
    key_id = generate_key(path)
    print(f"key id   {key_id}")
    print(f"private  {path}      signing_key in the configuration; keep it to yourself")
    print(f"public   {path}.pub  for resume.trusted_keys, and holdfast verify --key")

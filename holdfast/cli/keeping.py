"""Commands about stored checkpoints: prune, pin, quarantine, skip, pack, unpack, export, and keygen for signatures."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from holdfast.attempt.skipping import skip_steps
from holdfast.cli.app import Flag, Json, app, print_json
from holdfast.config.steps import EXPECTED, Steps
from holdfast.errors import ConfigError, HoldfastError, NameTaken, StoreDenied, WrongUse
from holdfast.journal import Commit, Journal, PruneReport, read_verdict
from holdfast.journal.finding import HOW_TO_NAME, find_commit, open_journal
from holdfast.journal.holds import find_hold, release_run
from holdfast.journal.signature import generate_key, load_signing_key
from holdfast.keeping.export import Form, creating, export
from holdfast.keeping.pack import pack, unpack
from holdfast.keeping.retention import prune_run, summarize_prune
from holdfast.proof.receipt import describe_commit, seal_provenance, seal_receipt
from holdfast.proof.rollback import roll_back
from holdfast.store import open_store


@app.command(name="prune")
def prune_command(run: str, /, *, dry_run: Flag = False, json: Json = False) -> None:
    """Delete the checkpoints that the run's own retention doesn't keep, and the leftovers of dead attempts.

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
        _print_report(report)


def _print_report(report: PruneReport) -> None:
    """Print a report of pruning, one checkpoint a line."""
    for entry in report.kept + report.protected:
        print(f"{'keeps':14}{entry.checkpoint_sha256}  {entry.path}  ({entry.why})")
    verb = "would delete" if report.dry_run else "deleted"
    for entry in report.pruned:
        print(f"{verb:14}{entry.checkpoint_sha256}  {entry.path}")
    for path in report.unfinished + report.debris:
        print(f"{verb:14}{path}, which no commit needs")
    print(summarize_prune(report))


@app.command
def pin(run: str, commit: str, /, *, off: Flag = False) -> None:
    """Keep a checkpoint, regardless of retention.

    Args:
        run: <store>/<run>.
        commit: The commit's number, the name of its folder, or best.
        off: Undo a pin, so that retention may delete the checkpoint.
    """
    journal, found = _open_commit(run, commit)
    if off:
        journal.unpin(found.number)
        print(f"commit {found.number} ({found.path}) is no longer pinned")
        return
    journal.pin(found.number)
    print(f"commit {found.number} ({found.path}) is pinned: it is never pruned; --off unpins it")


@app.command
def quarantine(run: str, commit: str, reason: str, /) -> None:
    """Never use a checkpoint again: the run continues from the one before.

    Args:
        run: <store>/<run>.
        commit: The commit's number, the name of its folder, or best.
        reason: The reason, which stays on record.
    """
    journal, found = _open_commit(run, commit)
    journal.quarantine(found.number, reason, journal.attempts())
    print(f"commit {found.number} ({found.path}) is in quarantine; the run continues from the commit before")


@app.command
def release(run: str, /, *, rollback: Flag = False) -> None:
    """Release a run that audits hold, because a machine that computes wrongly has trained it.

    The next attempt continues from the newest commit, as if the audits had found nothing.

    Args:
        run: <store>/<run>.
        rollback: First quarantine the commits that the machine has trained since the newest certified commit, and all
            commits based on them. The run then continues from the certified commit.
    """
    journal = open_journal(run)
    journal.read_run()
    hold = find_hold(journal)
    if hold is None or not rollback:
        release_run(journal)
        print(f"run {journal.run} is released: the next attempt goes on from its newest commit")
        return
    number = hold.lineage.get("commit")
    commit = journal.find_commit(number) if isinstance(number, int) else None
    verdict = read_verdict(journal, commit) if commit else None
    if verdict is None or verdict.kind != "machine":
        raise WrongUse(
            f"run {journal.run!r} can't be rolled back: the audits on record name no machine any more",
            hint="holdfast show has their verdict; without --rollback the run goes on as it is",
        )
    print(roll_back(journal, verdict))
    journal.check_held(journal.attempts())


@app.command(name="skip")
def skip_command(
    run: str,
    steps: str,
    /,
    *,
    off: Flag = False,
    signing_key: Annotated[str, Parameter(name=["--key", "--signing-key"], show_default=False)] = "",
    reason: str = "",
) -> None:
    """Skip steps that a run has trained: go back to the checkpoint before them, and go on without their batches.

    Their batches are drawn and not trained, so that all other steps keep their numbers and their data. The list is a
    record of the run: each commit names it, and proofs, audits and receipts train with it. The next attempt continues
    from the checkpoint before these steps; a live attempt does so after its next commit.

    Args:
        run: <store>/<run>.
        steps: The steps, from 1, such as 1200-1210 or 1200-1210,1300.
        off: Undo a skip of these steps: go back once more, and train them.
        signing_key: The private key that signs the list: a PEM file, or env:NAME. A run with resume.trusted_keys
            accepts only a list that one of these keys has signed.
        reason: The reason, which stays on record.
    """
    try:
        chosen = Steps.parse(steps)
    except ValueError as error:
        raise WrongUse(f"skip {steps}: {error}") from None
    if not chosen:
        raise WrongUse(f"skip: {EXPECTED}")
    journal = open_journal(run)
    journal.read_run()
    done = skip_steps(
        journal, chosen, load_signing_key(signing_key) if signing_key else None, is_off=off, reason=reason
    )
    print(f"{chosen.named} of run {journal.run}: {'not skipped any more' if off else 'skipped'}")
    if done.record.skip not in ("", str(chosen)):
        print(f"all skipped steps: {done.record.skip}")
    if done.start is not None:
        print(f"the run goes on from commit {done.start.number} ({done.start.path}, step {done.start.step})")
    if done.quarantined:
        print(f"commits that don't count any more: {', '.join(map(str, done.quarantined))}")
    if find_hold(journal):
        print(f"the run is held, and goes on once you release it: holdfast release {journal.store.url}")


def _open_commit(run: str, commit: str) -> tuple[Journal, Commit]:
    if not commit:  # an empty text, such as an unset variable of a script, must not mean the newest commit
        raise WrongUse("expected a commit", hint=HOW_TO_NAME)
    journal = open_journal(run)
    journal.read_run()
    return journal, find_commit(journal, commit)


@app.command(name="pack", usage="Usage: holdfast pack RUN [COMMIT] OUT.tar")
def pack_command(run: str, /, *what: Annotated[str, Parameter(name="[COMMIT] OUT.tar")]) -> None:
    """Write a checkpoint into one tar file. Equal checkpoints give equal files, on every machine.

    Args:
        run: <store>/<run>.
        what: The commit (its number, its folder, or best; by default the newest) and the file to make.
    """
    *commit, out = _split_out(what, "OUT.tar", "for example: holdfast pack runs/language best.tar")
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
        raise ConfigError(f"{out} exists", hint="give another name, or remove it") from None
    print(f"{sha256}  {out}")
    print(f"commit {found.number} of run {journal.run}: step {found.step}, {found.checkpoint_sha256}")
    _warn_if_quarantined(journal, found)


@app.command(
    name="receipt", usage="Usage: holdfast receipt RUN [COMMIT] OUT.json --signing-key KEY [--model PATH] [--form slsa]"
)
def receipt_command(
    run: str,
    /,
    *what: Annotated[str, Parameter(name="[COMMIT] OUT.json")],
    signing_key: str,
    model: Path | None = None,
    part: str = "",
    form: Literal["receipt", "slsa"] = "receipt",
) -> None:
    """Write a signed receipt: the chain of commits that led to a checkpoint, with settings, code, data and machines.

    `holdfast audit RUN --receipt OUT.json --key KEY.pub` checks it anywhere, and trains some of its chunks again. It is
    a model signature, too, of the checkpoint's folder or of an exported model: model_signing verifies it.

    Args:
        run: <store>/<run>.
        what: The commit (its number, its folder, or best; by default the newest) and the file to make.
        signing_key: The private key, a PEM file of holdfast keygen, or env:NAME.
        model: Sign this file or folder, which has to hold the commit's weights as export writes them: as safetensors or
            for transformers. It may hold more files, such as a tokenizer.
        part: The part of the model that was exported.
        form: receipt, or slsa for a provenance of SLSA 1.0. Tools that admit artifacts by their provenance read slsa;
            holdfast audit reads only receipt.
    """
    *commit, out = _split_out(what, "OUT.json", "for example: holdfast receipt runs/language receipt.json ...")
    if part and model is None:
        raise WrongUse("--part needs --model")
    journal = open_journal(run)
    journal.read_run()
    found = find_commit(journal, *commit)
    key = load_signing_key(signing_key)
    told = describe_commit(journal, found, model, part)
    signed = seal_receipt(told, key) if form == "receipt" else seal_provenance(journal, found, told, key)
    try:
        with creating(Path(out).absolute()) as writer:
            writer.write(signed)
    except NameTaken:
        raise ConfigError(f"{out} exists", hint="give another name, or remove it") from None
    kind = "receipt" if form == "receipt" else "provenance"
    print(f"{out}: {kind} of commit {found.number} of run {journal.run}, step {found.step}, {found.checkpoint_sha256}")
    if told.others:
        print(f"signed, but not made by the run: {', '.join(told.others)}")


@app.command(name="unpack")
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


@app.command(name="export", usage="Usage: holdfast export RUN [COMMIT] OUT [--form FORM] [--part PART]")
def export_weights(
    run: str, /, *what: Annotated[str, Parameter(name="[COMMIT] OUT")], form: Form = "safetensors", part: str = ""
) -> None:
    """Write a checkpoint's weights, verified, for other tools. Equal weights give equal files, on every machine.

    Args:
        run: <store>/<run>.
        what: The commit (its number, its folder, or best; by default the newest) and the file to make; transformers
            makes a folder for from_pretrained, dcp one for torch.distributed.checkpoint.
        form: safetensors, transformers, torch for torch.load, or dcp.
        part: Only this part of the model, such as the name that a loop keeps it by, or extras.NAME.
    """
    *commit, out = _split_out(what, "OUT", "for example: holdfast export runs/language language.safetensors")
    journal = open_journal(run)
    journal.read_run()
    found = find_commit(journal, *commit)
    names = export(journal, found, Path(out).absolute(), form, part)
    print(f"{out}: {len(names)} tensors")
    print(f"commit {found.number} of run {journal.run}: step {found.step}, {found.checkpoint_sha256}")
    _warn_if_quarantined(journal, found)


def _warn_if_quarantined(journal: Journal, commit: Commit) -> None:
    """Print a line if a person has asked for a commit by its number that the run doesn't use any more."""
    if journal.is_quarantined(commit.number):
        print(f"commit {commit.number} is in quarantine: the run doesn't use it any more, and its weights may be wrong")


def _split_out(what: tuple[str, ...], out: str, example: str) -> tuple[str, ...]:
    if not 1 <= len(what) <= 2:
        raise WrongUse(f"expected [COMMIT] {out} after the run", hint=example)
    return what


@app.command
def keygen(path: Path, /) -> None:
    """Make a pair of keys that sign and verify commits.

    Args:
        path: The file for the private key; the public key goes to <path>.pub.
    """
    key_id = generate_key(path)
    print(f"key id   {key_id}")
    print(f"private  {path}      for signing_key in the configuration; keep it to yourself")
    print(f"public   {path}.pub  for resume.trusted_keys, and holdfast verify --key")

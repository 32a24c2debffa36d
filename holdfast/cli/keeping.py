"""Commands about stored checkpoints: prune, pin, quarantine, skip, pack, unpack, export, and keygen for signatures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.attempt.skipping import skip_steps
from holdfast.config.steps import EXPECTED, Steps
from holdfast.errors import WrongUse
from holdfast.journal import Commit, Journal, PruneReport
from holdfast.journal.finding import HOW_TO_NAME, find_commit, open_journal, warn_if_quarantined
from holdfast.journal.signature import generate_key, load_signing_key
from holdfast.keeping.export import Form, export
from holdfast.keeping.retention import prune_run, summarize_prune
from holdfast.terminal.options import Flag, Json, print_json, split_out

MOST_PARTS = 6  # if an export has more top-level names than this, the names belong to a single module


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


def quarantine(run: str, commit: str, reason: str, /) -> None:
    """Never use a checkpoint again: the run continues from the previous checkpoint.

    Args:
        run: <store>/<run>.
        commit: The commit's number, the name of its folder, or best.
        reason: The reason, which stays on record.
    """
    journal, found = _open_commit(run, commit)
    journal.quarantine(found.number, reason, journal.attempts())
    print(f"commit {found.number} ({found.path}) is in quarantine; the run continues from the commit before")


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

    In a skipped step the batch is drawn and not trained, so that all other steps keep their numbers and their data. The
    list is a record of the run: each commit names it, and proofs, audits and receipts train with it. The next attempt
    continues from the checkpoint before these steps; a live attempt does so after its next commit.

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
        print(f"the run continues from commit {done.start.number} ({done.start.path}, step {done.start.step})")
    if done.quarantined:
        print(f"commits that no longer count: {', '.join(map(str, done.quarantined))}")
    if journal.find_hold(journal.attempts()):
        print(f"the run is held, and continues once you release it: holdfast release {journal.store.url}")


def _open_commit(run: str, commit: str) -> tuple[Journal, Commit]:
    if not commit:  # an empty text, such as an unset variable of a script, must not mean the newest commit
        raise WrongUse("expected a commit", hint=HOW_TO_NAME)
    journal = open_journal(run)
    journal.read_run()
    return journal, find_commit(journal, commit)


def export_weights(
    run: str, /, *what: Annotated[str, Parameter(name="[COMMIT] OUT")], form: Form = "safetensors", part: str = ""
) -> None:
    """Write a checkpoint's weights, verified, for other tools. Equal weights make equal files, on every machine.

    Args:
        run: <store>/<run>.
        what: The commit (its number, its folder, or best; by default the newest) and the file to make; transformers
            makes a folder for from_pretrained, dcp one for torch.distributed.checkpoint.
        form: safetensors, transformers, torch for torch.load, or dcp.
        part: Only this part of the model, such as the name that a loop keeps it by, or extras.NAME.
    """
    *commit, out = split_out(what, "OUT", "for example: holdfast export runs/language language.safetensors")
    journal = open_journal(run)
    journal.read_run()
    found = find_commit(journal, *commit)
    names = export(journal, found, Path(out).absolute(), form, part)
    print(f"{out}: {len(names)} tensors")
    print(f"commit {found.number} of run {journal.run}: step {found.step}, {found.checkpoint_sha256}")
    if not part and (said := _describe_parts(names)):
        print(said)
    warn_if_quarantined(journal, found)


def _describe_parts(names: Sequence[str]) -> str:
    """Return a line that names the modules whose weights a file has; empty unless there are a few.

    A loop that keeps several modules has the weights of each below the module's name, which its own `load_state_dict`
    doesn't know.
    """
    parts = [*dict.fromkeys(name.partition(".")[0] for name in names if "." in name)]
    if not 1 < len(parts) <= MOST_PARTS:
        return ""
    return f"these are {', '.join(parts)}: --part {parts[0]} writes {parts[0]} alone, for its own load_state_dict"


def keygen(path: Path, /) -> None:
    """Make a pair of keys that sign and verify commits.

    Args:
        path: The file for the private key; the public key goes to <path>.pub.
    """
    key_id = generate_key(path)
    print(f"key id   {key_id}")
    print(f"private  {path}      for signing_key in the configuration; keep this file secret")
    print(f"public   {path}.pub  for resume.trusted_keys, and holdfast verify --key")

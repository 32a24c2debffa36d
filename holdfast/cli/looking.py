"""The command ``show``: list the runs of a store, or show the state of a run."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast import checkpoint
from holdfast.checkpoint.shown import SUFFIXES, list_shown, read_newest
from holdfast.config import DEFAULT_STORE
from holdfast.errors import (
    Damage,
    HoldfastError,
    RecordDamaged,
    RunUnknown,
    StoreDenied,
    StoreError,
    Unreadable,
    WrongUse,
)
from holdfast.journal import Journal, seconds_of
from holdfast.journal.answers import describe_answered, describe_unanswered, list_unanswered
from holdfast.journal.audits import Audits, list_audits
from holdfast.journal.chains import (
    describe_certified,
    describe_chain,
    find_certified,
    list_unaudited,
    read_newest_verdict,
)
from holdfast.journal.finding import find_best_commit, open_journal
from holdfast.journal.reading import read_all
from holdfast.journal.runs import MOST_SHOWN, choose_runs
from holdfast.journal.skips import list_skips, read_skips
from holdfast.keeping.retention import describe_policy
from holdfast.ledger.standing import Standing, read_standing
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from holdfast.terminal import counted, one_line, spell_s
from holdfast.terminal.columns import align, tabulate
from holdfast.terminal.options import Json, Limit, print_json

# This text follows the name of a checkpoint whose files are missing although no prune has deleted them.
GONE = ", which is lost: holdfast verify names the missing files"


def print_runs(store: str, *, json: bool, most: int | None = None) -> int:
    """Print the runs of a store, and return the exit code.

    Args:
        json: print JSON.
        most: print only this many runs, the newest first. By default `MOST_SHOWN` runs are printed, and as JSON all.
    """
    found = open_store(store)
    # The suffix "/." matches only a folder, and os.access raises no error for a name that is too long.
    if store != DEFAULT_STORE and isinstance(found, LocalStore) and not os.access(f"{found.root}/.", os.F_OK):
        raise RunUnknown(f"there is no store {store}", hint="a store is a folder or URL that contains runs")
    chosen = choose_runs(found, most or (None if json else MOST_SHOWN))
    standings: list[Standing] = []
    failed: list[HoldfastError] = []
    for journal, standing in zip(chosen.journals, read_all(_try_standing, chosen.journals), strict=True):
        if isinstance(standing, Standing):
            standings.append(standing)
        else:  # one run that can't be read must not hide the others
            failed.append(standing)
            print(f"run {journal.run}: {standing}", file=sys.stderr)
    exit_codes = {error.exit_code for error in failed}
    exit_code = Damage.exit_code if Damage.exit_code in exit_codes else max(exit_codes, default=0)
    if json:
        print_json([standing.model_dump() for standing in standings])
    elif not standings and not failed:
        print(f"no runs in {store}")
    elif standings:
        heads = ("run", "complete", "step", "epoch", "commit", "attempts", "loss", "checkpoint")
        print("\n".join(tabulate([heads, *map(_summarize, standings)], has_numbers=False)))
    if chosen.note:
        print(f"{chosen.note}; --limit {chosen.count} shows all", file=sys.stderr)
    return exit_code


def _try_standing(journal: Journal) -> Standing | HoldfastError:
    try:
        return read_standing(journal)
    except (Damage, StoreDenied, WrongUse) as error:
        return error


def _summarize(standing: Standing) -> tuple[str, ...]:
    return (
        standing.run,
        "yes" if standing.complete else "no",
        _format_progress(standing.step, standing.total_steps),
        _format_progress(standing.epoch, standing.epochs),
        str(standing.commit),
        str(standing.attempts),
        "" if standing.avg_loss is None else f"{standing.avg_loss:.4f}",
        standing.checkpoint_sha256[:12],
    )


def show_command(
    run: Annotated[str | None, Parameter(show_default=False)] = None,
    /,
    *,
    store: str = DEFAULT_STORE,
    limit: Limit = None,
    save: Path | None = None,
    json: Json = False,
) -> int:
    """Show the state of a run: its step, loss, checkpoint, attempts, and the texts and pictures that it has shown.

    Args:
        run: <store>/<run>, or the name of a run in the default store. Without it, list the runs of a store.
        store: The folder or URL whose runs to list.
        limit: The number of runs to list, the newest first. By default 100, and with --json all.
        save: A folder for all texts and pictures of the run, each in its own file.
        json: Print JSON.
    """
    if run is None:
        return print_runs(store, json=json, most=limit)
    journal = open_journal(run)
    standing = read_standing(journal)
    files = _save_shown(journal, save) if save else 0
    head = journal.find_commit(standing.commit)
    gone = GONE if head and not checkpoint.is_there(journal.store, head) else ""
    if json:
        newest = [
            {"name": shown.name, "type": shown.media_type, "step": shown.step, "epoch": shown.epoch}
            for shown in read_newest(journal)
        ]
        audits = list_audits(journal)
        verdict = read_newest_verdict(journal, audits)
        kept = {
            "best": _read_best(journal),
            "certified": _read_certified(journal, audits),
            "judged": verdict and verdict.to_json(),
            "unanswered": [each.to_json() for each in list_unanswered(journal, audits)],
            "skips": [record.model_dump() for record in list_skips(journal)],
        }
        print_json(standing.model_dump() | kept | {"shown": newest, "is_gone": bool(gone)})
        return 0
    fields = (
        _fields(standing, gone)
        | _describe_best(journal)
        | _describe_audits(journal)
        | _describe_skips(journal)
        | _describe_retention(journal)
        | {
            "shown": _name_shown(journal),
            "saved": save and f"{counted(files, 'file')} in {save}",
        }
    )
    rows = {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in fields.items()
        if value not in (None, "")
    }
    print("\n".join(align(rows)))
    return 0


def _read_best(journal: Journal) -> dict[str, Any] | None:
    """Return the best commit by ``retention.keep_best``; None if this isn't set, or if no commit has its metric."""
    retention = journal.read_retention()
    policy = retention.keep_best if retention else None
    best = find_best_commit(journal, policy) if policy else None
    if policy is None or best is None:
        return None
    return {
        "commit": best.number, "step": best.step, "path": best.path, "checkpoint_sha256": best.checkpoint_sha256,
        "metric": policy.metric, "value": best.metrics[policy.metric],
        **({} if checkpoint.is_there(journal.store, best) else {"is_gone": True}),
    }  # fmt: skip


def _describe_best(journal: Journal) -> dict[str, str]:
    """Return the table row about the best commit, by the row's name; empty if no best commit is known."""
    best = _read_best(journal)
    if best is None:
        return {}
    gone = GONE if "is_gone" in best else ""
    value = f"{best['metric']} {best['value']:.6g}"
    sha256 = best["checkpoint_sha256"][:12]
    return {"best": f"commit {best['commit']}, step {best['step']}, {value}, {sha256}, {best['path']}{gone}"}


def _read_certified(journal: Journal, audits: Audits) -> dict[str, Any] | None:
    """Return the newest certified commit, the host whose audit gave the same bytes, and the commits before it that no
    audit has trained to the same bytes; None if there is no certified commit.
    """
    found = find_certified(journal, journal.candidates(), audits)
    if found is None:
        return None
    commit, audit = found
    return {
        "commit": commit.number, "step": commit.step, "path": commit.path, "host": audit.host,
        "unaudited": list_unaudited(journal, commit, audits),
    }  # fmt: skip


def _describe_audits(journal: Journal) -> dict[str, str]:
    """Return the table rows about the newest certified commit and the audits' verdicts, by the rows' names."""
    audits = list_audits(journal)
    rows: dict[str, str] = {}
    if certified := describe_certified(journal, audits):
        rows |= {"certified": certified, "chain": describe_chain(journal, audits)}
    if verdict := read_newest_verdict(journal, audits):
        rows["audited"] = verdict.describe()
    for place, line in enumerate(describe_unanswered(journal, audits), 1):
        rows[f"verdict {place}"] = one_line(line)
    for place, line in enumerate(describe_answered(journal, audits), 1):
        rows[f"answer {place}"] = one_line(line)
    return rows


def _describe_skips(journal: Journal) -> dict[str, str]:
    """Return a table row with the run's skip list and its last author; empty without a list."""
    try:
        record = read_skips(journal)
    except (RecordDamaged, Unreadable) as error:  # don't show an older list, which isn't in force
        return {"skipped steps": one_line(str(error))}
    return {"skipped steps": one_line(f"{record.skip or 'none'}; {record}")} if record else {}


def _describe_retention(journal: Journal) -> dict[str, str]:
    """Return a table row with the checkpoints that the run keeps; empty if its settings are lost."""
    policy = journal.read_retention()
    kept = f"{describe_policy(policy)}; the others are deleted after a commit" if policy else ""
    return {"keeps": kept} if kept else {}


def _name_shown(journal: Journal) -> str:
    """Return the names of the last texts and pictures that the run has shown; empty if it has shown none."""
    try:
        return ", ".join(
            f"{shown.name} ({SUFFIXES[shown.media_type]}, step {shown.step})" for shown in read_newest(journal)
        )
    except Damage as error:  # a damaged record must not hide the other rows
        return str(error)


def _save_shown(journal: Journal, folder: Path) -> int:
    """Write everything that a run has shown to a folder. Return the number of files."""
    store, names = LocalStore(str(folder)), set()
    for shown in list_shown(journal):
        try:
            store.replace(shown.file_name, shown.data)
        except StoreError as error:
            raise WrongUse(error.message, hint="--save FOLDER names the folder to write to") from None
        names.add(shown.file_name)
    return len(names)


def _fields(standing: Standing, gone: str) -> dict[str, Any]:
    rows = {
        "run": standing.run,
        "recipe": standing.recipe,
        "complete": "yes" if standing.complete else "no",
        "step": _format_progress(standing.step, standing.total_steps),
        "epoch": _format_progress(standing.epoch, standing.epochs),
        "loss": standing.avg_loss,
        **standing.metrics,
        **standing.anneals,
        **{f"probe {name}": value for name, value in standing.probe.items()},
        "commit": standing.commit,
        "checkpoint": standing.checkpoint_sha256,
        "resume": standing.verdict,
        "imported from": standing.origin,
        "stored in": standing.path + gone,
        "fingerprint": standing.config_fingerprint,
        "attempts": standing.attempts,
        "last ended": _format_ending(standing),
        "quarantined": standing.quarantined or None,
    }
    if live := standing.live:
        rows["being trained"] = (
            f"by attempt {live.attempt} on {live.host} since {live.since}, last sign {_format_age(live.last_sign)}; "
            f"or the attempt died without recording its end"
        )
    return rows


def _format_ending(standing: Standing) -> str:
    """Return why the last attempt ended; empty if it completed the run, or if its ending isn't on record."""
    ending = standing.ending
    return (
        ""
        if ending is None or ending.reason == "completed"
        else one_line(f"at step {ending.step}: {'; '.join(str(ending).splitlines())}")
    )


def _format_age(at: str) -> str:
    """Return a record's age, such as ``12 min ago``."""
    return f"{spell_s(max(0.0, time.time() - seconds_of(at)))} ago"


def _format_progress(done: int, total: int | None) -> str:
    return f"{done} of {total}" if total else str(done)

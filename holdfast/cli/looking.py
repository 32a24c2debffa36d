"""``holdfast``: a person's view of a store."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from holdfast import __version__, checkpoint
from holdfast.errors import HoldfastError, RunUnknown
from holdfast.journal import Journal
from holdfast.standing import Standing, read_standing
from holdfast.store import open_store

EXIT_CODES = """\
Exit codes: 0 good; 1 wrong use: a setting, a name or an option is wrong; 2 damage found; 3 the run stopped early, and \
the same command continues it; 130 and 143 it was told to stop, by Ctrl-C or SIGTERM, and has saved."""

app = App(
    name="holdfast",
    help="Look at training runs and check them. RUN is <store>/<run>.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version=__version__,
)


@app.command
def runs(store: str, *, json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """List the runs of a store.

    Args:
        store: The folder that holds the runs.
        json: Print JSON.
    """
    opened = open_store(store)
    journals = [Journal(opened, name) for name in opened.list()]
    standings = [read_standing(journal) for journal in journals if journal.exists()]
    if json:
        _print_json([standing.model_dump() for standing in standings])
        return
    if not standings:
        print(f"no runs in {store}")
        return
    table = Table("run", "complete", "step", "epoch", "commit", "attempts", "loss", "checkpoint", box=None)
    for standing in standings:
        table.add_row(
            standing.run,
            "yes" if standing.complete else "no",
            _of(standing.step, standing.total_steps),
            _of(standing.epoch, standing.epochs),
            str(standing.commit),
            str(standing.attempts),
            "" if standing.avg_loss is None else f"{standing.avg_loss:.4f}",
            standing.checkpoint_sha256[:12],
        )
    Console(highlight=False).print(table)


@app.command
def show(run: str, *, json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Show where a run stands.

    Args:
        run: <store>/<run>.
        json: Print JSON.
    """
    standing = read_standing(open_journal(run))
    if json:
        _print_json(standing.model_dump())
        return
    for name, value in _rows(standing).items():
        print(f"{name:14}  {value}")


@app.command
def verify(run: str, *, json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Read every checkpoint of a run back and compare it with its commit.

    Args:
        run: <store>/<run>.
        json: Print JSON.
    """
    journal = open_journal(run)
    journal.read_run()
    checked: list[dict[str, Any]] = []
    problems = [f"the record of commit {number} is damaged or lost" for number in journal.lost_commits()]
    for commit in journal.candidates():
        damaged = checkpoint.verify(journal.store, commit)
        problems += [str(damage) for damage in damaged]
        checked.append(
            {
                "commit": commit.number,
                "path": commit.path,
                "checkpoint_sha256": commit.checkpoint_sha256,
                "damaged": [vars(damage) for damage in damaged],
            }
        )
    if json:
        _print_json({"run": journal.run, "ok": not problems, "problems": problems, "checkpoints": checked})
    else:
        for entry in checked:
            print(f"{'damaged' if entry['damaged'] else 'good':8}{entry['checkpoint_sha256']}  {entry['path']}")
        for problem in problems:
            print(problem)
        print(f"{len(checked)} checkpoints read, {len(problems)} problems")
    return 2 if problems else 0


def open_journal(run: str) -> Journal:
    """The journal of the run that ``<store>/<run>`` names.

    Raises:
        RunUnknown: it names none.
    """
    store, _, name = run.rstrip("/").rpartition("/")
    if not name or name.endswith(":"):
        raise RunUnknown(f"{run!r} is not a run", hint="give it as <store>/<run>, for example runs/language")
    return Journal(open_store(store or "."), name)


def _rows(standing: Standing) -> dict[str, Any]:
    rows = {
        "run": standing.run,
        "recipe": standing.recipe,
        "complete": "yes" if standing.complete else "no",
        "step": _of(standing.step, standing.total_steps),
        "epoch": _of(standing.epoch, standing.epochs),
        "loss": standing.avg_loss,
        **standing.metrics,
        "commit": standing.commit,
        "checkpoint": standing.checkpoint_sha256,
        "lies in": standing.path,
        "fingerprint": standing.config_fingerprint,
        "attempts": standing.attempts,
        "quarantined": standing.quarantined or None,
    }
    return {name: value for name, value in rows.items() if value not in (None, "")}


def _of(done: int, total: int | None) -> str:
    return f"{done} of {total}" if total else str(done)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def run_app(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code. An error is one clear line and, where there is one, a hint."""
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        return _complain(str(error), hint="--help shows what there is", exit_code=1)
    except HoldfastError as error:
        return _complain(error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0


def _complain(message: str, hint: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return exit_code


def main() -> None:
    """The console script."""
    sys.exit(run_app(app))


if __name__ == "__main__":
    main()

"""The command ``diff``: changes over a run's life, against a configuration, and between two runs."""

from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.changes import Change, show, to_lineage
from holdfast.cli.app import Json, app, print_json
from holdfast.config import load_config
from holdfast.differences import Judged, compare_runs, judge, list_lives
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal


@app.command(usage="Usage: holdfast diff RUN [OTHER | CONFIG.toml]")
def diff(run: str, other: Annotated[str, Parameter(show_default=False)] = "", /, *, json: Json = False) -> int:
    """Show what changed over a run's life, or how it differs from a configuration or from another run.

    With a configuration, import its recipe, and end with exit code 1 if the run would refuse to go on with it.

    Args:
        run: <store>/<run>.
        other: A configuration (a .toml file) or another run. Without it, compare each attempt with the one before.
        json: Print JSON.
    """
    journal = open_journal(run)
    journal.read_run()
    if other.endswith(".toml"):
        return _show_config(journal, other, json)
    if other:
        _show_other(journal, open_journal(other), json)
    else:
        _show_life(journal, json)
    return 0


# ---- a configuration


def _show_config(journal: Journal, path: str, json: bool) -> int:
    judged = judge(journal, load_config(path))
    if json:
        rows = [{"outcome": outcome, **_to_json(cls, change)} for outcome, cls, change in judged.rows]
        print_json({"run": journal.run, "config": path, **vars(judged), "rows": rows})
    else:
        _print_judged(judged, journal.run, path)
    return 1 if judged.is_refused else 0


def _print_judged(judged: Judged, run: str, path: str) -> None:
    for outcome, cls, change in judged.rows:
        print(f"{outcome:13}  {cls:11}  {change}")
    for note in judged.notes:
        print(f"note: {note}")
    if judged.is_refused:
        print(f"run {run} would refuse to go on with {path}")
        print(f"hint: {judged.hint}")
    else:
        print(f"run {run} would go on with {path}{'' if judged.rows else ', which changes nothing'}")


# ---- another run


def _show_other(journal: Journal, other: Journal, json: bool) -> None:
    other.read_run()
    rows = compare_runs(journal, other)
    if json:
        print_json({"run": journal.run, "other": other.run, "rows": [_to_json(*row) for row in rows]})
        return
    for cls, change in rows:
        print(f"{cls:11}  {_describe(change, journal.run, other.run)}")
    if not rows:
        print(f"runs {journal.run} and {other.run} have the same settings")


def _describe(change: Change, run: str, other: str) -> str:
    """Return a change as a difference between two runs."""
    if change.kind == "renamed":
        return f"{change.was} in {run}, {change.name} in {other}: {show(change.current)}"
    saved = f"not in {run}" if change.kind == "added" else f"{show(change.saved)} in {run}"
    current = f"not in {other}" if change.kind == "removed" else f"{show(change.current)} in {other}"
    return f"{change.name}: {saved}, {current}"


def _to_json(cls: str, change: Change) -> dict[str, Any]:
    return {"name": change.name, "class": cls, **to_lineage([change])[change.name]}


# ---- a run's own life


def _show_life(journal: Journal, json: bool) -> None:
    lives = list(list_lives(journal))
    if json:
        attempts = [
            {**record.model_dump(include={"number", "why", "created_at"}), "changes": to_lineage(changes)}
            for record, changes in lives
        ]
        print_json({"run": journal.run, "attempts": attempts})
        return
    for record, changes in lives:
        print(f"attempt {record.number}  {record.created_at}  {record.why}")
        for change in changes:
            print(f"  {change}")
    if not any(changes for _, changes in lives):
        print("nothing that changes the mathematics has changed" if lives else "the run has no attempt yet")

"""The command ``diff``: changes over a run's life, or differences from a configuration."""

from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.config import load_config
from holdfast.errors import WrongUse
from holdfast.journal import Journal
from holdfast.journal.finding import open_journal
from holdfast.proof.differences import Judged, judge_run, list_life_changes
from holdfast.provenance.changes import Change, to_lineage
from holdfast.terminal.options import Json, print_json


def diff_command(run: str, config: Annotated[str, Parameter(show_default=False)] = "", /, *, json: Json = False) -> int:
    """Show what changed over a run's life, or how it differs from a configuration.

    With a configuration, import its recipe, and end with exit code 1 if the run would refuse to continue with it.

    Args:
        run: <store>/<run>.
        config: A configuration, a .toml file. Without it, compare each attempt with the one before.
        json: Print JSON.
    """
    journal = open_journal(run)
    journal.read_run()
    if config and not config.endswith(".toml"):
        raise WrongUse(f"{config!r} is not a .toml file", hint=f"to compare two runs: holdfast compare {run} {config}")
    if config:
        return _show_config(journal, config, json)
    _show_life(journal, json)
    return 0


# ---- a configuration


def _show_config(journal: Journal, path: str, json: bool) -> int:
    judged = judge_run(journal, load_config(path))
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
        print(f"run {run} would refuse to continue with {path}")
        print(f"hint: {judged.hint}")
    else:
        print(f"run {run} would continue with {path}{'' if judged.rows else ', which changes nothing'}")


def _to_json(cls: str, change: Change) -> dict[str, Any]:
    return {"name": change.name, "class": cls, **to_lineage([change])[change.name]}


# ---- a run's own life


def _show_life(journal: Journal, json: bool) -> None:
    lives = list(list_life_changes(journal))
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

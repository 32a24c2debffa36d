"""The command `compare`: whether two runs, commits or stores are the same training, and their first difference."""

import sys

from holdfast.cli.trusting import is_config, open_trusted
from holdfast.errors import Damage, StoreDenied, WrongUse
from holdfast.extensions.compare.ancestry import Ancestry, read_ancestry
from holdfast.extensions.compare.comparing import compare_trainings
from holdfast.extensions.compare.report import Comparison
from holdfast.journal import Journal
from holdfast.journal.finding import open_place
from holdfast.journal.runs import find_runs
from holdfast.recipe.trust import Trust
from holdfast.store import Store
from holdfast.terminal import counted
from holdfast.terminal.options import Flag, Json, TrustRecords, print_json

# The fields of a step that are inputs of the model. If an input differs first, it is the reason why tensors differ.
INPUTS = {"samples", "batch content", "lrs", "anneals"}


def compare_command(
    run: str,
    other: str,
    /,
    *,
    replay: Flag = False,
    recipe: str = "",
    trust_records: TrustRecords = False,
    json: Json = False,
) -> int:
    """Find out whether two runs trained the same. Show their first difference and its most likely cause.

    Compare content ids at the steps at which both have a checkpoint, the trails at every step, and then the records of
    settings, code, data, packages and machine.

    The exit code is 0 if the runs are equal as far as both have trained, and 2 if they differ.

    Args:
        run: <store>/<run>, or <store>/<run>@<commit> for the training that led to that commit; or a store of runs; or
            the TOML file of your configuration of a run, with which --replay then trains this run.
        other: The other training, in the same form. If one of the two is a store, the run in it with the other's name
            is compared.
        replay: Train the steps of the first difference again, to name the first tensor that differs.
        recipe: The recipe of both runs, written as in a configuration, in place of the recorded recipes. By default a
            recorded recipe is trained, but only if its code is in this folder or comes with Holdfast.
        trust_records: Train with the recorded recipes and settings, even if the code is elsewhere or a setting names
            a file or an address. Code in a file of a store is never run.
        json: Print JSON.
    """
    places, trust = (_open(run), _open(other)), Trust(recipe, trust_records)
    if isinstance(places[0], Store) and isinstance(places[1], Store):
        return _compare_stores(places[0], places[1], is_replayed=replay, trust=trust, json=json)
    trusts = [open_trusted(each, recipe, trust_records)[1] if is_config(each) else trust for each in (run, other)]
    found = compare_trainings(*_read_both(places, (run, other)), is_replayed=replay, trusts=(trusts[0], trusts[1]))
    if json:
        print_json(found.model_dump(mode="json"))
    else:
        print(found)
        if not replay:
            _hint_at_replay(found)
    return 0 if found.is_equal else 2


def _hint_at_replay(found: Comparison) -> None:
    """Print a hint about ``--replay`` if the inputs are equal and a replay could name the first tensor that differs."""
    if found.first_differs_in and found.first_differs_in[0] not in INPUTS and not found.first_tensors:
        print("hint: --replay trains these steps again here, and names the first tensor that differs", file=sys.stderr)


Place = tuple[Journal, str] | Store


def _open(text: str) -> Place:
    """Open the store or the run that a text names; for a run, also return the name of the commit after the ``@``."""
    if is_config(text):
        return open_trusted(text, "", False)[0], ""
    before, slash, last = text.rpartition("/")
    run, at, commit = last.partition("@")
    if not at or before.endswith(":/"):  # the @ of az://container@account names no commit
        place = open_place(text)
        return (place, "") if isinstance(place, Journal) else place
    found = open_place(f"{before}{slash}{run}")
    if isinstance(found, Store) or not commit:
        raise WrongUse(
            f"{text!r} is not a commit of a run", hint="name a commit as <store>/<run>@<commit>, such as runs/a@3"
        )
    return found, commit


def _read_both(places: tuple[Place, Place], texts: tuple[str, str]) -> tuple[Ancestry, Ancestry]:
    """Read the two trainings. If one place is a store, read its run with the name of the other place's run."""
    one, other = places
    left = _find_in(one, other) if isinstance(one, Store) else one
    right = _find_in(other, left) if isinstance(other, Store) else other
    runs = (left[0].run, right[0].run)
    labels = texts if runs[0] == runs[1] else runs
    return read_ancestry(left[0], labels[0], left[1]), read_ancestry(right[0], labels[1], right[1])


def _find_in(store: Store, beside: Place) -> tuple[Journal, str]:
    assert not isinstance(beside, Store)
    return Journal(store, beside[0].run), ""


# ---- two stores


def _compare_stores(one: Store, other: Store, *, is_replayed: bool, trust: Trust, json: bool) -> int:
    """Compare the runs of two stores by name; print a line for each, and return the exit code."""
    ones, others = ({journal.run: journal for journal in find_runs(store)} for store in (one, other))
    rows: dict[str, Comparison | str] = {}
    for run in sorted(ones.keys() | others.keys()):
        if run not in ones or run not in others:
            rows[run] = f"only in {one.url if run in ones else other.url}"
            continue
        try:
            lines = read_ancestry(ones[run], f"{one.url}/{run}"), read_ancestry(others[run], f"{other.url}/{run}")
            rows[run] = compare_trainings(*lines, is_replayed=is_replayed, trusts=(trust, trust))
        except (Damage, StoreDenied, WrongUse) as error:  # one run that can't be read must not hide the others
            rows[run] = str(error)
    if json:
        print_json({run: row if isinstance(row, str) else row.model_dump(mode="json") for run, row in rows.items()})
    else:
        for run, row in rows.items():
            print(f"{run}: {row}")
    different = [run for run, row in rows.items() if isinstance(row, str) or not row.is_equal]
    if not json:
        print(f"{counted(len(rows), 'run')} compared, {len(different)} different")
    return 2 if different else 0

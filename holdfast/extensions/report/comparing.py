"""Several runs on one page: their curves in shared charts, the settings that differ, and how each run ended."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.extensions.report.curves import make_curves
from holdfast.extensions.report.gathering import Gatherer, History
from holdfast.extensions.report.lives import list_lives, make_report_ledger
from holdfast.extensions.report.markup import Markup, element, join_html, section, table
from holdfast.extensions.report.numbers import show_number
from holdfast.extensions.report.page import make_curves_section, wrap
from holdfast.extensions.report.sections import describe_standing, show_all_problems
from holdfast.journal import Journal
from holdfast.journal.reading import read_all
from holdfast.provenance.fingerprint import flatten

# Settings that say where a run is stored; they differ between any two runs.
PLACES = ("run", "store", "log.folder")
MOST_AXES = 12


def compare_runs(journals: Sequence[Journal]) -> str:
    """Return the report of several runs as HTML."""
    return make_comparison(read_all(lambda journal: Gatherer(journal).gather(), journals))


def make_comparison(histories: Sequence[History], now: float | None = None) -> str:
    """Return the report of several runs as HTML."""
    now = time.time() if now is None else now
    names = _name_apart(histories)
    settings = find_differences(histories)
    results = [_list_results(history) for history in histories]
    problems = [f"{name}: {each}" for name, history in zip(names, histories, strict=True) for each in history.problems]
    axes = _list_axes(settings, results)
    body = join_html(
        show_all_problems(problems, "holdfast verify RUN"),
        _make_table(names, histories, settings, results, now),
        section("Settings and results", "parallel", element("div", id="parallel-plot")) if settings else Markup(),
        make_curves_section(),
    )
    data = {
        "runs": [{"name": name, "marks": []} for name in names],
        **make_curves(histories),
        "axes": axes,
    }
    return wrap(f"{len(histories)} runs", ", ".join(history.url for history in histories), body, data, now)


def _name_apart(histories: Sequence[History]) -> list[str]:
    """Return the runs' names, or their URLs if two runs have the same name."""
    names = [history.run for history in histories]
    return names if len(set(names)) == len(names) else [history.url for history in histories]


def find_differences(histories: Sequence[History]) -> dict[str, list[Any]]:
    """Return the settings that differ between the runs, by dotted name, with the value of each run."""
    flat = [flatten(each.snapshot.config) if each.snapshot else {} for each in histories]
    names = dict.fromkeys(name for each in flat for name in each if name not in PLACES)
    found = {name: [each.get(name) for each in flat] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


def _list_results(history: History) -> dict[str, float | None]:
    metadata = history.newest_metadata
    return {"loss": metadata.avg_loss, **metadata.metrics} if metadata else {}


def _make_table(
    names: Sequence[str],
    histories: Sequence[History],
    settings: Mapping[str, list[Any]],
    results: Sequence[Mapping[str, float | None]],
    now: float,
) -> Markup:
    measured = list(dict.fromkeys(name for each in results for name in each))
    rows = []
    for number, (name, history) in enumerate(zip(names, histories, strict=True)):
        step, total = history.newest.step if history.newest else 0, history.total_steps
        rows.append([
            name,
            *(_to_text(values[number]) for values in settings.values()),
            *(show_number(results[number].get(each)) for each in measured),
            f"{step:,} of {total:,}" if total else f"{step:,}",
            describe_standing(history, list_lives(history, make_report_ledger(history, now)[0])),
            element("code", history.newest.checkpoint_sha256[:12] if history.newest else ""),
        ])  # fmt: skip
    heads = ("run", *settings, *measured, "step", "state", "content id")
    listed = table(heads, rows, "A click on a heading sorts", "rows sortable")
    note = "The settings that differ, and the results of each run's newest commit."
    return section("Runs", "runs", element("p", note, class_="note"), listed)


def _to_text(value: Any) -> str:
    return "" if value is None else str(value)


def _list_axes(
    settings: Mapping[str, list[Any]], results: Sequence[Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    """Return the axes of the chart of parallel coordinates: settings first, then results, with a value for each run."""
    measured = dict.fromkeys(name for each in results for name in each)
    axes = [{"name": name, "values": [_to_plain(each) for each in values]} for name, values in settings.items()]
    axes += [{"name": name, "values": [each.get(name) for each in results]} for name in measured]
    return axes[-MOST_AXES:]


def _to_plain(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else _to_text(value)

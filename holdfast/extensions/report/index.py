"""The index of a store: a line for each run, with a sparkline of its loss."""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import HoldfastError, NameMissing, RecordDamaged, Unreadable
from holdfast.extensions.report.markup import Markup, element, section, table_of
from holdfast.extensions.report.numbers import show_number, show_time
from holdfast.extensions.report.page import wrap
from holdfast.extensions.report.sections import show_all_problems
from holdfast.journal import REPORT, Commit, Journal
from holdfast.journal.reading import read_all
from holdfast.journal.runs import ChosenRuns
from holdfast.ledger.standing import Standing, read_standing
from holdfast.store import Store

# The most and the fewest commits whose losses a sparkline shows, and the approximate number in a whole index. Each loss
# takes a request to the store.
SPARKS, LEAST_SPARKS, ALL_SPARKS = 64, 8, 2000
WIDTH, HEIGHT = 160, 30


@dataclass(frozen=True)
class Row:
    """One run of an index.

    Attributes:
        standing: the run's progress and last attempt; None if they can't be read.
        losses: mean losses of commits, evenly chosen, oldest first; None for a loss that isn't finite.
        written: when the run's newest commit was made; empty if there is none.
        problem: why the standing can't be read; empty if it can be read.
        has_page: whether the run's folder has a report.
    """

    run: str
    standing: Standing | None = None
    losses: tuple[float | None, ...] = ()
    written: str = ""
    problem: str = ""
    has_page: bool = False


def read_rows(chosen: ChosenRuns) -> list[Row]:
    """Return a row for each of these runs of a store, in the given order. A damaged run gets a row that says so."""
    count = len(chosen.journals)
    sparks = min(SPARKS, max(LEAST_SPARKS, ALL_SPARKS // max(1, count)))
    return read_all(_read_row, chosen.journals, [sparks] * count)


def _read_row(journal: Journal, sparks: int) -> Row:
    has_page = False
    try:
        has_page = journal.store.exists(REPORT)
        standing = read_standing(journal)
    except HoldfastError as error:
        return Row(journal.run, problem=str(error), has_page=has_page)
    commits = _choose_commits(journal, sparks)
    losses = tuple(commit.shown_loss for commit in commits)
    return Row(journal.run, standing, losses, commits[-1].created_at if commits else "", has_page=has_page)


def read_loss_curve(journal: Journal) -> list[tuple[int, float | None]]:
    """Return pairs of step and mean loss, of evenly chosen valid commits of a run, in the order of the steps."""
    quarantined = set(journal.numbers("quarantine"))
    commits = [commit for commit in _choose_commits(journal, SPARKS) if commit.number not in quarantined]
    return [(commit.step, commit.shown_loss) for commit in sorted(commits, key=lambda each: each.step)]


def _choose_commits(journal: Journal, most: int) -> list[Commit]:
    """Return up to this many readable commits of a run: the newest commit, and earlier commits at even distances."""
    numbers = journal.numbers("commits")
    commits = []
    for number in dict.fromkeys([*numbers[:: max(1, math.ceil(len(numbers) / most))], *numbers[-1:]]):
        with contextlib.suppress(NameMissing, RecordDamaged, Unreadable):
            commits.append(journal.read_commit(number))
    return commits


def make_index(store: Store, rows: Sequence[Row], place: str = "", now: float | None = None, *, note: str = "") -> str:
    """Return the index of a store as HTML.

    Args:
        note: a text that says which of the store's runs have a row; empty if all runs have a row.
        place: the path from the page's folder to the store, for links to the runs' own reports; empty for no links.
    """
    problems = [f"{row.run}: {row.problem}" for row in rows if row.problem]
    heads = ("run", "loss over commits", "loss", "step", "state", "attempts", "newest commit (UTC)")
    body = section("Runs", "runs", element("p", f"There is no run in {store.url}.", class_="empty"))
    if rows:
        body = element("tbody", *(_make_row(row, place) for row in rows))
        listed = table_of(heads, body, "A click on a heading sorts", "rows sortable")
        body = section("Runs", "runs", Markup(element("p", f"{note}.") + listed) if note else listed)
    whole = Markup(show_all_problems(problems, "holdfast verify RUN") + body)
    now = time.time() if now is None else now
    return wrap(f"{len(rows)} runs", store.url, whole, {"runs": [], "curves": {}, "left_out": 0}, now)


def _make_row(row: Row, place: str) -> Markup:
    name: object = row.run
    if row.has_page and place:
        name = element("a", row.run, href=f"{place}/{row.run}/{REPORT}")
    standing = row.standing
    if standing is None:
        unreadable = element("span", "can't be read", class_="badge bad")
        return element("tr", element("th", name, scope="row"), *map(_cell, ("", "", "", unreadable, "", "")))
    total = f" of {standing.total_steps:,}" if standing.total_steps else ""
    state, look = ("complete", "good") if standing.complete else ("stopped", "warn")
    if standing.live:
        state, look = f"attempt {standing.live.attempt} is running, or died without a record", "live"
    elif not standing.attempts:
        state, look = "not started", "calm"
    return element(
        "tr",
        element("th", name, scope="row"),
        _cell(make_sparkline(row.losses), standing.avg_loss),
        _cell(show_number(standing.avg_loss), standing.avg_loss),
        _cell(f"{standing.step:,}{total}", standing.step),
        _cell(element("span", state, class_=f"badge {look}")),
        _cell(standing.attempts),
        _cell(show_time(row.written) if row.written else ""),
    )


def _cell(child: object, value: object = None) -> Markup:
    return element("td", child, data_value=value)


def make_sparkline(values: Sequence[float | None]) -> Markup:
    """Return a small curve as HTML; empty HTML if fewer than two values are finite."""
    known = [(place, value) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return Markup()
    low, high = min(value for _, value in known), max(value for _, value in known)
    across, up = WIDTH / (len(values) - 1), (HEIGHT - 4) / ((high - low) or 1.0)
    points = " ".join(f"{place * across:.1f},{HEIGHT - 2 - (value - low) * up:.1f}" for place, value in known)
    label = f"from {show_number(known[0][1])} to {show_number(known[-1][1])}"
    line = element("polyline", points=points)
    return element("svg", line, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="spark", role="img", aria_label=label)

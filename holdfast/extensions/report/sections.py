"""The plain HTML sections of a run's page: overview, attempts, changes, probe, machine and settings."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.filesize import decimal

from holdfast.extensions.report.commits import count_states
from holdfast.extensions.report.gathering import History
from holdfast.extensions.report.lives import RUNNING, ReportedLife, find_starts
from holdfast.extensions.report.markup import Markup, element, join_html, section, table
from holdfast.extensions.report.numbers import show_number, show_seconds, show_time
from holdfast.journal.exactness import describe_exactness
from holdfast.machine.contract import terms_on
from holdfast.machine.slow_ranks import SlowRank
from holdfast.provenance.changes import from_lineage
from holdfast.provenance.fingerprint import flatten
from holdfast.terminal import counted

MOST_ROWS = 500
MOST_CHANGES = 200
# The entries of a rank's environment that the page's table omits: other tables have them, or their values are long.
LONG = ("sources", "source_bytes", "packages", "files", "built", "holdfast")


def make_overview(history: History, lives: list[ReportedLife]) -> Markup:
    """Return the overview: the facts that a reader looks for first."""
    facts = [*_list_facts(history, lives), *_list_names(history)]
    listed = element("dl", *(element("div", element("dt", name), element("dd", value)) for name, value in facts))
    return join_html(show_all_problems(history.problems, f"holdfast verify {history.url}"), listed)


def _list_facts(history: History, lives: list[ReportedLife]) -> Iterator[tuple[str, object]]:
    newest, metadata, total = history.newest, history.newest_metadata, history.total_steps
    yield "state", describe_standing(history, lives)
    if newest is not None:
        yield "step", f"{newest.step:,} of {total:,}" if total else f"{newest.step:,}"
        yield "epoch", f"{newest.epoch:,}" if history.epochs is None else f"{newest.epoch:,} of {history.epochs:,}"
    for name, value in (("loss", metadata.avg_loss), *metadata.metrics.items()) if metadata else ():
        yield name, "not finite" if value is None else show_number(value)
    if newest is not None:
        yield "checkpoint", decimal(newest.size_bytes)
        yield "resume", describe_exactness(newest, history.endings.get(max(history.attempts, default=0)), history.url)
    if history.verdict is not None:
        yield "audited", history.verdict.describe()
        counting = history.commits.keys() - history.quarantined.keys()
        certified = len(history.certified.keys() & counting)
        said = f"{certified:,} of {len(counting):,} commits, the others are candidates"
        yield "certified", said if certified else "no commit yet"
    if history.chain:
        yield "chain", history.chain
    if metadata is not None:
        yield "parameters", f"{metadata.model_params:,}"
    if history.record is not None:
        yield "began", f"{show_time(history.record.created_at)} UTC"
    yield "attempts", len(history.attempts)
    states = count_states(history)
    yield "commits", ", ".join(f"{number:,} {state}" for state, number in sorted(states.items())) or "none yet"


def _list_names(history: History) -> Iterator[tuple[str, object]]:
    for line in history.unanswered:
        yield "verdict without an answer", element("strong", line)
    for line in history.answered:
        yield "verdict with an answer", element("strong", line)
    if history.record is not None:
        yield "recipe", element("code", history.record.recipe)
    if history.newest is not None:
        yield "content id", element("code", history.newest.checkpoint_sha256)
        yield "stored in", element("code", f"{history.url}/{history.newest.path}")


def describe_standing(history: History, lives: list[ReportedLife]) -> str:
    """Return a run's status in a few words."""
    if history.is_complete:
        return "complete"
    if not lives:
        return "not started"
    last = lives[-1]
    if last.reason == RUNNING:
        return f"being trained by attempt {last.record.number} on {last.record.host}, or it died without a record"
    return f"attempt {last.record.number} ended: {last.reason.replace('_', ' ')}"


def show_all_problems(problems: Sequence[str], command: str) -> Markup:
    """Return a box with the problems and the command that reads everything back; no text if there are no problems."""
    if not problems:
        return Markup()
    title = f"{counted(len(problems), 'problem')}: this page shows what is left"
    lines = element("ul", *(element("li", each) for each in problems))
    hint = element("p", "To read everything back: ", element("code", command))
    return element("div", element("h2", title), lines, hint, class_="problems", role="alert")


# ---- attempts


def make_attempts(lives: list[ReportedLife], timeline: Markup) -> Markup:
    """Return the section with a timeline and a table of the attempts."""
    if not lives:
        return section("Attempts", "attempts", element("p", "No attempt has begun yet.", class_="empty"))
    heads = ["attempt", "began (UTC)", "why", "host", "waited", "lived", "steps", "commits", "ended", "because"]
    shown = lives[-MOST_ROWS:][::-1]
    rows = [_make_row(each) for each in shown]
    if any(each.slow_rank for each in shown):
        heads.append("slow rank")
        rows = [[*row, _describe_slow(each.slow_rank)] for row, each in zip(rows, shown, strict=True)]
    left_out = len(lives) - len(rows)
    note = element("p", f"{left_out:,} older attempts are not listed.", class_="note") if left_out else ""
    return section(
        "Attempts",
        "attempts",
        timeline,
        table(heads, rows, f"{counted(len(rows), 'attempt')}, the newest first", "rows long"),
        note,
    )


def _make_row(life: ReportedLife) -> list[object]:
    record, ending = life.record, life.ending
    return [
        record.number,
        show_time(record.created_at),
        record.why,
        record.host,
        show_seconds(life.gap_s) if life.gap_s else "",
        show_seconds(life.ended - life.began),
        f"{life.first_step:,} to {life.last_step:,}" if life.commits else "none",
        life.commits,
        element("span", life.reason.replace("_", " "), class_=f"badge {life.look}"),
        ending.message if ending else "",
    ]


def _describe_slow(slow: SlowRank | None) -> str:
    """Describe the rank for which the other ranks waited: its machine, the fraction of a step's time, and the steps."""
    return f"rank {slow.rank} on {slow.where}: {slow.share:.0%} of steps {slow.start:,}-{slow.stop:,}" if slow else ""


# ---- changes and lineage


def make_changes(history: History) -> Markup:
    """Return a section with the changes that each attempt accepted: settings, code, machine, source commit."""
    starts = find_starts(history)
    rows: list[list[object]] = []
    for number, record in sorted(history.attempts.items()):
        rows += _list_start(history, number, record.lineage.get("continues"), starts.get(number, 0))
        rows += _list_changes(number, record.lineage)
    rows += [["", "skipped steps", str(record)] for _, record in sorted(history.skips.items())]
    shown = rows[-MOST_CHANGES:][::-1]
    heads = ("attempt", "what", "detail")
    body = (
        table(heads, shown, "Changes and lineage, the newest first", "long")
        if shown
        else element("p", "No attempt changed settings, code or machine.", class_="empty")
    )
    return section("Changes and lineage", "changes", body)


def _list_start(history: History, attempt: int, claimed: object, start: int) -> Iterator[list[object]]:
    """Yield a table row for the commit from which an attempt continued.

    Args:
        claimed: the newest commit when the attempt began, from the attempt's record.
        start: the commit from which the attempt continued, once it had adopted or quarantined commits; 0 if unknown.
    """
    before: dict[str, object] = claimed if isinstance(claimed, dict) else {}
    known, number = history.commits.get(start), before.get("commit", "?")
    if known is None and not before:
        return
    sha256 = str(known.checkpoint_sha256 if known else before.get("checkpoint_sha256", ""))
    text = [f"commit {start if known else number}, content id ", element("code", sha256[:12])]
    if known and number not in (start, "?"):
        text.append(f"; the newest was commit {number} when it began")
    yield [attempt, "continues", join_html(*text)]


def _list_changes(attempt: int, lineage: dict[str, Any]) -> Iterator[list[object]]:
    ancestor = lineage.get("ancestor")
    if ancestor:
        yield [attempt, "began with weights of", element("code", _to_text(ancestor))]
    if origin := lineage.get("origin"):
        yield [attempt, "imported", element("code", _to_text(origin))]
    try:
        for change in from_lineage(lineage.get("drift", {})):
            yield [attempt, "changed", str(change)]
    except (AttributeError, KeyError, TypeError, ValueError):  # a different version of Holdfast wrote the record
        yield [attempt, "changed", element("code", _to_text(lineage.get("drift")))]
    verdict = lineage.get("environment")
    if isinstance(verdict, dict) and verdict.get("promise") != "identical":
        reasons = "; ".join(map(str, verdict.get("reasons") or ()))
        yield [attempt, f"equal bits: {verdict.get('promise', '?')}", reasons]


def _to_text(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# ---- health, machine, settings


def make_health(history: History) -> Markup:
    """Return the section with the probe (model outputs that the gate compares) of the newest remaining checkpoints."""
    numbers = sorted(history.metadata, reverse=True)
    names = sorted({name for number in numbers for name in history.metadata[number].probe.values})
    if not names:
        text = "The probe recorded no values: the recipe has none, or no checkpoint is left."
        return section("Health and probe", "health", element("p", text, class_="empty"))
    rows = []
    for number in numbers:
        probe = history.metadata[number].probe
        values = [_show_value(probe.values, name) for name in names]
        rows.append([number, history.commits[number].step, *values, element("code", probe.sha256[:12])])
    heads = ("commit", "step", *names, "probe")
    return section(
        "Health and probe", "health", table(heads, rows, "Values at each checkpoint that still exists", "numbers")
    )


def _show_value(values: dict[str, float | None], name: str) -> object:
    if name not in values:
        return ""
    value = values[name]
    return element("span", "not finite", class_="badge bad") if value is None else show_number(value)


def make_machine(history: History) -> Markup:
    """Return the section with the newest attempt's environment, and why equal bits depend on some of its values."""
    if not history.attempts:
        return section("Machine and contract", "machine", element("p", "No attempt is on record.", class_="empty"))
    first, newest = (history.attempts[each(history.attempts)] for each in (min, max))
    environment, before = newest.environment, first.environment
    terms = {term.key: term.why for term in terms_on(environment.get("device"))}
    rows = [
        [name, _to_cell(value), terms.get(name, ""), "" if before.get(name) == value else _to_cell(before.get(name))]
        for name, value in environment.items()
        if name not in LONG
    ]
    heads = (
        "property",
        f"attempt {newest.number}",
        "bits depend on it because",
        f"in attempt {first.number}, if it differed",
    )
    packages = environment.get("packages", {})
    listed = [[name, _to_cell(value)] for name, value in packages.items()] if isinstance(packages, dict) else []
    versions = table(("package", "version"), listed, "Versions of packages that the code imports") if listed else ""
    return section("Machine and contract", "machine", table(heads, rows, "What equal bits depend on"), versions)


def make_settings(history: History) -> Markup:
    """Return the settings that the run was last trained with."""
    if history.snapshot is None:
        text = "The settings are lost." if history.attempts else "No attempt has recorded settings yet."
        return section("Settings", "settings", element("p", text, class_="empty"))
    rows = [[_to_breakable(name), _to_cell(value)] for name, value in flatten(history.snapshot.config).items()]
    fingerprint = element("p", "fingerprint ", element("code", history.snapshot.fingerprint))
    return section("Settings", "settings", fingerprint, table(("setting", "value"), rows, "Settings in force"))


def _to_breakable(name: str) -> Markup:
    """Return a dotted name as markup in which a line may break after each dot."""
    first, *parts = name.split(".")
    return join_html(first, *(join_html(".", element("wbr"), part) for part in parts))


def _to_cell(value: object) -> object:
    return "none" if value is None else value if isinstance(value, str) else _to_text(value)

"""The view of a watched run, or of a store's runs, for a terminal of any size, drawn by rich. All functions are pure.

Every text from the store is made safe, because a name may contain terminal escape sequences.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.extensions.watch.health import Health, State, find_speed, judge_health
from holdfast.extensions.watch.seen import Seen
from holdfast.journal import Commit
from holdfast.journal.records import describe_rehearsals
from holdfast.journal.spikes import describe_spikes
from holdfast.terminal import one_line, spell_s

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=*#"
BAR_WIDTH = 24
LONGEST_NAME = 24
# The minimum width of a terminal, in characters, at which a column is shown.
LEAST_WIDTH = {"epoch": 70, "MB": 90, "checkpoint": 90, "why": 80, "host": 90, "": 70, "last sign": 80}
SPARKS = 40
NOT_FINITE = "not finite"
SHOWN_COMMITS, SHOWN_ATTEMPTS, SHOWN_NOTES = 8, 5, 4
# The lines of the view that aren't commits. A terminal of 24 lines shows all of them.
OTHER_LINES = 18
STYLES: dict[State, str] = {
    "complete": "green", "training": "green", "starting": "cyan", "waiting": "yellow", "stalled": "bold red",
    "ended": "red", "unreadable": "red",
}  # fmt: skip


@dataclass(frozen=True)
class Poll:
    """The state of the polls of the store.

    Attributes:
        now: the time on this process's monotonic clock.
        trouble: why the last poll failed; empty if it succeeded.
        silent_s: seconds since the last poll that succeeded, if that is unusually long ago; else 0.
        notes: warnings of the engine.
    """

    now: float
    trouble: str = ""
    silent_s: float = 0.0
    notes: tuple[str, ...] = ()


def draw_run(seen: Seen, poll: Poll, size: ConsoleDimensions, *, is_plain: bool = False) -> RenderableType:
    """Return the view of one run.

    Args:
        size: the terminal's size. On a smaller terminal the view shows fewer commits, and fewer values of each commit.
        is_plain: whether the terminal's encoding lacks block characters for bars.
    """
    age_s = max(0.0, poll.now - seen.sign_at)
    health = judge_health(seen, age_s)
    head = seen.head
    rows: list[RenderableType] = [
        _line(("run ", "dim"), (seen.run, "bold"), ("   ", ""), (seen.recipe, "")),
        _line((health.text, STYLES[health.state])),
        *([_text(health.detail)] if health.detail else []),
        _draw_progress(seen),
        _draw_facts(_list_facts(seen, health, age_s, is_plain)),
    ]
    shown = max(1, min(SHOWN_COMMITS, size.height - OTHER_LINES - bool(health.detail)))
    commits = [commit for commit in seen.commits if commit.number > seen.newest - shown]
    rows += [Text(), _draw_commits(seen, commits, head, size.width)] if commits else []
    rows += [Text(), _draw_attempts(seen, size.width)] if seen.attempts else []
    return Group(*rows, *_draw_notes(seen, poll), Text("q leaves", style="dim"))


def draw_store(
    url: str, runs: Sequence[Seen], poll: Poll, size: ConsoleDimensions, *, is_plain: bool = False
) -> RenderableType:
    """Return the view of a store's runs, a line each. If the terminal has few lines, stalled runs come first."""
    rows = []
    judged = [(seen, judge_health(seen, max(0.0, poll.now - seen.sign_at))) for seen in runs]
    shown = max(1, size.height - 6)
    order: list[State] = ["stalled", "training", "starting", "waiting", "unreadable", "ended", "complete"]
    chosen = judged if len(judged) <= shown else sorted(judged, key=lambda row: order.index(row[1].state))[:shown]
    for seen, health in chosen:
        head = seen.head
        speed = find_speed(seen, head) if head else 0.0
        text = health.text if health.state == "unreadable" else health.state
        sign = f"{spell_s(poll.now - seen.sign_at)} ago" if seen.sign_at and not seen.problem else ""
        rows.append({
            "run": _text(_shorten(seen.run)), "state": _text(text, STYLES[health.state]),
            "step": _text(_format_steps(seen)),
            "loss": _text(_format_loss(head)), "": _text(make_sparks(find_losses(seen), 16, is_plain=is_plain)),
            "steps/s": _text(f"{speed:.3g}" if speed else ""), "last sign": _text(sign),
        })  # fmt: skip
    hidden = len(judged) - len(chosen)
    parts = [_line(("store ", "dim"), (url, "bold")), _make_table(rows, size.width) if rows else _text("no runs yet")]
    parts += [_text(f"and {hidden} more runs")] if hidden else []
    return Group(*parts, *_draw_trouble(poll), Text("q leaves", style="dim"))


def _list_facts(seen: Seen, health: Health, age_s: float, is_plain: bool) -> Iterator[tuple[str, str]]:
    head = seen.head
    losses = find_losses(seen)
    if losses or (head and "avg_loss" in head.metrics):
        sparks, newest = make_sparks(losses, SPARKS, is_plain=is_plain), head.shown_loss if head else None
        yield "loss", f"{sparks} {NOT_FINITE if newest is None else f'{newest:.6g}'}".lstrip()
    values = seen.metadata.probe.values if seen.metadata else {}
    measured = dict(head.metrics) if head else {}
    for name, value in [*measured.items(), *((f"probe {name}", value) for name, value in values.items())]:
        if name != "avg_loss" and value is not None:
            yield name, f"{value:.6g}"
    speed = find_speed(seen, head) if head else 0.0
    if head is not None and speed:
        left = seen.total_steps - head.step if seen.total_steps else 0
        yield "speed", f"{speed:.3g} steps/s" + (f", {spell_s(left / speed)} left at this speed" if left > 0 else "")
    if head is not None and head.slow_rank:
        yield "slow rank", str(head.slow_rank)
    spiking = [each for each in seen.commits if each.spikes and each.number not in seen.quarantined]
    if spiking:
        yield "spike", [*describe_spikes(spiking[-1].spikes).values()][-1]
    if health.state in ("training", "stalled"):
        stop = f"-{seen.next_stop}" if seen.next_stop else ""
        when = f"began {spell_s(age_s)} ago, and its commit is expected after {spell_s(health.expected_s)}"
        yield "chunk", f"{seen.newest + 1}: steps {head.step if head else 0}{stop or ' on'}, {when}"
    if head is not None:
        yield "resume", describe_rehearsals(head, seen.url)
    yield from (("verdict", each) for each in seen.unanswered)
    if seen.ledger is not None:
        yield (
            "goodput",
            f"{seen.ledger.goodput:.1%} so far, {seen.ledger.efficiency:.1%} of what is possible with these restarts",
        )
    if seen.quarantined:
        yield "quarantined", ", ".join(map(str, seen.quarantined[-6:]))


def find_losses(seen: Seen) -> list[float]:
    """Return the finite mean losses of the valid commits that were read, oldest first."""
    losses = [commit.shown_loss for commit in seen.commits if commit.number not in seen.quarantined]
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def make_sparks(values: Sequence[float], width: int, *, is_plain: bool = False) -> str:
    """Return the last ``width`` values as a curve in one line of text, with a character for each value."""
    values, bars = values[-width:], PLAIN_BARS if is_plain else BARS
    lowest, highest = min(values, default=0.0), max(values, default=0.0)
    span = highest - lowest
    if not math.isfinite(span) or not span:
        return bars[0] * len(values)
    return "".join(bars[min(len(bars) - 1, int((value - lowest) / span * len(bars)))] for value in values)


# ---- parts


def _draw_progress(seen: Seen) -> RenderableType:
    steps = f"step {_format_steps(seen)}"
    epoch = f"epoch {seen.head.epoch}" + (f" of {seen.epochs}" if seen.epochs else "") if seen.head else ""
    row = Table.grid(padding=(0, 2))
    if seen.total_steps:
        done = seen.head.step if seen.head else 0
        row.add_row(ProgressBar(total=seen.total_steps, completed=done, width=BAR_WIDTH), _text(steps), _text(epoch))
    else:
        row.add_row(_text(steps), _text(epoch))
    return row


def _draw_facts(facts: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for name, value in facts:
        table.add_row(_text(_shorten(name), "dim"), _text(value))
    return table


def _draw_commits(seen: Seen, commits: Sequence[Commit], head: Commit | None, width: int) -> RenderableType:
    rows = []
    for commit in reversed(commits):
        parent, speed = seen.find_parent(commit), find_speed(seen, commit)
        is_out = commit.number in seen.quarantined
        style = "red" if is_out else "bold" if commit is head else ""
        start = parent.step if parent else "?" if commit.parent else commit.first_start
        cells = {
            "commit": str(commit.number), "steps": f"{start}-{commit.step}", "epoch": str(commit.epoch),
            "loss": _format_loss(commit), "steps/s": f"{speed:.3g}" if speed else "",
            "MB": f"{commit.size_bytes / 1e6:.1f}", "attempt": f"{commit.attempt} {commit.why}".removesuffix(" chunk"),
            "checkpoint": "quarantined" if is_out else commit.checkpoint_sha256[:12],
        }  # fmt: skip
        rows.append({name: _text(cell, style) for name, cell in cells.items()})
    return _make_table(rows, width)


def _draw_attempts(seen: Seen, width: int) -> RenderableType:
    rows = []
    for number, record in reversed(seen.attempts[-SHOWN_ATTEMPTS:]):
        ending = seen.find_ending(number)
        rows.append({
            "attempt": _text(str(number)),
            "began": _text(record.created_at[:19].replace("T", " ") if record else "its record is lost"),
            "why": _text(record.why if record else ""), "host": _text(_shorten(record.host) if record else ""),
            "ended": _text(f"step {ending.step}: {ending.ending}" if ending else "not on record"),
        })  # fmt: skip
    return _make_table(rows, width)


def _draw_notes(seen: Seen, poll: Poll) -> Iterator[RenderableType]:
    for note in (*seen.missing, *poll.notes)[-SHOWN_NOTES:]:
        yield _text(f"note: {note}", "yellow")
    yield from _draw_trouble(poll)


def _draw_trouble(poll: Poll) -> Iterator[RenderableType]:
    if poll.trouble or poll.silent_s:
        since = f" for {spell_s(poll.silent_s)}" if poll.silent_s else ""
        reason = f": {poll.trouble}" if poll.trouble else ""
        yield _text(f"no answer from the store{since}, trying again; this view is out of date{reason}", "bold red")


def _make_table(rows: Sequence[Mapping[str, Text]], width: int) -> Table:
    """Return a table of the columns for which a terminal has room. The last column gets the remaining width."""
    names = [name for name in rows[0] if width >= LEAST_WIDTH.get(name, 0)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if name == names[-1] else None)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _format_steps(seen: Seen) -> str:
    step = seen.head.step if seen.head else 0
    return f"{step} of {seen.total_steps}" if seen.total_steps else str(step)


def _format_loss(commit: Commit | None) -> str:
    loss = commit.shown_loss if commit else None
    if loss is None:
        return NOT_FINITE if commit and "avg_loss" in commit.metrics else ""
    return f"{loss:.4f}"


def _text(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _line(*parts: tuple[str, str]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for text, style in parts:
        line.append(one_line(text), style=style)
    return line

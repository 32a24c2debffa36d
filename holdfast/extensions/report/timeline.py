"""The timeline of a run's attempts: a lane for each host, a bar for each attempt, and the gaps between them."""

from datetime import UTC, datetime

from holdfast.extensions.report.lives import ReportedLife
from holdfast.extensions.report.markup import Markup, element, join_html
from holdfast.extensions.report.numbers import show_seconds

MOST_LANES = 12
MOST_BARS = 1000
OTHERS = "other hosts"
MEANINGS = {
    "good": "completed",
    "warn": "preempted or vanished",
    "bad": "failed or crashed",
    "calm": "cancelled or paused",
    "live": "running",
    "unknown": "no ending known",
}


def make_timeline(lives: list[ReportedLife]) -> Markup:
    """Return the timeline as HTML with one SVG for each host. The run must have an attempt."""
    shown = lives[-MOST_BARS:]
    start, end = shown[0].began, max(each.ended for each in shown)
    span = max(1.0, end - start)
    hosts = list(dict.fromkeys(each.record.host for each in shown))
    named = hosts if len(hosts) <= MOST_LANES else hosts[: MOST_LANES - 1]
    lanes = []
    for host in [*named, *([OTHERS] if len(named) < len(hosts) else [])]:
        bars = [each for each in shown if (each.record.host if each.record.host in named else OTHERS) == host]
        lanes.append(_make_lane(host, bars, start, span))
    ticks = element("div", *(element("span", each) for each in _make_ticks(start, end)), class_="ticks")
    looks = dict.fromkeys(each.look for each in shown)
    legend = element("ul", *(element("li", MEANINGS[look], class_=f"key {look}") for look in looks), class_="legend")
    return element("div", *lanes, ticks, legend, class_="timeline")


def _make_lane(host: str, lives: list[ReportedLife], start: float, span: float) -> Markup:
    bars = [_make_bar(each, start, span) for each in lives]
    label = f"{len(lives)} attempts on {host}" if len(lives) > 1 else f"attempt {lives[0].record.number} on {host}"
    return element("div", element("div", host, class_="host"), element("svg", *bars, role="img", aria_label=label))


def _make_bar(life: ReportedLife, start: float, span: float) -> Markup:
    left, width = 100 * (life.began - start) / span, 100 * (life.ended - life.began) / span
    title = element("title", f"attempt {life.record.number}: {life.reason}, {show_seconds(life.ended - life.began)}")
    drawn = max(0.3, min(width, 100 - left))  # at least 0.3 % wide, so that a short attempt is visible
    left = min(left, 100 - drawn)
    bar = element(
        "rect", title, x=f"{left:.2f}%", y=0, width=f"{drawn:.2f}%", height=26, rx=2, class_=f"bar {life.look}"
    )
    if width < 2.5:
        return bar
    middle = f"{left + drawn / 2:.2f}%"
    return join_html(bar, element("text", life.record.number, x=middle, y=17, text_anchor="middle", class_=life.look))


def _make_ticks(start: float, end: float) -> list[str]:
    times = [datetime.fromtimestamp(start + (end - start) * share, UTC) for share in (0, 0.5, 1)]
    is_long = end - start > 86400
    first = times[0].strftime("%Y-%m-%d %H:%M UTC")
    return [first, *(each.strftime("%m-%d %H:%M" if is_long else "%H:%M:%S") for each in times[1:])]

"""A picture of a run for places that show no HTML: its loss by step, and the steps at which attempts ended early."""

from collections.abc import Iterator, Sequence

from holdfast.extensions.report.index import read_loss_curve
from holdfast.extensions.report.lives import find_look
from holdfast.extensions.report.markup import Markup, element
from holdfast.extensions.report.numbers import show_number
from holdfast.extensions.report.timeline import MEANINGS
from holdfast.journal import EndingRecord, Journal

WIDTH, HEIGHT = 640, 200
LEFT, RIGHT, TOP, BOTTOM = 64, 620, 40, 168
# The maximum number of endings in the picture. If there are more, the picture shows none of them, because they would
# hide the curve.
MOST_ENDINGS = 40
# The colours of page.css in its light theme, because the picture has a white background on a page of any colour.
COLORS = {"good": "#1a7f4b", "warn": "#95620a", "bad": "#c0312b", "calm": "#5b6472", "unknown": "#6b7280"}
LINE, TEXT = "#1f5fbf", "#59616f"

Point = tuple[float, float]


def draw_loss(journal: Journal) -> str:
    """Return an SVG of a run's loss; an empty text if fewer than two commits have a finite loss.

    At most 65 commits and 40 endings are read, however long the run is.
    """
    known = [(step, loss) for step, loss in read_loss_curve(journal) if loss is not None]
    if len(known) < 2 or known[0][0] == known[-1][0]:
        return ""
    steps, losses = [step for step, _ in known], [loss for _, loss in known]
    low, high = min(losses), max(losses)
    across, up = (RIGHT - LEFT) / (steps[-1] - steps[0]), (BOTTOM - TOP) / ((high - low) or 1.0)
    points = [(LEFT + (step - steps[0]) * across, BOTTOM - (loss - low) * up) for step, loss in known]
    ends = [
        (LEFT + (ending.step - steps[0]) * across, find_look(ending.reason))
        for ending in _read_endings(journal)
        if steps[0] <= ending.step <= steps[-1]
    ]
    parts = [*_draw_ends(ends), _draw_curve(points)]
    parts += [
        _write(show_number(high), LEFT - 8, TOP + 4, "end"),
        _write(show_number(low), LEFT - 8, BOTTOM + 4, "end"),
    ]
    parts += [_write(f"step {steps[0]:,}", LEFT, BOTTOM + 22), _write(f"{steps[-1]:,}", RIGHT, BOTTOM + 22, "end")]
    ground = element("rect", width=WIDTH, height=HEIGHT, rx=6, fill="#fff")
    group = element("g", *parts, font_family="sans-serif", font_size=12, fill=TEXT)
    size = {"width": WIDTH, "height": HEIGHT, "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    return element("svg", ground, group, xmlns="http://www.w3.org/2000/svg", **size)


def _read_endings(journal: Journal) -> Iterator[EndingRecord]:
    """Yield the readable endings of attempts that didn't complete the run; none if there are over `MOST_ENDINGS`."""
    numbers = journal.numbers("endings")
    for number in numbers if len(numbers) <= MOST_ENDINGS else ():
        ending = journal.read_ending(number)
        if ending is not None and ending.reason != "completed":
            yield ending


def _draw_curve(points: Sequence[Point]) -> Markup:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=text, fill="none", stroke=LINE, stroke_width=2, stroke_linejoin="round")


def _draw_ends(ends: Sequence[tuple[float, str]]) -> Iterator[Markup]:
    """Yield a dotted line for each ending, and a legend of the colours."""
    for x, look in ends:
        yield element("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=TOP, y2=BOTTOM, **_dotted(look))
    left = LEFT
    yield _write("loss", left, 22)
    for look in dict.fromkeys(look for _, look in ends):
        left += 40 if left == LEFT else 140
        yield element("line", x1=left, x2=left + 18, y1=18, y2=18, **_dotted(look))
        yield _write(MEANINGS[look], left + 24, 22)


def _dotted(look: str) -> dict[str, object]:
    return {"stroke": COLORS[look], "stroke_width": 2, "stroke_dasharray": "2 4"}


def _write(text: str, x: int, y: int, anchor: str = "start") -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor)

"""Pictures of a run that was killed, as SVG: its curve beside that of a run that was never killed.

A picture is readable on a light page and on a dark one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 44, 26  # the margins of the curves
GREY, PALE, BLUE, ORANGE, RED = "#7b8591", "#9aa4b0", "#2f81f7", "#db6d1c", "#e5484d"
POINTS = 48  # a longer curve is smoothed: each point is the mean of a window, of which about so many make the curve
SHORTEST_WINDOW = 5

Point = tuple[int, float, int]


@dataclass(frozen=True)
class Curve:
    """The values of two runs: each point is a step, the value, and the number of the attempt.

    Args:
        kill: the step in which the killed run was killed.
        steps: the last step.
    """

    name: str
    straight: Sequence[Point]
    killed: Sequence[Point]
    kill: int
    steps: int


def draw(curve: Curve) -> str:
    """Return the picture."""
    window = max(SHORTEST_WINDOW, round(len(curve.straight) / POINTS))
    straight, killed = smooth(curve.straight, window), smooth(curve.killed, window)
    ticks = choose_ticks([value for _, value, _ in straight])
    low, high = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / curve.steps, 1)

    def y(value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low), 1)

    def line(points: Iterable[Point], colour: str, width: int) -> str:
        places = " ".join(f"{x(step):g},{y(value):g}" for step, value, _ in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    first = killed[0][2]
    resumed = next(number for number, point in enumerate(killed) if point[2] > first)
    name = f"{curve.name}, mean of {window}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">',
        f"<title>{name} by step; killed in step {curve.kill}</title>",
        *(f'<path d="M{LEFT} {y(tick):g}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity=".3"/>' for tick in ticks),
        *(f'<text x="{LEFT - 6}" y="{y(tick) + 4:g}" text-anchor="end">{tick:g}</text>' for tick in ticks),
        f'<text x="{LEFT}" y="{HEIGHT - 8}" text-anchor="middle">0</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">step {curve.steps}</text>',
        f'<text x="{LEFT}" y="14">{name}</text>',
        f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end"><tspan fill="{PALE}">&#9644;</tspan> never killed '
        f'<tspan fill="{BLUE}">&#9644;</tspan> killed <tspan fill="{ORANGE}">&#9644;</tspan> continued</text>',
        line(straight, PALE, 6).replace("/>", ' stroke-opacity=".5"/>'),
        line(killed[: resumed + 1], BLUE, 2),
        line(killed[resumed:], ORANGE, 2),
        f'<path d="M{x(curve.kill):g} {TOP - 6}V{HEIGHT - BOTTOM}" stroke="{RED}" stroke-width="2" '
        f'stroke-dasharray="4 3"/>',
        f'<text x="{x(curve.kill):g}" y="{TOP - 12}" text-anchor="middle" fill="{RED}">'
        f"SIGKILL in step {curve.kill}</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of each point and those before it, of a window's width; at the beginning of fewer points."""
    means = []
    for number, (step, _, attempt) in enumerate(points):
        values = [value for _, value, _ in points[max(0, number + 1 - window) : number + 1]]
        means.append((step, sum(values) / len(values), attempt))
    return means[:: window // 2]


def choose_ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers, the first below all values and the last above."""
    low, high = min(values), max(values)
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    first = math.floor(low / step)
    return [round(number * step, 10) for number in range(first, math.ceil(high / step) + 1)]

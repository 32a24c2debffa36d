"""The curves of a report's page: metrics of the commits that count, and of commits that were rolled back."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.extensions.report.gathering import History
from holdfast.extensions.report.numbers import round_all
from holdfast.extensions.report.sketch import Curve

# The approximate number of points on a page, 16 bytes each. Each curve has at least FEWEST of these points, and at most
# MOST.
PAGE_POINTS = 120_000
FEWEST, MOST = 200, 4000
MOST_CURVES = 300
# The most infinite or NaN values, and the most series of rolled-back commits, that a curve shows.
MOST_ODD, MOST_PIECES = 100, 40
# Curves that a reader looks at first, in this order.
FIRST = ("train/loss", "train/lr", "train/grad_norm", "run/steps_per_s")
# The names of two curves that are computed from the commits' records. All other curves come from the trails (the
# records of each step).
SPEED, SAVE = "run/steps_per_s", "run/save_s"


def make_curves(histories: Sequence[History]) -> dict[str, Any]:
    """Return the curves of several runs for the page's script.

    ``curves`` has, for each curve's name, the curve of each run that has such values. ``left_out`` is the number of
    curves that the page doesn't show. Each curve keeps the minimum and the maximum of each bucket of steps, so
    that no peak is lost.
    """
    every = [_add_speed(history) for history in histories]
    names = sorted({name for curves in every for name in curves}, key=_rank)
    share = PAGE_POINTS // max(1, sum(len(curves) for curves in every))
    most = min(MOST, max(FEWEST, share))
    shown: dict[str, list[dict[str, Any]]] = {}
    for name in names[:MOST_CURVES]:
        drawn = [
            {"run": number, **_draw(history, name, curves[name], most)}
            for number, (history, curves) in enumerate(zip(histories, every, strict=True))
            if name in curves
        ]
        shown[name] = drawn
    return {"curves": shown, "left_out": len(names) - len(shown)}


def _rank(name: str) -> tuple[int, str]:
    place = (number for number, first in enumerate(FIRST) if name == first or name.startswith(f"{first}/"))
    return next(place, len(FIRST)), name


def _add_speed(history: History) -> dict[str, Curve]:
    """Return a run's curves by name: the curves of its trails, and speed and save time from its commits' records."""
    curves = {name: history.sketch.read(name) for name in history.sketch.names}
    speeds: list[tuple[int, int, float]] = []
    saves: list[tuple[int, int, float]] = []
    for number, commit in sorted(history.commits.items()):
        parent = history.commits.get(commit.parent)
        steps = commit.step - (parent.step if parent else 0)
        if commit.train_s and steps > 0 and (parent or not commit.parent):
            speeds.append((number, commit.step, steps / commit.train_s))
        if commit.save_s:
            saves.append((number, commit.step, commit.save_s))
    known = ((SPEED, speeds), (SAVE, saves))
    return curves | {name: Curve.from_points(points) for name, points in known if points}


def _draw(history: History, name: str, curve: Curve, most: int) -> dict[str, Any]:
    line = curve.of(history.line)
    count, odd_count = (len(line), 0) if name in (SPEED, SAVE) else history.sketch.count(name, history.line)
    fitted = line.fit(most)
    odd = [(step, value) for step, value in zip(line.steps, line.values, strict=True) if not math.isfinite(value)]
    drawn: dict[str, Any] = {"x": fitted.steps.tolist(), "y": round_all(fitted.values)}
    if len(fitted) < count:
        drawn["of"] = count
    if odd:
        drawn["odd"] = [[int(step), str(value)] for step, value in odd[:MOST_ODD]]
        drawn["odd_count"] = odd_count
    if pieces := [piece for piece in _find_pieces(history, curve) if len(piece)]:
        shown = [piece.fit(max(20, most // len(pieces[-MOST_PIECES:]))) for piece in pieces[-MOST_PIECES:]]
        drawn["rolled"] = [[piece.steps.tolist(), round_all(piece.values)] for piece in shown]
        drawn["rolled_count"] = len(pieces)
    return drawn


def _find_pieces(history: History, curve: Curve) -> Iterator[Curve]:
    """Yield the points of each series of commits that was rolled back, the oldest series first."""
    chain: list[int] = []
    for number in sorted(history.commits.keys() - history.line):
        if chain and history.commits[number].parent != chain[-1]:
            yield curve.of(chain)
            chain = []
        chain.append(number)
    if chain:
        yield curve.of(chain)

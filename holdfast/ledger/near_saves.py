"""The value of saves into a folder of the node, between two commits, on recorded preemptions.

A trace says when machines were lost, but not whether the next attempt begins on a node that still has the folder: so
the share of such losses is an argument. If the node is gone, its saves are gone with it, and only their cost remains.

Within a chunk the saves are counted from the chunk's first step; a run counts them from its own. On average this
changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.ledger.goodput import Spent
from holdfast.ledger.interval import Measured
from holdfast.ledger.traces import Trace


@dataclass(frozen=True)
class NearSaves:
    """Saves into a folder of the node.

    Attributes:
        every_steps: ``near.every_steps``.
        save_s: seconds from the copy of the state until such a save is whole; at most a save to the store takes.
        survives: the share of losses after which the next attempt finds the folder.
    """

    every_steps: int
    save_s: float
    survives: float = 1.0


@dataclass(frozen=True)
class NearForecast:
    """What a run can expect on a trace, with saves into a folder of the node or without.

    Attributes:
        steps: the length of chunks.
        survives: the share of losses after which the next attempt finds the folder; None without such saves.
        lost_steps: the steps that a loss costs on average.
        goodput: the copying of an adopted save to the store, for which the next attempt waits, is taken off.
    """

    steps: int
    survives: float | None
    lost_steps: float
    goodput: float


@dataclass(frozen=True)
class AtLoss:
    """An attempt when it is lost, in seconds of training.

    Attributes:
        trained_s: the training until the loss.
        committed_s: the training that the newest durable commit has.
        near_s: the training that the newest whole save on the node has.
    """

    trained_s: float
    committed_s: float
    near_s: float

    @property
    def lost_s(self) -> float:
        """Return the training that is lost without a save on the node, in seconds."""
        return self.trained_s - self.committed_s


class Timeline:
    """The times of saves in an attempt that trains chunks. Each save costs training ``cost_s``, wherever it goes.

    Attributes:
        cycle_s: seconds from the start of a chunk to the start of the next.
    """

    def __init__(self, measured: Measured, steps: int, near: NearSaves | None = None) -> None:
        """
        Args:
            steps: the length of chunks.
            near: the saves on the node; None for none.
        """
        self._measured, self._interval_s = measured, steps * measured.step_s
        self._near_s, every_steps = measured.save_s, steps
        if near is not None:
            self._near_s = near.save_s
            # A save is left out while the one before is being written.
            left_out = math.ceil((near.save_s - measured.cost_s) / (near.every_steps * measured.step_s))
            every_steps = near.every_steps * max(left_out, 1)
        self._every_s, self._inner = every_steps * measured.step_s, (steps - 1) // every_steps
        self.cycle_s = self._interval_s + (1 + self._inner) * measured.cost_s

    def live(self, seconds: float) -> AtLoss:
        """Return the training of an attempt that is lost so many seconds after its restart; negative: during it."""
        seconds = max(seconds, 0.0)
        cost_s, cycle_s = self._measured.cost_s, self.cycle_s
        # The save after the n-th chunk begins at n x cycle - cost.
        committed = max(math.floor((seconds - self._measured.save_s + cost_s) / cycle_s), 0)
        whole_s = seconds - self._near_s  # a save that began by then is whole
        chunks = max(math.floor((whole_s + cost_s) / cycle_s), 0)
        blocks = math.floor((whole_s - chunks * cycle_s + cost_s) / (self._every_s + cost_s))
        near_s = chunks * self._interval_s + min(max(blocks, 0), self._inner) * self._every_s
        return AtLoss(self.train(seconds), committed * self._interval_s, near_s)

    def train(self, seconds: float) -> float:
        """Return the seconds of training within a time, of which saves take a part."""
        cycles, rest_s = divmod(seconds, self.cycle_s)
        blocks = min(rest_s // (self._every_s + self._measured.cost_s), self._inner)
        rest_s -= blocks * (self._every_s + self._measured.cost_s)
        left_s = self._interval_s - blocks * self._every_s
        return cycles * self._interval_s + blocks * self._every_s + min(rest_s, left_s, self._every_s)


def forecast_near(trace: Trace, measured: Measured, steps: int, near: NearSaves | None) -> NearForecast:
    """Return the lost steps and the goodput of a run on a trace, with saves on the node or without.

    Args:
        steps: the length of chunks.
        near: None for no saves on the node.
    """
    timeline = Timeline(measured, steps, near)
    lost_s, parts = 0.0, []
    for number, length_s in enumerate(trace.lengths_s):
        restart_s = min(length_s, measured.restart_s)
        life = timeline.live(length_s - restart_s)
        if trace.last_up_is_censored and number == len(trace.up) - 1:
            parts.append(Spent(length_s, life.trained_s, restart_s))
            continue
        kept_s, productive_s = _keep(life, measured, near)
        lost_s += life.trained_s - kept_s
        parts.append(Spent(length_s, productive_s, restart_s))
    lost_steps = lost_s / measured.step_s / max(trace.preemptions, 1)
    return NearForecast(steps, near.survives if near else None, lost_steps, Spent.sum(parts).goodput)


def _keep(life: AtLoss, measured: Measured, near: NearSaves | None) -> tuple[float, float]:
    """Return the training that survives a loss, and the same without the time that its rescue takes, in seconds."""
    gained_s = life.near_s - life.committed_s
    # An attempt adopts a save if copying it to the store takes less time than training its steps again.
    if near is None or gained_s < measured.save_s:
        return life.committed_s, life.committed_s
    kept_s = life.committed_s + near.survives * gained_s
    return kept_s, kept_s - near.survives * measured.save_s


def compare_near(
    trace: Trace, measured: Measured, lengths: Sequence[int], every_steps: int, save_s: float, shares: Sequence[float]
) -> list[NearForecast]:
    """Return forecasts for each length of chunks: without saves on the node, then with them for each share of losses.

    Args:
        lengths: lengths of chunks, in steps.
        every_steps, save_s: see `NearSaves`.
        shares: the shares of losses after which the next attempt finds the folder.
    """
    choices = [None, *(NearSaves(every_steps, save_s, share) for share in shares)]
    return [forecast_near(trace, measured, steps, near) for steps in lengths for near in choices]

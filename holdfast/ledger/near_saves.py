"""The value of additional saves between two commits, into a folder of the node, on recorded preemptions.

A trace says when machines were lost, but not whether the next attempt begins on a node that still has the folder. So
the share of losses after which the folder is found is an argument. If the node is lost, its saves are lost, too, and
only their cost remains.

Within a chunk the saves are counted from the chunk's first step; a run counts them from its own first step. On average
this changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.ledger.goodput import Spent
from holdfast.ledger.interval import Measured
from holdfast.ledger.traces import Trace


@dataclass(frozen=True)
class NearSaves:
    """The parameters of saves into a folder of the node.

    Attributes:
        every_steps: ``near.every_steps``.
        save_s: seconds from the copy of the state until a save into the folder is complete; at most the time of a save
            to the store.
        survives: the share of losses after which the next attempt finds the folder.
    """

    every_steps: int
    save_s: float
    survives: float = 1.0


@dataclass(frozen=True)
class NearForecast:
    """The forecast for a run on a trace, with or without saves into a folder of the node.

    Attributes:
        steps: the length of chunks.
        survives: the share of losses after which the next attempt finds the folder; None without such saves.
        lost_steps: the steps that a loss costs on average.
        goodput: the goodput. The time that a copy of a save from the node to the store takes counts as lost.
    """

    steps: int
    survives: float | None
    lost_steps: float
    goodput: float


@dataclass(frozen=True)
class AtLoss:
    """The training of an attempt at the moment of its loss, in seconds.

    Attributes:
        trained_s: the training until the loss.
        committed_s: the training that the newest durable commit contains.
        near_s: the training that the newest complete save on the node contains.
    """

    trained_s: float
    committed_s: float
    near_s: float

    @property
    def lost_s(self) -> float:
        """Return the seconds of training that are lost if there is no save on the node."""
        return self.trained_s - self.committed_s


class Timeline:
    """The times of saves in an attempt that trains chunks. Each save costs ``cost_s``, on the store or on the node.

    Attributes:
        cycle_s: seconds from the start of a chunk to the start of the next.
    """

    def __init__(self, measured: Measured, steps: int, near: NearSaves | None = None) -> None:
        """
        Args:
            steps: the length of chunks.
            near: the saves on the node; None for no such saves.
        """
        self._measured, self._interval_s = measured, steps * measured.step_s
        self._near_s, every_steps = measured.save_s, steps
        if near is not None:
            self._near_s = near.save_s
            # A save on the node is skipped while the previous one is being written.
            left_out = math.ceil((near.save_s - measured.cost_s) / (near.every_steps * measured.step_s))
            every_steps = near.every_steps * max(left_out, 1)
        self._every_s, self._inner = every_steps * measured.step_s, (steps - 1) // every_steps
        self.cycle_s = self._interval_s + (1 + self._inner) * measured.cost_s

    def live(self, seconds: float) -> AtLoss:
        """Return how long an attempt has trained when it is lost, and how much of this training is saved.

        Args:
            seconds: the time from the end of the restart to the loss; negative if the loss interrupts the restart.
        """
        seconds = max(seconds, 0.0)
        cost_s, cycle_s = self._measured.cost_s, self.cycle_s
        # The save after the n-th chunk begins at n x cycle - cost.
        committed = max(math.floor((seconds - self._measured.save_s + cost_s) / cycle_s), 0)
        whole_s = seconds - self._near_s  # a save that began before this time is complete
        chunks = max(math.floor((whole_s + cost_s) / cycle_s), 0)
        blocks = math.floor((whole_s - chunks * cycle_s + cost_s) / (self._every_s + cost_s))
        near_s = chunks * self._interval_s + min(max(blocks, 0), self._inner) * self._every_s
        return AtLoss(self.train(seconds), committed * self._interval_s, near_s)

    def train(self, seconds: float) -> float:
        """Return how much of this time, in seconds, is training; the rest is taken by saves."""
        cycles, rest_s = divmod(seconds, self.cycle_s)
        blocks = min(rest_s // (self._every_s + self._measured.cost_s), self._inner)
        rest_s -= blocks * (self._every_s + self._measured.cost_s)
        left_s = self._interval_s - blocks * self._every_s
        return cycles * self._interval_s + blocks * self._every_s + min(rest_s, left_s, self._every_s)


def forecast_near(trace: Trace, measured: Measured, steps: int, near: NearSaves | None) -> NearForecast:
    """Return the lost steps and the goodput of a run on a trace, with or without saves on the node.

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
    """Return the seconds of training that survive a loss; and this minus the time to copy a save to the store."""
    gained_s = life.near_s - life.committed_s
    # An attempt adopts a save if copying it to the store takes less time than training its steps again.
    if near is None or gained_s < measured.save_s:
        return life.committed_s, life.committed_s
    kept_s = life.committed_s + near.survives * gained_s
    return kept_s, kept_s - near.survives * measured.save_s


def compare_near(
    trace: Trace, measured: Measured, lengths: Sequence[int], every_steps: int, save_s: float, shares: Sequence[float]
) -> list[NearForecast]:
    """Return forecasts for each length of chunks: without saves on the node, then with saves for each share of losses.

    Args:
        lengths: lengths of chunks, in steps.
        every_steps, save_s: see `NearSaves`.
        shares: the shares of losses after which the next attempt finds the folder.
    """
    choices = [None, *(NearSaves(every_steps, save_s, share) for share in shares)]
    return [forecast_near(trace, measured, steps, near) for steps in lengths for near in choices]

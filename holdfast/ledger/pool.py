"""The losses of a pool of equal runs, if the scheduler preempts the run that loses least, or a random run.

The preemptions come from a trace: at the end of each interval the scheduler ends one of the runs without a notice, and
at the start of the next interval that run begins again. The other runs continue. A scheduler that chooses ends the run
with the least ``lost_gpu_s``, which `holdfast.ledger.kill_cost.KillCost` publishes: the training since its last commit.
"""

import collections
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.ledger.interval import Measured
from holdfast.ledger.near_saves import Timeline
from holdfast.ledger.traces import Trace

# The number of random draws. Each draws the times at which the runs of a pool began, and the runs that are preempted.
DRAWS = 100


@dataclass(frozen=True)
class PoolLoss:
    """The mean loss of a pool over several draws, in rank hours. These are GPU hours if each rank has a GPU.

    Attributes:
        lost_h: the training since the last commit, summed over the preempted runs.
        restart_h: the restarts of the preempted runs.
        most: the share of the preemptions that hit the most preempted run.
    """

    lost_h: float
    restart_h: float
    most: float


@dataclass(frozen=True)
class PoolForecast:
    """The loss of a pool with and without a scheduler that chooses the run to preempt.

    Attributes:
        runs: the number of runs in the pool.
        ranks: the ranks of each run.
        steps: the length of the runs' chunks.
        preemptions: the number of preemptions.
        random: the loss if the scheduler preempts a random run.
        cheapest: the loss if the scheduler preempts the run that loses least.
    """

    runs: int
    ranks: int
    steps: int
    preemptions: int
    random: PoolLoss
    cheapest: PoolLoss


Choose = Callable[[Sequence[float], random.Random], int]


def choose_any(losses_s: Sequence[float], chance: random.Random) -> int:
    """Return the index of a random run."""
    return chance.randrange(len(losses_s))


def choose_cheapest(losses_s: Sequence[float], chance: random.Random) -> int:
    """Return the index of the run that loses least; a random one if several lose equally little."""
    least_s = min(losses_s)
    return chance.choice([index for index, loss_s in enumerate(losses_s) if loss_s == least_s])


def forecast_pool(trace: Trace, measured: Measured, steps: int, runs: int, ranks: int) -> PoolForecast:
    """Return the loss of a pool of runs on a trace, for a random and for the cheapest choice.

    Args:
        steps: the length of chunks.
        runs: the number of runs in the pool.
        ranks: the ranks of each run.
    """

    def replay(choose: Choose) -> PoolLoss:
        chance = random.Random(0)
        drawn = [_replay(trace, measured, steps, runs, choose, chance) for _ in range(DRAWS)]
        lost_h, restart_h, most = (math.fsum(column) / DRAWS for column in zip(*drawn, strict=True))
        return PoolLoss(lost_h * ranks, restart_h * ranks, most)

    return PoolForecast(runs, ranks, steps, trace.preemptions, replay(choose_any), replay(choose_cheapest))


def _replay(
    trace: Trace, measured: Measured, steps: int, runs: int, choose: Choose, chance: random.Random
) -> tuple[float, float, float]:
    """Return one draw's lost hours, its restart hours, and the most preempted run's share of the preemptions."""
    timeline = Timeline(measured, steps)
    # When the trace begins, each run is training, at a random place in a chunk.
    before_s = measured.restart_s + measured.save_s + timeline.cycle_s
    began = [trace.up[0][0] - before_s - chance.random() * timeline.cycle_s for _ in range(runs)]
    hits: collections.Counter[int] = collections.Counter()
    lost_s = restart_s = 0.0
    for number, (_, ends) in enumerate(trace.up[: trace.preemptions]):
        losses_s = [timeline.live(ends - each - measured.restart_s).lost_s for each in began]
        taken = choose(losses_s, chance)
        hits[taken] += 1
        lost_s += losses_s[taken]
        # A preemption causes the restart after it, but the restart before it is counted here. In the sum over all
        # preemptions this changes only one restart: the first, before the trace, replaces the last, after the trace.
        restart_s += min(ends - began[taken], measured.restart_s)
        if number + 1 < len(trace.up):
            began[taken] = trace.up[number + 1][0]
    return lost_s / 3600, restart_s / 3600, max(hits.values()) / hits.total()

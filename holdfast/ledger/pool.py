"""The loss on a pool of equal runs whose scheduler takes the run that loses least, against one that takes any.

The preemptions are those of a trace: at the end of each interval the pool takes one of its runs, without a notice, and
at the start of the next interval that run begins again. The others train on. A scheduler that chooses takes the run
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

# The runs of a pool began at other times than each other: so many draws of their phases, and of the runs taken.
DRAWS = 100


@dataclass(frozen=True)
class PoolLoss:
    """The mean loss of a pool, of several draws, in hours times the ranks of a run: GPU hours, if each rank has one.

    Attributes:
        lost_h: the training since the last commit of each run that was taken.
        restart_h: the restarts of the runs that were taken.
        most: the share of the preemptions that hit the run which was hit most.
    """

    lost_h: float
    restart_h: float
    most: float


@dataclass(frozen=True)
class PoolForecast:
    """What the choice of the scheduler is worth.

    Attributes:
        runs: the number of runs in the pool.
        ranks: the ranks of each run.
        steps: the length of their chunks.
        preemptions: how many runs were taken.
        random: the loss if the scheduler takes any run.
        cheapest: the loss if it takes the run that loses least.
    """

    runs: int
    ranks: int
    steps: int
    preemptions: int
    random: PoolLoss
    cheapest: PoolLoss


Choose = Callable[[Sequence[float], random.Random], int]


def choose_any(losses_s: Sequence[float], chance: random.Random) -> int:
    """Return the index of any run."""
    return chance.randrange(len(losses_s))


def choose_cheapest(losses_s: Sequence[float], chance: random.Random) -> int:
    """Return the index of a run that loses least; any of them if there are several, such as runs that restart."""
    least_s = min(losses_s)
    return chance.choice([index for index, loss_s in enumerate(losses_s) if loss_s == least_s])


def forecast_pool(trace: Trace, measured: Measured, steps: int, runs: int, ranks: int) -> PoolForecast:
    """Return what a pool of runs loses on a trace, with either choice.

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
    """Return the lost hours, the hours of restarts, and the largest share of one run, of one draw."""
    timeline = Timeline(measured, steps)
    # Each run trains when the trace begins, somewhere in a chunk.
    before_s = measured.restart_s + measured.save_s + timeline.cycle_s
    began = [trace.up[0][0] - before_s - chance.random() * timeline.cycle_s for _ in range(runs)]
    hits: collections.Counter[int] = collections.Counter()
    lost_s = restart_s = 0.0
    for number, (_, ends) in enumerate(trace.up[: trace.preemptions]):
        losses_s = [timeline.live(ends - each - measured.restart_s).lost_s for each in began]
        taken = choose(losses_s, chance)
        hits[taken] += 1
        lost_s += losses_s[taken]
        # The restart of the life that ends here. Each preemption causes the next life's; over all preemptions the sum
        # differs only by a first restart before the trace, which stands for the last one after it.
        restart_s += min(ends - began[taken], measured.restart_s)
        if number + 1 < len(trace.up):
            began[taken] = trace.up[number + 1][0]
    return lost_s / 3600, restart_s / 3600, max(hits.values()) / hits.total()

"""How long ranks wait for each of them, from heartbeats that are given."""

from dataclasses import replace
from types import MappingProxyType

import pytest

from holdfast.extensions.metrics.lag import Lag
from holdfast.extensions.metrics.readings import Readings
from holdfast.extensions.metrics.table import METRICS
from holdfast.machine.heartbeats import Beat, Phase, Place, RankStanding

BEGUN = Beat(1, 0, Phase.STEP, Place.COMPUTING, 0, 5, RankStanding.TRAINING, MappingProxyType({}), 1.0, 0.5, "node-3")


def after(syncing_s: float, steps: int = 1, **changed: object) -> Beat:
    return replace(BEGUN, step=BEGUN.step + steps, syncing_s=BEGUN.syncing_s + syncing_s, **changed)  # type: ignore[arg-type]


def measure(*looks: dict[int, Beat]) -> dict[str, float]:
    readings = Readings({"run": "r"})
    lag = Lag(readings)
    for beats in looks:
        lag.look(beats)
    return {labels["rank"]: round(value, 6) for labels, value in readings.read(METRICS["holdfast.rank.lag"])}


@pytest.mark.parametrize(
    ("syncing_s", "lag"),
    [
        ((1.5, 0.0), (0.0, 1.5)),
        ((0.5, 0.5), (0.0, 0.0)),
        ((3.0, 0.0, 3.0, 3.0), (0.0, 3.0, 0.0, 0.0)),
        ((3.0, 0.0, 0.0, 3.0), (0.0, 2.0, 2.0, 0.0)),  # each of the two waits for nobody, and two others wait for it
        ((2.0,), (0.0,)),
    ],
)
def test_a_rank_lags_for_as_long_as_the_others_wait_for_it(
    syncing_s: tuple[float, ...], lag: tuple[float, ...]
) -> None:
    first = dict.fromkeys(range(len(syncing_s)), BEGUN)
    second = {rank: after(each) for rank, each in enumerate(syncing_s)}
    assert measure(first, second, second) == {str(rank): each for rank, each in enumerate(lag)}


def test_waits_are_compared_only_between_ranks_at_one_step() -> None:
    """A rank that has ended its step has counted its wait, and another one will as soon as it ends the same step."""
    first, mixed = {0: BEGUN, 1: BEGUN}, {0: after(0.5), 1: after(0.0, steps=0)}
    saving = {0: after(0.5), 1: after(0.0, phase=Phase.SAVING)}
    assert measure(first, mixed, saving, {0: after(0.5), 1: after(0.5)}) == {"0": 0.0, "1": 0.0}
    assert measure(first, mixed, {0: after(2.5, 2), 1: after(0.5, 2)}) == {"0": 0.0, "1": 2.0}


def test_new_ranks_begin_anew() -> None:
    new = {0: after(9.0, pid=2), 1: after(0.0, pid=3)}
    later = {0: after(10.0, 2, pid=2), 1: after(0.0, 2, pid=3)}
    assert measure({0: BEGUN, 1: BEGUN}, new) == {"0": 0.0, "1": 0.0}
    assert measure({0: BEGUN, 1: BEGUN}, new, later) == {"0": 0.0, "1": 1.0}


def test_no_ranks_have_no_lag() -> None:
    assert measure({0: BEGUN, 1: BEGUN}, {}, {0: after(1.0), 1: after(0.0)}) == {"0": 0.0, "1": 1.0}

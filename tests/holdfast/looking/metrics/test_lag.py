"""How long ranks wait for each of them, from heartbeats that are given."""

import time

import pytest

from holdfast.looking.metrics import METRICS, Readings
from holdfast.looking.metrics import lag as lag_module
from holdfast.looking.metrics.lag import Lag
from holdfast.machine.heartbeats import Beat, Phase, Place, RankStanding


def beat(step: int, place: Place, phase: Phase = Phase.STEP) -> Beat:
    return Beat(1, step, phase, place, 0, step, RankStanding.TRAINING, {}, 0.0, 0.0, "host")


COMPUTING, SYNCING = Place.COMPUTING, Place.SYNCING


@pytest.mark.parametrize(
    ("beats", "late"),
    [
        ({0: beat(5, SYNCING), 1: beat(5, COMPUTING)}, {1}),
        ({0: beat(5, SYNCING), 1: beat(5, Place.LOADING)}, {1}),
        ({0: beat(6, COMPUTING), 1: beat(5, COMPUTING)}, set()),
        ({0: beat(6, SYNCING), 1: beat(5, COMPUTING)}, {1}),
        ({0: beat(6, COMPUTING), 1: beat(5, SYNCING)}, set()),
        ({0: beat(5, COMPUTING), 1: beat(5, COMPUTING)}, set()),
        ({0: beat(5, SYNCING), 1: beat(5, SYNCING)}, set()),
        ({0: beat(5, SYNCING), 1: beat(5, COMPUTING), 2: beat(5, COMPUTING)}, {1, 2}),
        ({0: beat(5, SYNCING), 1: beat(5, COMPUTING, Phase.SAVING)}, set()),
        ({0: beat(5, COMPUTING)}, set()),
        ({}, set()),
    ],
)
def test_a_rank_lags_while_another_one_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, beats: dict[int, Beat], late: set[int]
) -> None:
    readings, now = Readings({"run": "r"}), time.monotonic()
    monkeypatch.setattr(lag_module.time, "monotonic", lambda: now)
    lag = Lag(readings)
    for _ in range(3):
        now += 0.5
        lag.look(beats)
    found = {labels["rank"]: value for labels, value in readings.read(METRICS["holdfast.rank.lag"])}
    assert found == {str(rank): 1.5 if rank in late else 0.0 for rank in beats}


def test_a_pause_of_the_machine_is_nobodys_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, now = Readings({"run": "r"}), time.monotonic()
    monkeypatch.setattr(lag_module.time, "monotonic", lambda: now)
    lag = Lag(readings)
    now += 3600
    lag.look({0: beat(5, SYNCING), 1: beat(5, COMPUTING)})
    found = {labels["rank"]: value for labels, value in readings.read(METRICS["holdfast.rank.lag"])}
    assert found == {"0": 0.0, "1": lag_module.MOST_S}

"""Tests of the value of saves on the node: against numbers computed by hand, and the forecast without such saves."""

import pytest

from holdfast.ledger.forecast import forecast
from holdfast.ledger.interval import Measured
from holdfast.ledger.near_saves import NearSaves, compare_near, forecast_near
from holdfast.ledger.traces import Trace, list_shipped, read_trace

# A step takes 1 s, a save costs training 2 s and is durable after 4 s, a restart takes 10 s.
KNOWN = Measured(1.0, 2.0, 4.0, 10.0, count=9)
# The attempts are lost 175, 112 and 106 s after their restarts.
UP = [(0.0, 185.0), (185.0, 307.0), (307.0, 423.0)]
TRACE = Trace(name="made", span_s=423.0, up=UP)


# Chunks of 100 steps. Without saves on the node a chunk takes 102 s, and the three attempts have trained 173, 110 and
# 104 steps, of which 100 each are committed. With a save after every 20 steps, whole after 3 s, it takes 110 s: they
# have trained 160, 102 and 98 steps, committed 100, 100 and 0, and have 140, 100 and 80 on the node. Copying an adopted
# save to the store takes 4 s.
@pytest.mark.parametrize(
    ("survives", "lost_steps", "productive_s"),
    [
        (None, (73 + 10 + 4) / 3, 100 + 100 + 100),
        (0.0, (60 + 2 + 98) / 3, 100 + 100 + 0),
        (0.5, (40 + 2 + 58) / 3, 118 + 100 + 38),
        (1.0, (20 + 2 + 18) / 3, 136 + 100 + 76),
    ],
)
def test_saves_on_the_node_are_worth_what_a_hand_computes(
    survives: float | None, lost_steps: float, productive_s: float
) -> None:
    near = None if survives is None else NearSaves(20, 3.0, survives)
    found = forecast_near(TRACE, KNOWN, 100, near)
    assert found.survives == survives
    assert found.lost_steps == pytest.approx(lost_steps)
    assert found.goodput == pytest.approx(productive_s / 423)


def test_a_save_is_left_out_while_the_one_before_is_written() -> None:
    # A save that takes 45 s leaves out two of three, so it is made after 60 steps of a chunk. The second chunk begins
    # after 104 s. After 175 s the ranks have trained 100 + 60 + 9 steps. The save at 164 s isn't whole yet, but the end
    # of the first chunk is committed.
    found = forecast_near(Trace(name="made", span_s=185.0, up=UP[:1]), KNOWN, 100, NearSaves(20, 45.0))
    assert found.lost_steps == pytest.approx(69)
    # At 209 s it is whole, and the second chunk's end, at 206 s, isn't: 1 step of the third chunk follows on 200.
    later = forecast_near(Trace(name="made", span_s=219.0, up=[(0.0, 219.0)]), KNOWN, 100, NearSaves(20, 45.0))
    assert later.lost_steps == pytest.approx(100 + 100 + 1 - 160)


def test_a_recording_that_ends_while_the_job_is_up_ends_without_a_loss() -> None:
    censored = TRACE.model_copy(update={"last_up_is_censored": True})
    found = forecast_near(censored, KNOWN, 100, NearSaves(20, 3.0))
    assert found.lost_steps == pytest.approx((20 + 2) / 2)
    assert found.goodput == pytest.approx((136 + 100 + 98) / 423)


@pytest.mark.parametrize("name", list_shipped())
def test_without_saves_on_the_node_the_forecast_is_the_plans(name: str) -> None:
    trace = read_trace(name)
    for steps in (7, 100, 3000):
        assert forecast_near(trace, KNOWN, steps, None).goodput == pytest.approx(
            forecast(trace, KNOWN, steps).goodput, abs=1e-9
        )


@pytest.mark.parametrize("name", list_shipped())
def test_more_surviving_nodes_never_lose_more(name: str) -> None:
    _, *found = compare_near(read_trace(name), KNOWN, [2000], 50, 1.0, [0.0, 0.3, 1.0])
    assert found[0].lost_steps >= found[1].lost_steps >= found[2].lost_steps
    assert found[0].goodput <= found[1].goodput <= found[2].goodput

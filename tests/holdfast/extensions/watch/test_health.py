"""The verdict on a watched run: it trains, has stalled, waits or has ended; and what it waits for."""

from dataclasses import replace

import pytest

from holdfast.extensions.watch.health import LATE_AFTER_S, judge_health, predict
from holdfast.extensions.watch.seen import Seen
from holdfast.journal import AttemptRecord, EndingRecord, now
from tests.support.makers import make_commit

COMMITS = tuple(make_commit(number, train_s=20.0, stall_s=1.0, save_s=2.0, restart_s=7.0) for number in (1, 2, 3))


def attempt(number: int) -> AttemptRecord:
    return AttemptRecord(number=number, why="fresh", created_at=now(), host="h", pid=9, environment={})


def ending(reason: str, number: int = 1) -> EndingRecord:
    return EndingRecord(number=number, reason=reason, message="m", step=30, created_at=now())


SEEN = Seen("run", commits=COMMITS, newest=3, attempts=((1, attempt(1)),))


def test_a_run_trains_until_its_commit_is_late() -> None:
    assert predict(SEEN) == 23.0  # ten steps in 20 s, the stall of the save, and the save
    assert judge_health(SEEN, 3 * 23.0).state == "training"
    stalled = judge_health(SEEN, 3 * 23.0 + 1)
    assert stalled.state == "stalled"
    assert stalled.text == "stalled: waits for a commit of attempt 1, or for a further attempt"
    assert stalled.detail == (
        "no commit for 70 s, expected after 23 s; the attempt on h (pid 9) died without a "
        "record, hangs, or is slower than before"
    )


def test_a_short_chunk_is_not_late_at_once() -> None:
    commits = tuple(commit.model_copy(update={"train_s": 0.01, "stall_s": 0.0, "save_s": 0.0}) for commit in COMMITS)
    assert judge_health(replace(SEEN, commits=commits), LATE_AFTER_S).state == "training"
    assert judge_health(replace(SEEN, commits=commits), LATE_AFTER_S + 1).state == "stalled"


def test_the_next_chunk_and_a_restart_are_expected_to_take_their_time() -> None:
    assert predict(replace(SEEN, next_stop=35)) == 13.0
    assert predict(replace(SEEN, attempts=((1, attempt(1)), (2, attempt(2))))) == 30.0


def test_without_a_commit_nothing_is_expected() -> None:
    seen = replace(SEEN, commits=(), newest=0)
    assert judge_health(seen, 1e6).state == "starting"
    assert judge_health(replace(seen, attempts=()), 1e6).text == "waits for its first attempt"


@pytest.mark.parametrize(
    ("reason", "state", "text"),
    [
        ("preempted", "waiting", "waits for another attempt: attempt 1 ended: preempted: m"),
        ("out_of_memory", "waiting", "waits for another attempt: attempt 1 ended: out of memory: m"),
        (
            "settings",
            "ended",
            "ended: no further attempt starts by itself, so a person has to act: attempt 1 ended: settings: m",
        ),
        ("unheard_of", "waiting", "waits for another attempt: attempt 1 ended: unheard of: m"),
    ],
)
def test_an_ending_says_what_the_run_waits_for(reason: str, state: str, text: str) -> None:
    health = judge_health(replace(SEEN, endings=(ending(reason),)), 1e6)
    assert (health.state, str(health)) == (state, text)

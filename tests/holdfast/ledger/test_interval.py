"""Tests of the best length of a chunk, from the cost of saves and the rate of losses in the journal."""

import hashlib
import itertools
import json
import math
import secrets
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.journal import AttemptRecord, Commit, EndingRecord, Journal, record_name
from holdfast.journal.endings import REASONS
from holdfast.ledger.history import RECENT_ATTEMPTS, CostHistory, read_costs, read_losses
from holdfast.ledger.interval import (
    FIRST_STEPS,
    FLOOR_S,
    PRIOR_LOSSES,
    PRIOR_S,
    RECENT_COMMITS,
    SAVES,
    Cost,
    Losses,
    Measured,
    choose_interval,
    cost_of,
    count_losses,
    expect,
    measure_costs,
)
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from tests.support.makers import make_commit, make_line, publish, save_next, train

HOUR = 3600.0
DAY = 24 * HOUR
DAY = 24 * HOUR

seconds = st.floats(0.001, 1000.0)
losses = st.builds(Losses, count=st.integers(0, 1000), alive_s=st.floats(0, 1000 * HOUR))


def measured(step_s: float = 0.1, stall_s: float = 1.0, save_s: float = 5.0, restart_s: float = 30.0) -> Measured:
    return Measured(step_s, stall_s, save_s, restart_s, count=9)


def new_store() -> MemoryStore:
    return MemoryStore(secrets.token_hex(8))


def at(hours: float) -> str:
    return datetime.fromtimestamp(DAY + hours * HOUR, UTC).isoformat(timespec="seconds")


def life(
    reason: str | None, hours: float = 1.0, last_h: float | None = None, why: str = "chunk"
) -> tuple[AttemptRecord, EndingRecord | None, Commit | None]:
    """Return the records of an attempt that ended after `hours` hours, with its last commit at `last_h` hours."""
    record = AttemptRecord(number=1, why="", created_at=at(0), host="", pid=1, environment={})
    ending = EndingRecord(number=1, reason=reason, message="", step=0, created_at=at(hours)) if reason else None
    last = make_commit(1, created_at=at(last_h), why=why) if last_h is not None else None
    return record, ending, last


# ---- the interval


@given(stall_s=seconds, save_s=seconds, losses=losses, other=st.floats(0.01, 100.0))
def test_no_other_interval_is_expected_to_lose_less(
    stall_s: float, save_s: float, losses: Losses, other: float
) -> None:
    """Only intervals below the length of a save or the floor may lose less."""
    known = measured(stall_s=stall_s, save_s=save_s)
    chosen = choose_interval(known, losses)
    lost = expect(known, losses, chosen.interval_s).total
    assert chosen.interval_s >= max(SAVES * save_s, FLOOR_S)
    if other * chosen.interval_s >= max(SAVES * save_s, FLOOR_S):
        assert expect(known, losses, other * chosen.interval_s).total >= lost * (1 - 1e-9)


def test_the_best_interval_follows_youngs_formula() -> None:
    chosen = choose_interval(measured(stall_s=2.0, step_s=0.5), Losses(9, 10 * HOUR - PRIOR_S))
    assert chosen.interval_s == math.sqrt(2 * 2.0 * HOUR) == 120.0
    assert (chosen.steps, chosen.bound) == (240, "least lost")
    parts = expect(measured(stall_s=2.0, save_s=18.0, restart_s=36.0), Losses(9, 10 * HOUR - PRIOR_S), 120.0)
    assert parts.stalls == parts.redone == pytest.approx(1 / 60)
    assert (parts.saves, parts.restarts) == (0.005, 0.01)
    assert parts.total == pytest.approx(1 / 30 + 0.015)


def test_a_save_that_slows_the_steps_beside_it_costs_more_than_its_pause() -> None:
    """The interval grows with all that a save costs training, not only with the time in which training stands still."""
    losses = Losses(9, 10 * HOUR - PRIOR_S)
    quick, slow = (
        Cost(0.5, 0.5, 5.0, 0.0),
        cost_of(make_commit(1, train_s=6.5, slow_s=1.5, stall_s=0.5, save_s=5.0), 10),
    )
    assert slow == Cost(0.5, 0.5, 5.0, 0.0, slow_s=1.5)
    known = [measure_costs([each]) for each in (quick, slow)]
    lengths = [choose_interval(each, losses).interval_s for each in known if each]
    assert lengths == [math.sqrt(2 * 0.5 * HOUR), math.sqrt(2 * 2.0 * HOUR)]
    assert known[1] is not None
    assert expect(known[1], losses, 120.0).stalls == pytest.approx(2.0 / 120)


def test_the_binding_bound_is_named() -> None:
    assert choose_interval(measured(stall_s=1e-6, save_s=1.0), Losses()).bound == "floor"
    slow = choose_interval(measured(stall_s=1e-6, save_s=100.0), Losses())
    assert (slow.interval_s, slow.bound) == (150.0, "a save's length")
    assert choose_interval(measured(step_s=1000.0), Losses()).steps == 1


@given(losses=losses)
def test_more_losses_shorten_the_interval_and_quiet_time_lengthens_it(losses: Losses) -> None:
    def best(losses: Losses) -> float:
        return choose_interval(measured(stall_s=1000.0, save_s=0.0), losses).interval_s

    assert best(losses + Losses(1)) < best(losses) < best(losses + Losses(0, HOUR))


# ---- losses


def test_the_prior_counts_at_first_and_fades() -> None:
    assert Losses().mean_s == PRIOR_S / PRIOR_LOSSES
    for true_s in (0.2 * HOUR, 10 * DAY):
        off = [abs(Losses(count, count * true_s).mean_s / true_s - 1) for count in (1, 10, 100, 1000)]
        assert off == sorted(off, reverse=True)
        assert off[-1] < 0.01
    assert Losses(0, 30 * DAY).mean_s > 30 * DAY, "without losses the prior fades"


@pytest.mark.parametrize("reason", REASONS)
def test_only_unannounced_ends_are_losses(reason: str) -> None:
    why = "preempted" if reason == "preempted" else "chunk"
    counted = count_losses([life(reason, last_h=0.5, why=why)])
    assert counted.count == (reason in {"vanished", "crashed", "rank_crashed", "rank_hung"})
    assert count_losses([life(None, last_h=0.5)]).count == 0


@pytest.mark.parametrize(("why", "count"), [("preempted", 0), ("adopted", 0), ("chunk", 1)])
def test_a_preemption_without_a_save_is_a_loss(why: str, count: int) -> None:
    assert count_losses([life("preempted", last_h=0.5, why=why)]).count == count
    assert count_losses([life("preempted")]).count == 0, "an attempt without a commit had nothing to save"


def test_an_attempts_time_counts_as_far_as_records_prove_its_life() -> None:
    assert count_losses([life("completed", 2.0, last_h=1.9)]).alive_s == 2 * HOUR
    assert count_losses([life("rank_crashed", 2.0, last_h=1.0)]).alive_s == 2 * HOUR
    # The next attempt, which began a day later, found this one dead.
    assert count_losses([life("vanished", 24.0, last_h=1.0)]).alive_s == HOUR
    assert count_losses([life("crashed", 24.0)]).alive_s == 0
    assert count_losses([life(None, last_h=1.5)]).alive_s == 1.5 * HOUR, "the attempt lives, or died just now"
    assert count_losses([life("completed", -1.0)]).alive_s == 0, "two machines' clocks differ"
    total = count_losses([life("vanished", 3.0, last_h=2.0), life("preempted", 1.0, last_h=1.0, why="preempted")])
    assert total == Losses(1, 3 * HOUR, 2)


# ---- the cost of saves


def test_one_slow_save_does_not_move_the_medians() -> None:
    usual = Cost(step_s=0.1, stall_s=1.0, save_s=5.0, restart_s=0.0)
    cold = Cost(step_s=9.0, stall_s=60.0, save_s=90.0, restart_s=20.0)
    assert measure_costs([usual] * 6 + [cold] + [usual]) == Measured(0.1, 1.0, 5.0, 20.0, count=8)
    assert measure_costs([cold] * 20 + [usual] * RECENT_COMMITS) == Measured(0.1, 1.0, 5.0, 0.0, count=RECENT_COMMITS)
    assert measure_costs([]) is None


# ---- from the journal


def journal_of(lives: list[dict[str, Any]]) -> Journal:
    """Return a run whose attempts lived for an hour each, made one commit of ten steps, and ended as `lives` says."""
    journal = Journal(new_store(), "run")
    journal.begin("m:f")
    for number, each in enumerate(lives, 1):
        start = 2.0 * number
        lineage = {"continues": {"commit": number - 1}} if number > 1 else {}
        record = AttemptRecord(
            number=number, why="", created_at=at(start), host="", pid=1, environment={}, lineage=lineage
        )
        journal.store.create(record_name("attempts", number), record.to_bytes())
        commit = make_commit(number, attempt=number, created_at=at(start + 0.5), **each.get("commit", {}))
        publish(journal, commit)
        if reason := each.get("reason"):
            ending = EndingRecord(number=number, reason=reason, message="", step=0, created_at=at(start + 1))
            journal.store.create(record_name("endings", number), ending.to_bytes())
    return journal


def test_losses_are_read_from_the_records() -> None:
    journal = journal_of([
        {"reason": "vanished"}, {"reason": "preempted", "commit": {"why": "preempted"}},
        {"reason": "preempted"}, {"reason": "recipe_failed"}, {},
    ])  # fmt: skip
    assert read_losses(journal) == Losses(2, (0.5 + 1 + 1 + 1 + 0.5) * HOUR, 5)
    assert read_losses(journal, before=5) == Losses(2, 3.5 * HOUR, 4)
    assert read_losses(journal, before=2) == Losses(1, 0.5 * HOUR, 1)
    assert read_losses(journal_of([])) == Losses()


def test_an_adopted_commit_shows_no_costs() -> None:
    """Its metadata has the length of its steps, but nobody was left to measure its save."""
    took = {"train_s": 20.0, "stall_s": 1.0, "save_s": 2.0}
    journal = journal_of([{"commit": took}, {"commit": {"train_s": 20.0, "why": "adopted"}}])
    assert read_costs(journal) == [Cost(2.0, 1.0, 2.0, 0.0)]


def test_missing_and_damaged_records_are_skipped() -> None:
    journal = journal_of([{"reason": "vanished"}] * 4)
    journal.store.replace(record_name("attempts", 1), b"?")
    journal.store.delete(record_name("endings", 3))
    journal.store.delete(record_name("commits", 4))
    assert read_losses(journal) == Losses(2, 1 * HOUR, 3)


def test_a_long_history_costs_no_more_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of([{"reason": "vanished", "commit": {"train_s": 10.0}}] * 200)
    journal = Journal(open_store(journal.store_url), "run")  # a new journal has cached no record
    read: list[str] = []
    original = MemoryStore.read

    def note(self: MemoryStore, name: str, *rest: int) -> bytes:
        read.append(name)
        return original(self, name, *rest)

    monkeypatch.setattr(MemoryStore, "read", note)
    assert read_losses(journal).attempts == RECENT_ATTEMPTS
    assert len(read_costs(journal)) == RECENT_COMMITS
    assert len(read) < 4 * (RECENT_ATTEMPTS + RECENT_COMMITS)


def test_costs_are_read_from_the_newest_commits() -> None:
    took = [{"train_s": 20.0, "stall_s": 1.0, "save_s": 2.0}, {}, {"train_s": 10.0, "stall_s": 3.0}]
    journal = journal_of([{"commit": each} for each in took])
    assert read_costs(journal) == [Cost(2.0, 1.0, 2.0, 0.0), Cost(1.0, 3.0, 0.0, 0.0)]
    journal.store.delete(record_name("commits", 2))
    assert read_costs(Journal(open_store(journal.store_url), "run")) == [Cost(2.0, 1.0, 2.0, 0.0)], (
        "no record has the number of steps of commit 3"
    )
    assert read_costs(journal_of([])) == []


def test_a_commit_without_times_is_read() -> None:
    fields = json.loads(make_commit(1, train_s=3.0).to_bytes())
    for name in ("train_s", "stall_s", "save_s", "restart_s", "record_sha256"):
        del fields[name]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    sealed = json.dumps(fields | {"record_sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
    old = Commit.from_bytes(sealed, "")
    assert (old.train_s, old.stall_s, old.save_s, old.restart_s) == (0, 0, 0, 0)


# ---- while an attempt lives


def test_a_run_begins_with_short_chunks_until_costs_are_measured() -> None:
    line = make_line(new_store())
    history = CostHistory(line.journal, 1, clock=itertools.repeat(0.0).__next__)
    assert history.choose_steps() == FIRST_STEPS
    saved = save_next(line).model_copy(update={"save_s": 1.0, "stall_s": 0.5})
    history.note_saved(saved, 10)
    assert history.choose_steps() == FIRST_STEPS, "an adopted checkpoint has no training time"
    history.note_saved(saved.model_copy(update={"train_s": 5.0}), 10)
    assert history.choose_steps() == round(math.sqrt(2 * 0.5 * PRIOR_S) / 0.5)


def test_the_next_attempt_reads_costs_from_the_journal() -> None:
    journal = journal_of([{"reason": "vanished", "commit": {"train_s": 5.0, "stall_s": 0.5}}])
    mean_s = (PRIOR_S + 0.5 * HOUR) / 2
    assert CostHistory(journal, 2).choose_steps() == round(math.sqrt(2 * 0.5 * mean_s) / 0.5)


def test_a_live_attempt_counts_its_own_losses_without_reading_again() -> None:
    journal = journal_of([{"reason": "completed", "commit": {"train_s": 5.0, "stall_s": 0.5}}])
    now = [0.0]
    history = CostHistory(journal, 2, clock=lambda: now[0])
    for name in journal.store.list("commits"):
        journal.store.delete(f"commits/{name}")
    first = history.choose_steps()
    now[0] = DAY
    quiet = history.choose_steps()
    assert quiet > first
    history.note_death()
    assert history.choose_steps() == pytest.approx(quiet / math.sqrt(2), abs=1)


def test_commits_record_their_costs() -> None:
    line = make_line(new_store())
    took = {"train_s": 3.0, "stall_s": 0.2, "save_s": 0.4, "restart_s": 7.0}
    commit = line.commit(save_next(line).model_copy(update=took), "chunk")
    assert commit.model_dump(include=set(took)) == took
    train(line)
    assert read_costs(line.journal)[0] == Cost(0.3, 0.2, 0.4, 7.0)

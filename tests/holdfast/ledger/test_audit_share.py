"""The share of audits: what is chosen for it, what it costs, and what the plan says that it finds."""

import bisect
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest

from holdfast.journal import AuditRecord, Commit, Origin, now
from holdfast.ledger.audit_share import DAY_S, Times, fill_time, order_commits, plan_audits
from tests.support.makers import make_commit

NUMBERS = [5, 4, 3, 2, 1]


def is_any(number: int) -> bool:
    return True


def test_the_newest_comes_first_and_the_seed_orders_the_others() -> None:
    orders = [tuple(order_commits(NUMBERS, seed, is_any)) for seed in range(50)]
    assert {order[0] for order in orders} == {5}
    assert all(sorted(order) == sorted(NUMBERS) for order in orders)
    assert len(set(orders)) > 10
    assert orders == [tuple(order_commits(NUMBERS, seed, is_any)) for seed in range(50)]
    assert {each[1] for each in orders} == {1, 2, 3, 4}, "each of the others may come next"


def test_what_is_not_open_is_left_out_and_asked_for_late() -> None:
    asked: list[int] = []

    def is_odd(number: int) -> bool:
        asked.append(number)
        return number % 2 == 1

    order = order_commits([6, *NUMBERS], 1, is_odd)
    assert next(order) == 5
    assert asked == [6, 5]
    assert sorted(order) == [1, 3]
    assert list(order_commits([2, 4], 1, is_odd)) == []


def test_a_time_is_filled_while_the_longest_audit_would_fit() -> None:
    costs = {5: 4.0, 4: 3.0, 3: 9.0, 2: 1.0, 1: 1.0}
    for left_s, taken in ((8.9, []), (9.0, [5]), (13.0, [5, 4]), (16.0, [5, 4, 3]), (99.0, NUMBERS), (-1.0, [])):
        assert fill_time(NUMBERS, costs.__getitem__, left_s, 9.0) == taken
    assert fill_time([1, 2], {1: 0.1, 2: 0.2}.__getitem__, 0.1 + 0.2, 0.2) == [1, 2]


def audit(commit: int, start: int, sha256: str = "a" * 64) -> AuditRecord:
    return AuditRecord(
        commit=commit, number=1, from_commit=start, checkpoint_sha256=sha256, notes=[], host="b", environment={},
        created_at=now(),
    )  # fmt: skip


def test_an_audit_takes_what_the_run_took_for_its_steps() -> None:
    times = Times.of(make_commit(number, train_s=float(number)) for number in (1, 2, 3, 4))
    assert times.trained_s == 10.0
    assert [times.measure(4, start) for start in (3, 2, 0)] == [4.0, 7.0, 10.0]
    assert times.measure_audits([audit(4, 2), audit(1, 0), audit(3, 2, "")]) == 8.0, "the gate refused the last one"


def test_a_commit_without_a_time_has_the_time_of_the_others_steps() -> None:
    known = [make_commit(1, step=10, train_s=5.0), make_commit(2, step=30), make_commit(3, step=40, train_s=5.0)]
    assert Times.of(known).seconds == {1: 5.0, 2: 10.0, 3: 5.0}
    assert Times.of([make_commit(1)]).trained_s == 0.0
    origin = Origin(form="torch", source="a.pt", sha256="b" * 64, step=10)
    assert Times.of([make_commit(1, origin=origin), known[2]]).seconds[1] == 0.0


def test_a_circle_of_parents_ends() -> None:
    times = Times.of([make_commit(1, train_s=1.0), make_commit(2, parent=3, train_s=1.0), make_commit(3, train_s=1.0)])
    assert times.measure(3, 1) == 2.0


def test_an_audit_across_a_resume_trains_two_chunks() -> None:
    commits = [make_commit(number, attempt=1 + (number > 2), train_s=10.0) for number in (1, 2, 3, 4)]
    times = Times.of(commits)
    assert [times.measure_usual(each) for each in commits] == [10.0, 10.0, 20.0, 10.0]


# ---- the plan, against a simulation of the nights


class Nights:
    """A run that trains for some days, and an audit of a share of it every night.

    Attributes:
        found: for each commit that was audited, in which night.
    """

    def __init__(self, commits: Sequence[Commit], share: float, kept: int | None = None) -> None:
        self.times = Times.of(commits)
        self.share, self.kept = share, kept
        self.found: dict[int, int] = {}
        self.costs = {each.number: self.times.measure_usual(each) for each in commits}
        self.spent_s, self.longest_s = 0.0, self.times.measure_longest(commits)
        self.ends = list(accumulate(each.train_s + each.stall_s for each in commits))
        self.trained = [0.0, *accumulate(each.train_s for each in commits)]
        for night in range(1, int(self.ends[-1] // DAY_S) + 1):
            self.audit(night)

    def audit(self, night: int) -> None:
        made = bisect.bisect_right(self.ends, night * DAY_S)
        left = range(made, max(made - self.kept, 0) if self.kept else 0, -1)
        ordered = order_commits(left, night, lambda number: number not in self.found)
        share_s = self.share * self.trained[made]
        taken = fill_time(ordered, self.costs.__getitem__, share_s - self.spent_s, self.longest_s)
        self.found |= dict.fromkeys(taken, night)
        self.spent_s += sum(map(self.costs.__getitem__, taken))
        assert self.spent_s <= share_s * (1 + 1e-6), "never more than the share"

    def await_machine(self, first: int) -> tuple[int, float]:
        """Return the nights, and the seconds, until a commit from the first wrong one on was audited.

        Args:
            first: the number of the first wrong commit.
        """
        found = next(night for number, night in self.found.items() if number >= first)
        began = self.ends[first - 1] - self.times.seconds[first]
        return found - int(self.ends[first - 1] // DAY_S), found * DAY_S - began


def make_chunks(mean_s: float, days: int, resumes_every: int = 0) -> list[Commit]:
    """Return the commits of a run whose chunks have different lengths, and which is resumed now and then."""
    lengths = random.Random(1)
    number = int(days * DAY_S / mean_s)
    return [
        make_commit(
            each, train_s=mean_s * lengths.uniform(0.5, 1.5), stall_s=mean_s / 100,
            attempt=1 + (each // resumes_every if resumes_every else 0),
        )
        for each in range(1, number + 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mean_s", "days", "share", "resumes_every", "kept"),
    [
        (600.0, 60, 0.05, 0, None),  # seven audits a night
        (600.0, 60, 0.05, 4, None),  # a quarter of them trains two chunks
        (600.0, 60, 0.05, 0, 3),  # retention keeps three
        (20_000.0, 900, 0.02, 0, None),  # one in twelve nights
        (20_000.0, 900, 0.1, 3, None),  # one in three
    ],
)
def test_the_plan_agrees_with_the_nights(
    mean_s: float, days: int, share: float, resumes_every: int, kept: int | None
) -> None:
    commits = make_chunks(mean_s, days, resumes_every)
    nights = Nights(commits, share, kept)
    planned = plan_audits(nights.times, share, most_a_night=kept)
    assert planned
    assert planned.within_s
    assert len(nights.found) / days == pytest.approx(planned.audits_a_day, rel=0.05)
    draw, tries = random.Random(2), 2000
    once = sum(draw.randint(1, len(commits)) in nights.found for _ in range(tries)) / tries
    assert once == pytest.approx(planned.once, abs=3 * (planned.once / tries) ** 0.5 + 0.05 * planned.once)
    # Such a machine is always found. In its first weeks a run hasn't earned an audit yet.
    waits = [nights.await_machine(draw.randint(len(commits) // 10, len(commits) * 9 // 10)) for _ in range(tries)]
    assert max(seconds for _, seconds in waits) <= planned.within_s + mean_s
    first = sum(night <= 1 for night, _ in waits) / tries
    assert first == pytest.approx(planned.first_night, abs=0.04)


def test_a_plan_has_the_costs_of_the_runs_own_chunks() -> None:
    commits = [make_commit(each, train_s=train_s, stall_s=1.0) for each, train_s in ((1, 9.0), (2, 29.0))]
    planned = plan_audits(Times.of(commits), 0.1, restart_s=5.0, ranks=4)
    assert planned
    assert (planned.chunk_s, planned.audit_s) == (19.0, 19.0)
    day_s = DAY_S * 38 / 40
    assert planned.training_s == pytest.approx(0.1 * day_s)
    assert planned.audits_a_day == pytest.approx(0.1 * day_s / 19)
    assert planned.starting_s == pytest.approx(5 * planned.audits_a_day)
    assert planned.gpu_s == pytest.approx(4 * (planned.training_s + planned.starting_s))
    assert planned.once == pytest.approx(0.1)
    assert (planned.first_night, planned.within_s) == (1.0, DAY_S + 19.0)


def test_there_is_no_plan_without_times_and_none_of_nothing() -> None:
    assert plan_audits(Times.of([make_commit(1)]), 0.1) is None
    planned = plan_audits(Times.of([make_commit(1, train_s=9.0)]), 0.1, most_a_night=0)
    assert planned
    assert (planned.once, planned.within_s) == (0.0, None)


def test_lengths_that_differ_keep_their_share() -> None:
    """The rest of a night counts in the next one: the share is reached, though no night's audits fit exactly."""
    nights = Nights(make_chunks(5000.0, 200), 0.1)
    assert nights.spent_s / nights.times.trained_s == pytest.approx(0.1, rel=0.02)
    assert all(one <= other for one, other in pairwise(nights.found.values()))

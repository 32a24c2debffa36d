"""Tests of the goodput ledger: random lives, whose every second is known, and a real run that was killed."""

import random
import secrets
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.errors import RunUnknown, WrongUse
from holdfast.journal import (
    AttemptRecord,
    EndingRecord,
    Journal,
    Quarantine,
    Record,
    RunRecord,
    format_time,
    record_name,
)
from holdfast.ledger.goodput import BUCKETS, Ledger, make_ledger
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faults import fault
from tests.conftest import Engine
from tests.support.makers import make_commit

LIVES = 200
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class Story:
    """A run that is told, not trained: a clock, the true seconds in each bucket, and the records of each event.

    Attributes:
        now: the story's time, in seconds since 1970.
        true: the true seconds by bucket.
    """

    def __init__(self, restart_s: float = 20.0, stall_s: float = 0.5, save_s: float = 3.0) -> None:
        self.restart_s, self.stall_s, self.save_s = restart_s, stall_s, save_s
        self.journal = Journal(MemoryStore(secrets.token_hex(8)), "run")
        self.journal.begin("m:f")
        self.now = START
        self.true = dict.fromkeys(BUCKETS, 0.0)
        self.attempt = self.commits = self.step = 0

    def spend(self, seconds: float, bucket: str) -> None:
        self.now += seconds
        self.true[bucket] += seconds

    def write(self, folder: str, number: int, record: Record) -> None:
        self.journal.store.create(record_name(folder, number), record.to_bytes())

    def begin(self, **fields: Any) -> None:
        """Start an attempt, up to its first step."""
        self.attempt += 1
        began, claimed = self.now, self.now + self.restart_s * 0.8
        known: dict[str, Any] = {"began_at": format_time(began), "host": f"host-{self.attempt}"} | fields
        record = AttemptRecord(
            number=self.attempt, why="", created_at=whole(claimed), pid=1, environment={}, **known
        )  # fmt: skip
        self.write("attempts", self.attempt, record)
        self.spend(self.restart_s, "restart")

    def train(self, seconds: float, **fields: Any) -> None:
        """Train ten steps and commit them; the commit is made while the ranks train on."""
        self.commits += 1
        self.step += 10
        self.spend(seconds, "productive")
        known = {
            "step": self.step, "trained_at": format_time(self.now), "train_s": seconds, "stall_s": self.stall_s,
            "save_s": self.save_s, "restart_s": self.restart_s, "created_at": whole(self.now + self.save_s),
        } | fields  # fmt: skip
        self.write("commits", self.commits, make_commit(self.commits, self.attempt, **known))
        self.spend(known["stall_s"], "stall")

    def end(self, reason: str, after_s: float = 0.0) -> None:
        record = EndingRecord(
            number=self.attempt, reason=reason, message="", step=self.step, created_at=whole(self.now + after_s)
        )
        self.write("endings", self.attempt, record)

    def ledger(self) -> Ledger:
        return make_ledger(self.journal, datetime.fromtimestamp(self.now, UTC))


def whole(seconds: float) -> str:
    """Return a time as most records hold it: without fractions of a second."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat()


# ---- lives


def tell(seed: int) -> Story:
    """Return the story of a run whose machines, processes and ranks die at random moments."""
    chance = random.Random(seed)
    story = Story(chance.uniform(2, 60), chance.uniform(0, 2), chance.uniform(0.1, 8))
    chunk_s = chance.uniform(8, 90)
    for _ in range(chance.randint(0, 9)):
        story.begin()
        for _ in range(chance.randint(0, 6)):
            story.train(chunk_s)
            if chance.random() < 0.15:  # a rehearsal, after which the run continues in either set of ranks
                rehearse_s = story.restart_s + chance.uniform(1, 9)
                story.spend(rehearse_s, "rehearsal")
                story.restart_s += chance.choice([0, 0.25])
                story.train(chunk_s, rehearse_s=rehearse_s)
            if chance.random() < 0.15:  # a rank dies, and another one replaces it
                story.spend(chance.uniform(0, chunk_s), "lost")
                story.restart_s += 0.125
                story.spend(story.restart_s, "restart")
                story.train(chunk_s)
        END_AT_RANDOM[chance.choice([*END_AT_RANDOM])](story, chance, chunk_s)
        story.spend(chance.choice([0.2, 20.0, 4000.0]), "waiting")
    story.begin()
    story.train(chunk_s)
    story.spend(story.save_s, "save")
    story.end("completed")
    return story


def _vanish(story: Story, chance: random.Random, chunk_s: float) -> None:
    story.spend(chance.uniform(0, chunk_s), "lost")


def _crash(story: Story, chance: random.Random, chunk_s: float) -> None:
    story.spend(chance.uniform(0, chunk_s), "lost")
    story.end("crashed", after_s=1.0)


def _fail(story: Story, chance: random.Random, chunk_s: float) -> None:
    story.spend(chance.uniform(0, chunk_s), "lost")
    story.end("recipe_failed")


def _drain(story: Story, chance: random.Random, chunk_s: float) -> None:
    story.train(chance.uniform(0.5, chunk_s), why="preempted", stall_s=0.0)
    story.spend(story.save_s + 1, "drain")
    story.end("preempted")


def _leave(story: Story, chance: random.Random, chunk_s: float) -> None:
    """The attempt's process dies; its ranks save, and the next attempt adopts that."""
    story.train(chance.uniform(0.5, chunk_s), why="adopted", stall_s=0.0, save_s=0.0, restart_s=0.0)


END_AT_RANDOM = {"vanish": _vanish, "crash": _crash, "fail": _fail, "drain": _drain, "leave": _leave}


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    return [tell(seed) for seed in range(LIVES)]


def test_the_buckets_sum_to_the_wall_time_in_200_random_lives(stories: list[Story]) -> None:
    for seed, story in enumerate(stories):
        ledger = story.ledger()
        wall_s = story.now - START
        assert sum(ledger.buckets.values()) == pytest.approx(wall_s, abs=1), seed
        assert (ledger.ended - ledger.began).total_seconds() == pytest.approx(wall_s, abs=1), seed
        assert sum(sum(each.buckets.values()) for each in ledger.attempts) == pytest.approx(wall_s, abs=1), seed
        assert [*ledger.buckets] == [*BUCKETS]
        assert ledger.missing == ()


def test_each_second_is_in_its_bucket_in_200_random_lives(stories: list[Story]) -> None:
    """Only the death of an attempt that nobody recorded is uncertain: less than a chunk more may count as lost."""
    for seed, story in enumerate(stories):
        found, true = story.ledger().buckets, story.true
        for name in ("productive", "stall"):
            assert found[name] == pytest.approx(true[name], abs=0.1), (seed, name)
        for name in ("save", "drain"):  # these end with a record of whole seconds, one for each attempt
            assert found[name] == pytest.approx(true[name], abs=story.attempt), (seed, name)
        assert found["lost"] + found["restart"] >= true["lost"] + true["restart"] - story.attempt, seed
        assert found["waiting"] <= true["waiting"] + story.attempt, seed


def test_an_uninterrupted_run_loses_nothing() -> None:
    story = Story()
    story.begin()
    for _ in range(6):
        story.train(60.0)
    story.spend(3.0, "save")
    story.end("completed")
    ledger = story.ledger()
    assert ledger.buckets == pytest.approx(story.true, abs=1)
    assert ledger.buckets["lost"] == ledger.buckets["waiting"] == ledger.buckets["drain"] == 0
    assert ledger.goodput == pytest.approx(360 / 386, abs=0.003)
    assert ledger.limit == pytest.approx(366 / 386, abs=0.003)
    assert ledger.efficiency == pytest.approx(360 / 366, abs=0.003)
    assert (ledger.preemptions, ledger.cost_per_preemption_s) == (0, 0)


def test_each_preemption_costs_what_it_lost_and_the_restart_after_it() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.spend(30.0, "lost")
    story.spend(3600.0, "waiting")
    story.begin()
    story.train(60.0, why="preempted", stall_s=0.0)
    story.spend(4.0, "drain")
    story.end("preempted")
    story.begin()
    story.train(60.0)
    story.end("completed")
    ledger = story.ledger()
    first, second, last = ledger.attempts
    assert (first.reason, first.is_end_known, second.reason, last.reason) == (
        "vanished", False, "preempted", "completed"
    )  # fmt: skip
    assert first.buckets["lost"] == pytest.approx(60 + 3, abs=0.1), "a chunk and its save: no record proves less"
    assert first.lost_steps == pytest.approx(10, abs=1)
    assert second.buckets["drain"] == pytest.approx(4, abs=1)
    assert ledger.preemptions == 2
    assert ledger.cost_per_preemption_s == pytest.approx((63 + 20 + 4 + 20) / 2, abs=1)


def test_a_supervisor_that_noticed_a_death_limits_what_was_lost() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.spend(12.0, "lost")
    story.end("crashed", after_s=1.0)
    story.spend(500.0, "waiting")
    story.begin()
    assert story.ledger().attempts[0].buckets["lost"] == pytest.approx(13, abs=1)


def test_ranks_that_were_replaced_lost_the_time_between() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.spend(25.0, "lost")
    story.restart_s = 7.0
    story.spend(7.0, "restart")
    story.train(60.0)
    story.end("completed")
    assert story.ledger().buckets == pytest.approx(story.true, abs=1)
    assert story.ledger().attempts[0].lost_steps == 4


def test_ranks_that_have_saved_before_they_were_replaced_lost_no_step() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.train(25.0, why="adopted", stall_s=0.0, save_s=0.0, restart_s=0.0, is_last=True)
    story.spend(30.0, "lost")  # until the ranks that were left had noticed and saved
    story.restart_s = 7.0
    story.spend(7.0, "restart")
    story.train(60.0)
    story.end("completed")
    assert story.ledger().buckets == pytest.approx(story.true, abs=1)
    assert story.ledger().attempts[0].lost_steps == 0


def test_a_quarantined_commit_was_trained_in_vain() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.train(40.0)
    story.write("quarantine", 2, Quarantine(commit=2, reason="damaged", attempt=1, created_at=whole(START)))
    story.end("completed")
    ledger = story.ledger()
    assert (ledger.buckets["productive"], ledger.buckets["lost"]) == pytest.approx((60, 40), abs=0.1)
    assert ledger.attempts[0].lost_steps == 10


def test_a_failure_loses_the_steps_since_the_last_commit() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.spend(30.0, "lost")
    story.end("recipe_failed")
    ledger = story.ledger()
    assert ledger.buckets == pytest.approx(story.true, abs=1)
    assert ledger.preemptions == 0, "a recipe that raises is no preemption"


def test_a_preemption_that_could_not_save_lost_its_steps() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.spend(30.0, "lost")
    story.end("preempted")
    assert story.ledger().buckets == pytest.approx(story.true, abs=1)


def test_two_clocks_that_differ_take_no_second_twice() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.end("preempted")
    story.now -= 30.0  # the next machine's clock is late
    story.begin()
    story.train(60.0)
    story.end("completed")
    ledger = story.ledger()
    assert ledger.buckets["productive"] == pytest.approx(120 - 10, abs=1), "the ten seconds of both clocks count once"
    assert ledger.wall_s == pytest.approx(sum(ledger.buckets.values()))
    assert min(ledger.buckets.values()) >= 0


# ---- a run that trains now


def test_a_run_that_trains_is_accounted_for_until_now() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.spend(45.0, "productive")
    ledger = story.ledger()
    assert ledger.attempts[0].reason == ""
    assert ledger.buckets == pytest.approx(story.true, abs=1)
    story.spend(3600.0, "waiting")
    silent = story.ledger()
    assert silent.attempts[0].reason == "vanished"
    assert silent.buckets["lost"] == pytest.approx(63, abs=1), "it has saved nothing for an hour"
    assert silent.buckets["waiting"] == pytest.approx(3600 + 45 - 63, abs=1)


def test_a_run_that_has_ended_is_accounted_for_until_its_end() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.end("preempted")
    story.now += 86400
    assert story.ledger().wall_s < 100


def test_an_attempt_without_a_commit_was_restarting() -> None:
    story = Story()
    story.begin()
    assert story.ledger().buckets["restart"] == pytest.approx(20, abs=1)
    story.train(60.0)
    story.begin()
    story.spend(5.0, "lost")
    story.begin()
    story.train(60.0)
    story.end("completed")
    second = story.ledger().attempts[1].buckets
    assert (second["restart"], second["lost"]) == pytest.approx((20, 5), abs=1)


# ---- what is lost, and what is older


def test_a_damaged_run_shows_what_is_left_and_says_what_is_missing() -> None:
    story = Story()
    for _ in range(3):
        story.begin()
        story.train(60.0)
        story.train(60.0)
        story.end("preempted")
    store = story.journal.store
    whole_s = story.ledger().wall_s
    for name in ("run.json", record_name("attempts", 2), record_name("endings", 1), record_name("commits", 5)):
        store.replace(name, b"{")
    store.delete(record_name("commits", 3))
    ledger = make_ledger(Journal(open_store(story.journal.store_url), "run"))
    assert [line.partition(" ")[0] for line in ledger.missing] == [
        "run.json", "attempts/00000002.json", "endings/00000001.json", "commits/00000005.json",
        "commits/00000003.json",
    ]  # fmt: skip
    assert ledger.wall_s == pytest.approx(whole_s, abs=1)
    assert [each.number for each in ledger.attempts] == [1, 2, 3]
    # Commit 5's steps survive, because commit 6 descends from it.
    assert ledger.attempts[2].buckets["productive"] == pytest.approx(100, abs=2), "the second restart hides 20 s"


def test_the_steps_of_a_lost_commit_survive_if_a_later_one_descends_from_it() -> None:
    story = Story()
    story.begin()
    for _ in range(3):
        story.train(60.0)
    story.end("completed")
    story.journal.store.delete(record_name("commits", 2))
    ledger = make_ledger(Journal(open_store(story.journal.store_url), "run"))
    assert ledger.buckets["productive"] == pytest.approx(180, abs=1)
    assert ledger.buckets["save"] == pytest.approx(0, abs=1)


def test_a_superseded_attempt_has_no_time_after_the_claim_that_superseded_it() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.end("superseded", after_s=500.0)  # it trained on in vain, beside its successor
    story.begin()
    story.train(60.0)
    story.end("completed")
    ledger = story.ledger()
    assert ledger.wall_s == pytest.approx(story.now - START, abs=1)
    assert ledger.buckets["productive"] == pytest.approx(120, abs=1)


def test_records_of_an_earlier_version_are_placed_by_the_time_of_their_commit() -> None:
    story = Story()
    story.begin(began_at="")
    for _ in range(3):
        story.train(60.0, trained_at="")
    story.spend(3.0, "save")
    story.end("completed")
    ledger = story.ledger()
    assert ledger.buckets == pytest.approx(story.true, abs=3)
    assert ledger.wall_s == pytest.approx(sum(ledger.buckets.values()))


def test_an_old_adopted_commit_is_named_as_missing() -> None:
    story = Story()
    story.begin()
    story.train(60.0)
    story.train(60.0, why="adopted", trained_at="", train_s=0.0)
    story.begin()
    (line,) = story.ledger().missing
    assert line.startswith("the adopted commit 2 doesn't say when its steps were trained")


def test_a_run_without_attempts_and_a_run_of_a_later_format_are_refused() -> None:
    journal = Journal(MemoryStore(secrets.token_hex(8)), "run")
    with pytest.raises(RunUnknown):
        make_ledger(journal)
    journal.begin("m:f")
    with pytest.raises(WrongUse, match="has no record of an attempt"):
        make_ledger(journal)
    later = RunRecord(format=999, run="run", recipe="m:f", first_commit=1, created_at=whole(START))
    journal.store.replace("run.json", later.to_bytes())
    with pytest.raises(WrongUse, match="is stored in format 999"):
        make_ledger(journal)


# ---- a real run


@pytest.mark.slow
def test_the_ledger_of_a_killed_run_covers_the_time_that_passed(engine: Engine) -> None:
    struck = engine.folder / "struck"
    began = time.time()
    engine.run(**fault("commit-recorded", 2, "both", struck))
    engine.finish()
    took_s = time.time() - began
    journal = Journal(open_store(str(engine.folder / "runs")), "toy")
    ledger = make_ledger(journal)
    assert struck.exists()
    assert [each.reason for each in ledger.attempts] == ["vanished", "completed"]
    assert began - 1 < ledger.began.timestamp()
    assert 0 < ledger.wall_s < took_s + 1
    assert ledger.missing == ()
    commits = [journal.read_commit(number) for number in journal.numbers("commits")]
    # The seconds by which a save slows the steps beside it count as a stall; without a free core there are some.
    assert ledger.buckets["productive"] == pytest.approx(sum(each.train_s - each.slow_s for each in commits), abs=0.1)
    assert ledger.buckets["restart"] > 0

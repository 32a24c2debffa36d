"""What a sink is sent: the commits that count, each once, whatever happened to the others."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.config import Retention
from holdfast.errors import Superseded
from holdfast.extensions.sinks.delivery import deliver
from holdfast.extensions.sinks.points import read_points
from holdfast.journal import Commit, Journal
from holdfast.keeping.retention import prune_by_policy
from holdfast.looking.sinks import Facts, Point, Sink, find_id, read_values
from holdfast.store import open_store
from tests.support.makers import STEPS_PER_EPOCH, claim, damage, make_line, train


class Kept(Sink):
    """A sink that keeps the steps it was sent."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.steps: list[int] = []
        self.rewound: list[int] = []
        self.fails_after = 10**6

    def rewind(self, number: int) -> None:
        self.rewound.append(number)

    def write(self, commit: Commit, points: Sequence[Point]) -> None:
        if commit.number > self.fails_after:
            raise ConnectionError("it was told to fail")
        self.steps += [point.step for point in points]


def make_sink(journal: Journal, attempt: int = 1) -> Kept:
    return Kept(Facts(journal, "id", "project", {}, Path(), attempt))


def steps(*commits: int) -> list[int]:
    """Return the steps of commits of an epoch each."""
    return [step for number in commits for step in range((number - 1) * 10 + 1, number * 10 + 1)]


def test_each_commit_is_sent_once_in_its_order(tmp_path: Path) -> None:
    line = make_line(open_store(str(tmp_path)))
    sink = make_sink(line.journal)
    deliver(sink)
    train(line)
    train(line)
    deliver(sink)
    deliver(sink)
    train(line)
    deliver(sink)
    assert sink.steps == steps(1, 2, 3)


def test_a_sink_that_failed_goes_on_where_it_stands(tmp_path: Path) -> None:
    line = make_line(open_store(str(tmp_path)))
    sink = make_sink(line.journal)
    for _ in range(3):
        train(line)
    sink.fails_after = 1
    with pytest.raises(ConnectionError):
        deliver(sink)
    sink.fails_after = 3
    deliver(sink)
    assert sink.steps == steps(1, 2, 3)


def test_commits_of_an_abandoned_line_are_not_sent_though_they_are_pruned_and_not_quarantined(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    line = make_line(store)
    first = train(line)
    for _ in range(3):
        newest = train(line)
    line.journal.pin(first.number)
    prune_by_policy(line.journal, Retention(keep_last=1, keep_every=0), STEPS_PER_EPOCH)
    damage(line, newest.path)
    line = make_line(store)
    assert train(line).parent == first.number
    sink = make_sink(line.journal, attempt=2)
    deliver(sink)
    assert sink.steps == steps(1, 2)
    assert sink.rewound == [0]


def test_a_sink_that_can_not_be_wound_back_is_sent_no_step_twice(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    line = make_line(store)
    sink = make_sink(line.journal)
    for _ in range(2):
        newest = train(line)
    deliver(sink)
    damage(line, newest.path)
    line = make_line(store)
    later = make_sink(line.journal, attempt=2)
    later.step = sink.step
    train(line, steps=5)
    train(line, steps=10)
    deliver(later)
    assert sink.steps == steps(1, 2)
    assert later.steps == [21, 22, 23, 24, 25]


def test_a_sink_that_can_be_wound_back_is_told_from_where(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    line = make_line(store)
    sink = make_sink(line.journal)
    for _ in range(3):
        newest = train(line)
        deliver(sink)
    damage(line, newest.path)
    make_line(store)
    sink.facts = make_sink(line.journal, attempt=2).facts
    deliver(sink)
    assert sink.rewound == [0, 1, 2, 2]


def test_a_superseded_attempt_sends_nothing(tmp_path: Path) -> None:
    line = make_line(open_store(str(tmp_path)))
    train(line)
    claim(line.journal, 2)
    sink = make_sink(line.journal)
    with pytest.raises(Superseded):
        deliver(sink)
    assert sink.steps == []


def test_a_trail_that_is_lost_leaves_a_hole_and_no_error(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    line = make_line(store)
    for _ in range(3):
        train(line)
    for path in (tmp_path / "run" / "metrics" / "00000002.jsonl", *tmp_path.glob("run/epoch-0002/metrics.jsonl")):
        path.unlink()
    sink = make_sink(line.journal)
    deliver(sink)
    assert sink.steps == steps(1, 3)


def test_the_id_stays_when_the_folder_moves_and_differs_for_a_run_of_the_same_name(tmp_path: Path) -> None:
    journal = make_line(open_store(str(tmp_path / "one"))).journal
    first = find_id(journal)
    (tmp_path / "one").rename(tmp_path / "two")
    assert find_id(Journal(open_store(str(tmp_path / "two")), "run")) == first
    assert find_id(make_line(open_store(str(tmp_path / "one"))).journal) != first


def test_the_names_are_those_of_the_page() -> None:
    line = {
        "step": 7, "loss": 0.5, "grad_norm": "nan", "lrs": [0.1], "anneals": {"beta": 0.2},
        "logged": {"kl": 3.0, "d/loss": 4.0, "loss": 9.0}, "metrics": {"accuracy": 0.9, "lost": None},
        "measured": {"eval_s": 1.5},
    }  # fmt: skip
    values = read_values(line)
    assert repr(values.pop("train/grad_norm")) == "nan"
    assert values == {
        "train/loss": 0.5, "train/lr": 0.1, "train/kl": 3.0, "d/loss": 4.0, "anneal/beta": 0.2,
        "eval/accuracy": 0.9, "eval/eval_s": 1.5,
    }  # fmt: skip
    assert read_values({"step": 1, "lrs": [0.1, 0.2]}) == {"train/lr/0": 0.1, "train/lr/1": 0.2}


def test_points_say_which_attempt_trained_them(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    train(make_line(store))
    line = make_line(store)
    train(line)
    first, second = (read_points(line.journal, line.journal.read_commit(number)) for number in (1, 2))
    assert [point.note for point in (first[0], second[0])] == [
        "attempt 1 begins the run",
        "attempt 2 continues from step 10",
    ]
    assert [point.values for point in (first[-1], second[-1])] == [{"run/attempt": 1.0}, {"run/attempt": 2.0}]

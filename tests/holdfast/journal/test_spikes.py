"""A loss or a gradient norm that jumps is a spike; ordinary noise, heavy tails and a loss that stays high are not."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.attempt import live
from holdfast.config import ChunkLength, Compute, Log, RunConfig
from holdfast.journal import Commit, Journal, read_record
from holdfast.journal.records import Spike
from holdfast.journal.spikes import MOST, QUIET, WINDOW, describe_spikes, find_spikes, keep_watched
from holdfast.store import open_store
from tests.support.spiking import POISONED_STEP, SAMPLES, SEED, SPIKE_STEP


def make_lines(values: list[Any], name: str = "loss") -> list[dict[str, Any]]:
    return [{"step": step, name: value} for step, value in enumerate(values, 1)]


def draw(of: Callable[[random.Random, int], float], count: int = 20_000, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    return make_lines([of(generator, step) for step in range(count)])


def draw_t(generator: random.Random, freedom: int) -> float:
    """Draw from Student's t distribution."""
    return generator.gauss(0, 1) / math.sqrt(sum(generator.gauss(0, 1) ** 2 for _ in range(freedom)) / freedom)


def test_a_jump_is_a_spike() -> None:
    noise = [2 + 0.05 * random.Random(step).gauss(0, 1) for step in range(100)]
    (found,) = find_spikes([], make_lines([*noise, 9.0, *noise]))
    assert (found.step, found.name, found.value) == (101, "loss", 9.0)
    assert found.usual == pytest.approx(2, abs=0.05)
    assert describe_spikes([found]) == {101: "the loss or its gradient has jumped in step 101: loss 9, usually 1.992"}
    assert [each.name for each in find_spikes([], make_lines([*noise, 9.0], "grad_norm"))] == ["grad_norm"]


@pytest.mark.parametrize("spelled", ["nan", "inf", math.nan])
def test_a_number_that_is_not_finite_is_a_spike_at_once(spelled: Any) -> None:
    assert find_spikes([], make_lines([1.0, spelled])) == [Spike(2, "loss", None, None)]


def test_few_steps_tell_nothing_of_what_is_usual() -> None:
    assert not find_spikes([], make_lines([1.0] * 10 + [50.0]))


def test_a_loss_that_stays_high_is_one_spike() -> None:
    found = find_spikes([], make_lines([1.0] * 40 + [50.0] * 200))
    assert [each.step for each in found] == [41]


def test_spikes_apart_are_several_up_to_a_bound() -> None:
    values = [1.0] * 40
    for size in range(1, 20):
        values += [10.0**size] + [1.0] * (QUIET + 1)
    assert [each.step for each in find_spikes([], make_lines(values))] == [
        41 + (QUIET + 2) * each for each in range(MOST)
    ]


def test_steps_without_a_loss_are_passed_over() -> None:
    lines = make_lines([1.0] * 40 + [50.0])
    skipped = [{"step": 41, "skipped": True}]
    assert [each.step for each in find_spikes([], [*lines[:40], *skipped, {"step": 42, "loss": 50.0}])] == [42]


def test_chunks_give_the_spikes_of_the_whole_trail() -> None:
    generator = random.Random(3)
    values = [1 + 0.1 * generator.gauss(0, 1) for _ in range(600)]
    for step in (100, 101, 104, 299, 300, 301, 450):
        values[step] += 10.0
    lines = make_lines(values)
    for size in (1, 7, 64, 300):
        before: list[dict[str, Any]] = []
        found = []
        for start in range(0, len(lines), size):
            found += find_spikes(before, lines[start : start + size])
            before = keep_watched([*before, *lines[start : start + size]])
            assert len(before) <= WINDOW + QUIET
        assert [each.step for each in found] == [101, 300, 451]


@pytest.mark.parametrize(
    ("of", "most"),
    [
        (lambda generator, step: 2 + 0.1 * generator.gauss(0, 1), 0),
        (lambda generator, step: 8 * math.exp(-step / 2000) + 2 + 0.1 * generator.gauss(0, 1), 0),
        (lambda generator, step: math.exp(0.3 * generator.gauss(0, 1)), 0),
        (lambda generator, step: math.exp(0.6 * generator.gauss(0, 1)), 1),
        (lambda generator, step: 5 + 0.3 * draw_t(generator, 4), 3),
    ],
    ids=["noise", "a falling loss", "heavy tails", "heavier tails", "Student's t"],
)
def test_false_alarms_are_rare(of: Callable[[random.Random, int], float], most: int) -> None:
    """In 20,000 steps."""
    lines = draw(of)
    found = [each for start in range(0, 20_000, 500) for each in find_spikes(lines[:start][-80:], lines[start:][:500])]
    assert len(found) <= most


def test_a_commit_from_before_has_no_spikes() -> None:
    assert Commit.model_fields["spikes"].get_default() == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("cause", ["data", "dynamics", "flip"])
def test_an_attempt_records_a_spike_and_says_how_to_explain_it(
    cause: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flips = tmp_path / "flips"
    flips.touch()
    settings = {"cause": cause, "samples": 5 * SAMPLES} | ({"flips": str(flips)} if cause == "flip" else {})
    config = RunConfig(
        recipe="tests.support.spiking:spike", run="r", store=str(tmp_path / "runs"), chunk=ChunkLength(steps=10),
        settings=settings, compute=Compute(device="cpu"), log=Log(folder=str(tmp_path / "logs")), seed=SEED,
    )  # fmt: skip
    assert live(config).complete
    expected = POISONED_STEP if cause == "data" else SPIKE_STEP
    journal = Journal(open_store(config.store), "r")
    commits = [
        read_record(journal.store, Commit, f"commits/{number:08d}.json") for number in journal.numbers("commits")
    ]
    found = [spike for commit in commits for spike in commit.spikes]
    assert {spike.step for spike in found} == {expected}
    assert f"to see why: holdfast explain {journal.store.url} {expected}" in caplog.text

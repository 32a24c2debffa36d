"""A step's samples and their random numbers are the same from any start, and leave the process's generators alone."""

import itertools
import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from holdfast import state
from holdfast.data import Batches, Order, Share, combine, is_stream
from holdfast.data.workers import make_loader, shorten_socket_paths
from holdfast.errors import RecipeError, StateError
from tests.support.varied import Counted, Numbers, Points

pytestmark = pytest.mark.usefixtures("same_process")

SEED, BATCH, GRAD_ACCUM = 5, 4, 2
STEPS = 14  # more than two passes over 48 samples
ONE = Share(BATCH)


def of_points(share: Share = ONE, collate: Any = None, seed: int = SEED) -> Batches:
    """Return the batches of a dataset whose samples have random numbers from every generator."""
    data = Points(noise=True)
    return Batches(data, collate, Order(len(data), BATCH, GRAD_ACCUM, seed), [share], GRAD_ACCUM, seed, workers=0)


def of_stream(data: Any, share: Share = ONE, collate: Any = None) -> Batches:
    return Batches(data, collate, None, [share], GRAD_ACCUM, SEED, workers=0)


def noisy_collate(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + torch.rand(()) + random.random() + np.random.random(), y


def take(batches: Batches, number: int) -> list[tuple[str, Any]]:
    return [next(batches) for _ in range(number)]


def plain(found: list[tuple[str, Any]]) -> list[Any]:
    """Return a batch in a form that can be compared to the bit."""
    return [
        (name, [tensor.tolist() for tensor in (batch if isinstance(batch, list | tuple) else [batch])])
        for name, batch in found
    ]


def test_socket_paths_of_loader_workers_fit_into_a_long_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    shorten_socket_paths()
    with Listener() as listener:
        assert len(os.fsencode(listener.address)) <= 107
    assert tempfile.gettempdir() == str(long)


# ---- map-style data


@pytest.mark.parametrize("collate", [None, noisy_collate])
@pytest.mark.parametrize("share", [ONE, Share(BATCH, 1, 2)])
def test_random_numbers_are_the_same_from_any_start(share: Share, collate: Any) -> None:
    batches = of_points(share, collate)
    batches.begin(0, STEPS)
    expected = plain(take(batches, STEPS * GRAD_ACCUM))
    for start in (1, 5, 6, 13):
        random.seed(start)
        np.random.seed(start)
        torch.manual_seed(start)
        for again in (of_points(share, collate), batches):
            assert again.begin(start, STEPS) is False
            assert plain(take(again, (STEPS - start) * GRAD_ACCUM)) == expected[start * GRAD_ACCUM :]


def test_random_numbers_are_new_in_every_micro_batch_rank_pass_and_run() -> None:
    """One sample's noise is never that of another, nor its own in another pass."""
    noise = []
    for seed, share in itertools.product((SEED, SEED + 1), (Share(BATCH, 0, 2), Share(BATCH, 1, 2))):
        batches = of_points(share, seed=seed)
        batches.begin(0, STEPS)
        for _, (x, y) in take(batches, STEPS * GRAD_ACCUM):
            noise += [round(value, 5) for value in (x.sum(1) - y[:, 0]).tolist()]
    assert len(set(noise)) == len(noise) == 2 * STEPS * GRAD_ACCUM * BATCH


def test_loading_ends_at_the_stop() -> None:
    batches = of_points()
    batches.begin(3, 5)
    take(batches, 2 * GRAD_ACCUM)
    with pytest.raises(StopIteration):
        next(batches)


def test_the_position_in_map_style_data_is_the_step_and_nothing_else() -> None:
    class Positioned(list[int]):
        def state_dict(self) -> dict[str, int]:
            raise AssertionError("nobody asks")

        load_state_dict = state_dict  # type: ignore[assignment]

    batches = Batches(
        Positioned(range(48)), list, Order(48, BATCH, GRAD_ACCUM, SEED), [ONE], GRAD_ACCUM, SEED, workers=0
    )
    batches.begin(1, STEPS)
    take(batches, 3)
    assert not batches.has_state
    assert batches.state_dict() is None


def test_getitems_fetches_whole_batches_if_the_data_has_it() -> None:
    class Fetching(list[int]):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return [self[index] for index in indices]

    asked: list[list[int]] = []
    order = Order(48, BATCH, GRAD_ACCUM, SEED)
    batches = Batches(Fetching(range(48)), list, order, [ONE], GRAD_ACCUM, SEED, workers=0)
    batches.begin(0, 1)
    assert [batch for _, batch in take(batches, 2)] == asked == order.step_indices(0).tolist()


def test_the_first_micro_batch_is_the_main_ranks_at_any_step_and_changes_nothing() -> None:
    main, other = of_points(Share(BATCH, 0, 2)), of_points(Share(BATCH, 1, 2))
    main.begin(0, STEPS)
    expected = plain([("", next(main)[1])])
    for batches in (main, other):
        batches.begin(3, STEPS)
        following = plain(take(batches, 4))
        batches.begin(3, STEPS)
        before = state.digest_rng(state.capture_rng())
        found = [plain([("", batches.first())])]
        assert state.digest_rng(state.capture_rng()) == before
        take(batches, 2)
        found.append(plain([("", batches.first())]))
        assert plain(take(batches, 2)) == following[2:]
        assert found == [expected, expected]


# ---- the training process's own random numbers


@pytest.mark.parametrize(
    "make",
    [
        of_points,
        lambda: of_points(collate=noisy_collate),
        lambda: of_stream(Numbers()),
        lambda: of_stream(Counted(), collate=lambda samples: default_collate(samples) + torch.rand(())),
    ],
)
def test_loading_leaves_the_process_generators_unchanged(make: Any) -> None:
    before = state.digest_rng(state.capture_rng())
    batches = make()
    batches.begin(0, STEPS)
    take(batches, 5 * GRAD_ACCUM)
    saved = batches.state_dict()
    assert state.digest_rng(state.capture_rng()) == before
    batches.begin(5, STEPS, saved)
    take(batches, 3)
    assert state.digest_rng(state.capture_rng()) == before


def test_an_error_leaves_the_process_generators_unchanged() -> None:
    def fail(samples: list[Any]) -> Any:
        torch.rand(())
        raise ZeroDivisionError

    for batches in (of_points(collate=fail), of_stream(Numbers(), collate=fail)):
        before = state.digest_rng(state.capture_rng())
        batches.begin(0, STEPS)
        with pytest.raises(ZeroDivisionError):
            next(batches)
        assert state.digest_rng(state.capture_rng()) == before


# ---- streams


class Forgetful(IterableDataset[int]):
    """A stream of a given length, with different numbers in every pass and without a position of its own."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.number, self.skip, self.given = size, 0, 0, 0
        self.told: list[int] = []

    def set_epoch(self, number: int) -> None:
        self.number = number
        self.told.append(number)

    def __iter__(self) -> Iterator[int]:
        self.given, self.skip = self.skip, 0
        while self.given < self.size:
            self.given += 1
            yield 100 * self.number + self.given - 1


class Passes(Forgetful):
    """A stream of numbers that saves and loads its position."""

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.skip = saved["given"]


class Repeating:
    """A stream of one value, eight times."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.value, 8)


def numbers(found: list[tuple[str, Any]]) -> list[list[int]]:
    return [batch for _, batch in found]


def test_a_pass_that_ends_within_a_micro_batch_drops_the_rest() -> None:
    data = Passes()
    batches = of_stream(data, collate=list)
    batches.begin(0, STEPS)
    assert numbers(take(batches, 5)) == [
        [0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [104, 105, 106, 107], [200, 201, 202, 203],
    ]  # fmt: skip
    assert data.told == [0, 1, 2]


def test_a_pass_that_ends_with_a_micro_batch_drops_nothing() -> None:
    batches = of_stream(Passes(8), collate=list)
    batches.begin(0, STEPS)
    assert numbers(take(batches, 3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103]]


@pytest.mark.parametrize("size", [8, 10, 11])
@pytest.mark.parametrize("step", range(1, 7))
def test_a_stream_with_a_position_continues_from_it(size: int, step: int) -> None:
    first = of_stream(Passes(size), collate=list)
    first.begin(0, STEPS)
    take(first, step * GRAD_ACCUM)
    saved = first.state_dict()
    expected = take(first, 7)
    data = Passes(size)
    for batches in (of_stream(data, collate=list), first):
        assert batches.begin(step, STEPS, saved) is False
        assert take(batches, 7) == expected
    within = (step * GRAD_ACCUM - 1) // 2  # two micro-batches a pass
    assert data.told == list(range(within, expected[-1][1][0] // 100 + 1))


@pytest.mark.parametrize("step", range(1, 7))
def test_a_stream_without_a_position_is_read_again_from_its_beginning(step: int) -> None:
    first = of_stream(Forgetful(), collate=list)
    first.begin(0, STEPS)
    take(first, step * GRAD_ACCUM)
    saved = first.state_dict()
    expected = take(first, 7)
    for batches in (of_stream(Forgetful(), collate=list), first):
        for position in (saved, None):  # earlier versions have saved None
            assert batches.begin(step, STEPS, position) is True
            assert take(batches, 7) == expected


def test_a_stream_that_gives_other_samples_when_it_is_read_again_is_refused() -> None:
    class Changing(IterableDataset[int]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            self.reads += 1
            return iter(range(self.reads, 100))

    batches = of_stream(Changing(), collate=list)
    batches.begin(0, STEPS)
    take(batches, 2 * GRAD_ACCUM)
    with pytest.raises(
        RecipeError, match=r"the data \(a .*Changing\) yields different samples when it is read a second time"
    ):
        batches.begin(2, STEPS, batches.state_dict())


def test_a_stream_at_step_zero_is_not_read_again() -> None:
    batches = of_stream(Forgetful(), collate=list)
    assert batches.begin(0, STEPS) is False
    assert next(batches)[1] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [Numbers, Counted])
@pytest.mark.parametrize("step", [1, 4, 5, 9])
def test_noise_in_a_stream_is_the_same_from_any_start(stream: Any, step: int) -> None:
    first = of_stream(stream())
    first.begin(0, STEPS)
    take(first, step * GRAD_ACCUM)
    saved = first.state_dict()
    torch.manual_seed(step)
    again = of_stream(stream())
    again.begin(step, STEPS, saved)
    assert plain(take(again, 9)) == plain(take(first, 9))


def test_reading_again_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.data.loading.REPORT_EVERY_S", -1.0)
    told: list[tuple[int, int]] = []
    batches = of_stream(Numbers())
    batches.begin(2, STEPS, watch=lambda done, total: told.append((done, total)))
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("size", [0, 3])
def test_a_stream_that_is_too_short_is_refused(size: int) -> None:
    batches = of_stream(Passes(size), collate=list)
    batches.begin(0, STEPS)
    with pytest.raises(RecipeError, match="fewer samples than one micro-batch of 4"):
        next(batches)


def test_a_stream_that_ends_is_refused_when_it_ends() -> None:
    batches = of_stream(iter(range(6)), collate=list)
    batches.begin(0, STEPS)
    assert next(batches)[1] == [0, 1, 2, 3]
    with pytest.raises(RecipeError, match="fewer samples than one micro-batch of 4"):
        next(batches)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_split_a_streams_micro_batches(ranks: int, step: int) -> None:
    whole = of_stream(Passes(), collate=list)
    whole.begin(0, STEPS)
    expected = numbers(take(whole, 10))[step * GRAD_ACCUM :]
    shares = []
    for rank in range(ranks):
        batches = of_stream(Forgetful(), Share(BATCH, rank, ranks), collate=list)
        batches.begin(step, STEPS)
        shares.append(numbers(take(batches, 10 - step * GRAD_ACCUM)))
    assert [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == expected


def test_a_streams_micro_batch_is_named_by_its_content() -> None:
    batches = {}
    for value in (torch.ones(2), torch.zeros(2), torch.ones(2, dtype=torch.float64), "one", 1, {"a": torch.ones(2)}):
        stream = of_stream(Repeating(value), collate=lambda samples: samples)
        stream.begin(0, 1)
        (name, _), (again, _) = take(stream, 2)
        assert name == again
        batches[name] = value
    assert len(batches) == 6
    assert all(len(name) == 16 for name in batches)


def test_iterable_data_is_a_stream() -> None:
    assert is_stream(Numbers())
    assert is_stream(iter([1]))
    assert not is_stream([1])
    assert not is_stream(Points(noise=False))


def test_names_of_micro_batches_are_combined_in_order() -> None:
    assert combine(["a" * 16]) == "a" * 16
    assert len({combine(["a" * 16, "b" * 16]), combine(["b" * 16, "a" * 16]), combine(["a" * 16] * 2)}) == 3


class Shuffled:
    """A stream that the global generator shuffles at each pass."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(8), 8))


def test_ranks_share_a_shuffled_stream_without_overlap() -> None:
    shares = []
    for rank in range(2):
        batches = of_stream(Shuffled(), Share(4, rank, 2), list)
        batches.begin(0, 9)
        shares += [next(batches)[1] for _ in range(2)]
    assert sorted(itertools.chain(*shares)) == list(range(8))


def test_a_position_that_the_data_cannot_take_is_refused() -> None:
    batches = of_stream(Counted())
    batches.begin(0, 9)
    next(batches)
    with pytest.raises(StateError, match="no load_state_dict"):
        of_stream(Numbers()).begin(1, 9, batches.state_dict())


@pytest.mark.parametrize("trains_on_gpu", [False, True])
def test_batches_are_pinned_only_if_the_run_trains_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, trains_on_gpu: bool
) -> None:
    """A run with device = "cpu" may be on a machine with GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    state.include_gpus(trains_on_gpu)
    try:
        assert make_loader([0, 1], [[0]], 0, 0).pin_memory is trains_on_gpu
    finally:
        state.include_gpus(False)

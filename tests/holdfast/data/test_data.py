"""The order of samples is a permutation that follows from seed, pass and position."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data import Batches, Order, Share, digest_indices, permute


@given(st.integers(1, 3000), st.integers(0, 2**62), st.integers(0, 10))
def test_a_pass_is_a_permutation(size: int, seed: int, number: int) -> None:
    found = permute(np.arange(size, dtype=np.uint64), size, seed, number)
    assert sorted(found.tolist()) == list(range(size))


@given(st.integers(2, 3000), st.data())
def test_positions_are_permuted_without_the_others(size: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=9)), dtype=np.uint64)
    whole = permute(np.arange(size, dtype=np.uint64), size, 1, 2)
    assert permute(positions, size, 1, 2).tolist() == whole[positions].tolist()


def test_the_permutation_never_changes() -> None:
    """With a changed order every existing run would resume with different samples."""
    assert permute(np.arange(10, dtype=np.uint64), 10, 1234, 0).tolist() == [2, 8, 9, 3, 1, 6, 5, 4, 7, 0]
    assert permute(np.array([0, 10**9], dtype=np.uint64), 10**12, 1234, 3).tolist() == [176181146050, 421356301651]


def test_passes_and_seeds_have_different_permutations() -> None:
    positions = np.arange(1000, dtype=np.uint64)
    orders = {permute(positions, 1000, seed, number).tobytes() for seed in range(3) for number in range(3)}
    assert len(orders) == 9


def test_the_permutation_is_well_mixed() -> None:
    """Neighbours in the data are not neighbours in the order, and every place is equally likely."""
    size = 1 << 14
    order = permute(np.arange(size, dtype=np.uint64), size, 5, 0)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.03
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001
    counts = np.bincount(order[: size // 4] // (size // 16), minlength=16)
    chi_squared = float(((counts - size / 64) ** 2 / (size / 64)).sum())
    assert chi_squared < 40


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 23])
def test_any_start_and_any_ranks_see_the_same_samples(ranks: int, start: int) -> None:
    order = Order(samples=70, batch_size=4, grad_accum=2, seed=3)
    found = [list(take(order, [Share(4, rank, ranks)], start, 24)) for rank in range(ranks)]
    merged = [list(itertools.chain(*(batch for _, batch in shares))) for shares in zip(*found, strict=True)]
    expected = [micro_batch.tolist() for step in range(start, 24) for micro_batch in order.step_indices(step)]
    assert merged == expected


@pytest.mark.parametrize("start", [0, 7])
def test_several_shares_see_in_each_step_what_as_many_ranks_see(start: int) -> None:
    order = Order(samples=70, batch_size=4, grad_accum=2, seed=3)
    shares = [Share(4, number, 4) for number in range(4)]
    alone = [take(order, [share], start, 24) for share in shares]
    expected = [next(each) for _ in range(start, 24) for each in alone for _ in range(order.grad_accum)]
    assert list(take(order, shares, start, 24)) == expected


def test_the_names_of_a_share_are_those_of_the_rank_that_trains_it() -> None:
    order = Order(samples=70, batch_size=4, grad_accum=2, seed=3)
    alone = Batches(range(70), list, order, [Share(4, 1, 4)], order.grad_accum, order.seed, workers=0)
    named = [name for name, _ in take(order, [Share(4, number, 4) for number in (2, 3)], 5, 6)]
    assert alone.read_names(5, (2, 3)) == named
    assert len(set(named)) == 2 * order.grad_accum


def take(order: Order, shares: list[Share], start: int, stop: int) -> Iterator[tuple[str, list[int]]]:
    """Return the samples of one rank from one step to another, for data that are their own indices."""
    batches = Batches(range(order.samples), list, order, shares, order.grad_accum, order.seed, workers=0)
    batches.begin(start, stop)
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return


def test_a_micro_batch_is_named_by_its_samples_in_their_order() -> None:
    order = Order(samples=70, batch_size=4, grad_accum=2, seed=3)
    for name, batch in take(order, [Share(4, 1, 2)], 0, 3):
        assert name.partition("-")[0] == digest_indices(np.array(batch)) != digest_indices(np.array(batch[::-1]))


def test_a_pass_sees_no_sample_twice() -> None:
    order = Order(samples=70, batch_size=4, grad_accum=2, seed=3)
    assert order.steps_per_pass == 8
    seen = np.concatenate([order.step_indices(step).flatten() for step in range(8)])
    assert len(set(seen.tolist())) == 64


@pytest.mark.parametrize(("batch_size", "grad_accum"), [(1, 1), (7, 3), (128, 1), (5000, 2)])
def test_each_step_has_its_place_in_the_pass(batch_size: int, grad_accum: int) -> None:
    order = Order(samples=30_001, batch_size=batch_size, grad_accum=grad_accum, seed=3)
    steps = order.steps_per_pass
    for number in (0, 1):
        used = np.arange(steps * batch_size * grad_accum, dtype=np.uint64)
        found = [order.step_indices(step) for step in range(number * steps, (number + 1) * steps)]
        expected = permute(used, order.samples, order.seed, number).reshape(steps, grad_accum, batch_size)
        assert np.array_equal(np.stack(found), expected)

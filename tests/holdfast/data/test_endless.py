"""A sampler without a length gives one endless pass, which a resume continues."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from holdfast.data import make_batches
from holdfast.data.samplers import EndlessPass, is_endless
from holdfast.data.sharing import Share
from holdfast.errors import RecipeError


class Endless(Sampler[int]):
    """Draws permutations from the global generator, or from a generator of its own."""

    def __init__(self, generator: torch.Generator | None = None, passes: float = float("inf")) -> None:
        self.generator, self._passes = generator, passes

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            if number >= self._passes:
                return
            yield from torch.randperm(6, generator=self.generator).tolist()


class Alone:
    """The ranks of a run with a single rank."""

    own_number = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]


def take(batches: Any, number: int) -> list[list[float]]:
    return [next(batches)[1].tolist() for _ in range(number)]


def make(sampler: Endless) -> Any:
    loader = DataLoader(torch.arange(6.0), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    assert is_endless(loader)
    return make_batches(loader, [Share(4, 0, 1)], 7, 0, Alone())  # type: ignore[arg-type]


@pytest.mark.parametrize("has_own", [True, False])
def test_an_endless_pass_continues_after_any_batch(has_own: bool) -> None:
    def build() -> Any:
        torch.manual_seed(3)
        return make(Endless(torch.Generator().manual_seed(1) if has_own else None))

    whole = build()
    wanted = take(whole, 9)
    for stop in (0, 1, 5):
        first = build()
        assert take(first, stop) == wanted[:stop]
        torch.rand(stop)  # a step's own random numbers
        saved, rng = first.state_dict(), torch.get_rng_state()
        resumed = build()
        torch.set_rng_state(rng)
        resumed.begin(stop, 9, saved)
        assert torch.equal(torch.get_rng_state(), rng)
        if stop:
            assert take(resumed, 9 - stop) == wanted[stop:]


def test_a_pass_that_ends_without_a_length_is_refused() -> None:
    batches = make(Endless(passes=1))
    assert len(take(batches, 2)) == 2
    with pytest.raises(RecipeError, match="the sampler has no length, but its batches have ended"):
        take(batches, 1)


def test_only_a_sampler_without_a_length_is_endless() -> None:
    assert not is_endless(DataLoader(torch.arange(6.0), batch_size=4))  # type: ignore[arg-type]
    assert len(EndlessPass(DataLoader(torch.arange(6.0)), dict, dict)) > 2**32  # type: ignore[arg-type]

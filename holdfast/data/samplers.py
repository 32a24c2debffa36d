"""The samplers of a torch ``DataLoader``, and the state on which the order of its batches depends."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from holdfast.errors import RecipeError
from holdfast.state import Attributes

# The length of a pass over a sampler without an end.
ENDLESS = 2**40
# If a pass has more samples, its order is drawn batch by batch, because a list of all indices would take gigabytes.
MOST_LISTED = 2**22


class LongPass:
    """The indices of the batches of a long pass, in the order of the loader's sampler: iterable, but only once.

    At the beginning of a pass, the sampler creates and seeds a generator, from which it draws the whole order. So it
    draws the same order after a resume.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        batches: Any = loader.batch_sampler if loader.batch_sampler is not None else ([each] for each in loader.sampler)
        self._length = len(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)  # type: ignore[arg-type]
        begun = iter(batches)
        # Take the first batch now, because the sampler draws its seed when it makes the first batch.
        self._batches = itertools.chain([next(begun)], begun)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        return map(list, self._batches)


class EndlessPass(LongPass):
    """The indices of the batches of a sampler that never ends.

    Each batch's indices are drawn with random states that belong to this pass, and not to training. So a second
    iteration yields the same indices, and it doesn't matter how many batches are drawn ahead.

    Args:
        capture: returns the states of the generators from which a sampler may draw.
        restore: sets these states.
    """

    def __init__(
        self, loader: "DataLoader[Any]", capture: Callable[[], dict[str, Any]], restore: Callable[[Any], object]
    ) -> None:
        self._source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self._is_batched = loader.batch_sampler is not None
        self._capture, self._restore, self._begun = capture, restore, capture()

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[list[Any]]:
        own, batches = self._begun, None
        while True:
            others = self._capture()
            self._restore(own)
            try:
                batches = iter(self._source) if batches is None else batches
                batch = next(batches, None)
                own = self._capture()
            finally:
                self._restore(others)
            if batch is None:
                raise RecipeError(
                    "the sampler has no length, but its batches have ended",
                    hint="give the sampler a __len__, or let the sampler draw without an end",
                )
            yield list(batch) if self._is_batched else [batch]


def is_endless(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader's sampler has no length."""
    try:
        len(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return True
    return False


def is_long(loader: "DataLoader[Any]") -> bool:
    """Return whether a pass over a loader is too long to list, and can be drawn batch by batch."""
    sampler = loader.sampler
    is_known = type(sampler) in (RandomSampler, SequentialSampler) and getattr(sampler, "generator", None) is None
    is_batched = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    return is_known and is_batched and len(sampler) > MOST_LISTED  # type: ignore[arg-type]


class Requests:
    """The batch sampler of a loader from `make_loader`: the requests (`Indices`) for the rest of a pass.

    If the loader's workers stay for the next pass, `set` replaces the requests.
    """

    def __init__(self) -> None:
        self._rest: Iterable[Any] = ()
        self._length = 0

    def set(self, rest: Iterable[Any], length: int) -> None:
        """Replace all requests.

        Args:
            length: the number of new requests.
        """
        self._rest, self._length = rest, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rest)

    def __len__(self) -> int:
        return self._length


def list_generators(loader: "DataLoader[Any]") -> list[torch.Generator]:
    """Return the generators of the loader and of its samplers.

    The generator of accelerate's ``SeedableRandomSampler`` isn't included, because the sampler seeds this generator for
    each pass from its own epoch number, which is saved.
    """
    from accelerate.data_loader import SeedableRandomSampler  # imported late; `shares_out` has the reason

    samplers = (each for each in list_samplers(loader) if not isinstance(each, SeedableRandomSampler))
    found = [getattr(each, "generator", None) for each in samplers]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def list_samplers(loader: Any) -> list[Any]:
    """Return a torch loader, its samplers, and the samplers inside them."""
    found: list[Any] = [loader]
    for each in found:
        inner = [getattr(each, name, None) for name in ("batch_sampler", "sampler")]
        found += [one for one in inner if one is not None and not any(one is known for known in found)]
    return found


def keep_attributes(sampler: Any) -> Attributes:
    """Return the state of a sampler's plain attributes, except the attributes that `LoaderBatches` saves itself."""
    from accelerate.data_loader import SeedableRandomSampler  # imported late; `shares_out` has the reason

    is_seeded = isinstance(sampler, SeedableRandomSampler)
    return Attributes(lambda: sampler, lambda name: name == "epoch" or (is_seeded and name == "generator"))


def shares_out(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader itself yields different batches in each rank, as a loader prepared by accelerate does."""
    # Imported late, because loader processes import this module, too, and would wait for accelerate's
    # import.
    from accelerate.data_loader import BatchSamplerShard

    return isinstance(loader.batch_sampler, BatchSamplerShard) or isinstance(loader.sampler, DistributedSampler)


def pack_indices(indices: list[list[Any]]) -> dict[str, Any]:
    """Return the indices of batches in a form to save: all indices in one flat sequence, and each batch's size.

    The flat sequence is an array if all indices are numbers, as usual, and a list otherwise.
    """
    flat = [each for batch in indices for each in batch]
    is_numbers = all(type(each) is int for each in flat)
    return {"flat": np.array(flat, np.int64) if is_numbers else flat, "sizes": np.array([*map(len, indices)], np.int64)}


def unpack_indices(packed: dict[str, Any]) -> list[list[Any]]:
    """Return the indices of batches from the result of `pack_indices`."""
    flat = iter(packed["flat"].tolist() if isinstance(packed["flat"], np.ndarray) else packed["flat"])
    return [list(itertools.islice(flat, size)) for size in packed["sizes"].tolist()]

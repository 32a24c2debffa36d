"""The loading of a rank's micro-batches from a recipe's data, each with a digest of its content.

The random numbers that the data or the collate function draws depend only on the seed and the micro-batch's number,
not on the process that draws them. They leave the training process's generators unchanged. So neither the number of
loader workers nor an interruption changes a sample.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, default_collate

from holdfast.data.content import digest_content
from holdfast.data.order import Order, digest_indices
from holdfast.data.repeating import Repeating
from holdfast.data.sharing import Share, seeded
from holdfast.data.stateful import restart_never
from holdfast.data.streams import has_exact_state
from holdfast.data.workers import make_loader, start_loading
from holdfast.errors import RecipeError, StateError

REPORT_EVERY_S = 5.0
# The key in the state of a stream that can't save its position: a digest of the samples that were read.
READ = "read"

Collate = Callable[[list[Any]], Any]
Watch = Callable[[int, int], None]


def is_stream(data: Any) -> bool:
    """Return whether the data is a stream: iterable, not map-style."""
    return isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")


class Batches:
    """The micro-batches of one rank, starting at any step.

    Args:
        order: the order of map-style data; None for a stream.
        shares: the parts of each micro-batch that this rank trains, one after the other. A rank has several shares only
            of map-style data. In a step, all micro-batches of the first share come first.
        workers: the number of loader processes.
    """

    def __init__(
        self, data: Any, collate: Collate | None, order: Order | None, shares: Sequence[Share], grad_accum: int,
        seed: int, workers: int,
    ) -> None:  # fmt: skip
        self._data, self._collate, self._order, self._shares = data, collate or default_collate, order, shares
        self._grad_accum, self._seed, self._workers = grad_accum, seed, workers
        self._loader: Any = None
        self._batches: Iterator[tuple[str, Any]] | None = None
        self._is_reread = order is None and not has_exact_state(data)
        # A digest of the samples read so far, for a stream that saves no position. A resume reads the stream again,
        # and compares the digests.
        self._read = ""
        restart_never(data)

    @property
    def has_state(self) -> bool:
        """Return whether the data is a stream that saves its position itself."""
        return self._order is None and not self._is_reread

    @property
    def has_common_position(self) -> bool:
        """Return whether all ranks have the same position in the data. Any number of ranks can then resume from it."""
        return not self._is_reread

    def begin(self, step: int, stop: int, saved: Any = None, watch: Watch = lambda done, total: None) -> bool:
        """Start loading after ``step`` completed steps. This draws no random number.

        Args:
            stop: the last step to load.
            saved: the result of `state_dict` after ``step`` steps; None if no state was saved.
            watch: called now and then with the number of micro-batches skipped so far, and the number to skip in all.

        Returns: True if a stream had to be read again from its beginning.

        Raises:
            StateError: a position was saved, but the data has no ``load_state_dict``.
            RecipeError: a stream that was read again returned different samples than the first time.
        """
        self._read = ""
        read = saved.get(READ) if isinstance(saved, dict) else None
        if read is not None:
            saved = None
        if saved is not None and not self.has_state:
            raise StateError(
                "the checkpoint contains a position in the data, but the recipe's data can't be set to it, because it "
                "has no load_state_dict",
                hint="give the recipe the data that it had when the checkpoint was written",
            )
        if self._order is not None:
            self._start(Samples(self._data, self._collate, self._seed), step, stop)
            return False
        (share,) = self._shares
        self._start(Repeating(self._data, self._collate, share, self._seed), step, stop, saved)
        if saved is not None or step == 0:
            return False
        self._skip(step * self._grad_accum, watch)
        if read not in (None, self._read):
            raise RecipeError(
                f"the data (a {type(self._data).__qualname__}) yields different samples when it is read a second time",
                hint="seed the stream's shuffles, or give the stream state_dict and load_state_dict",
            )
        return True

    def _start(self, data: Any, step: int, stop: int, saved: Any = None) -> None:
        sampler = None
        if self._order is not None:
            sampler = _StepSampler(self._order, self._shares, step, stop)
        self._loader = make_loader(data, sampler, self._workers, self._seed)
        if saved is not None:
            self._loader.load_state_dict(saved)
        self._batches = start_loading(self._loader)

    def _skip(self, number: int, watch: Watch) -> None:
        reported = time.monotonic()
        for done in range(number):
            next(self)
            if time.monotonic() - reported > REPORT_EVERY_S:
                watch(done, number)
                reported = time.monotonic()

    def __next__(self) -> tuple[str, Any]:
        """Return the next micro-batch's name (``indices-content``, or ``content`` for a stream) and the batch."""
        assert self._batches is not None
        name, batch = next(self._batches)
        if self._is_reread:
            self._read = hashlib.sha256(f"{self._read}{name}".encode()).hexdigest()
        return name, batch

    def first(self, ranks: int | None = None) -> Any:
        """Return the first share of the first micro-batch of map-style data.

        Args:
            ranks: the number of shares into which to cut the micro-batch; by default the present number. A number that
                doesn't divide the batch size is ignored, because the batch size may have changed since the save.
        """
        assert self._order is not None
        share = replace(self._shares[0], rank=0)
        if ranks and share.batch_size % ranks == 0:
            share = replace(share, ranks=ranks)
        indices = share.of(self._order.step_indices(0)[0]).tolist()
        return Samples(self._data, self._collate, self._seed).__getitems__(Indices(0, indices))[1]

    def read_names(self, step: int, shares: Iterable[int]) -> list[str]:
        """Return the names of some shares of a step's micro-batches of map-style data, which this loads.

        The names have the order in which `__next__` returns them to a rank that trains these shares.

        Args:
            step: the number of steps that are completed before this step.
            shares: the numbers of the shares.
        """
        assert self._order is not None
        parts = [replace(self._shares[0], rank=each) for each in shares]
        samples = Samples(self._data, self._collate, self._seed)
        return [samples.__getitems__(asked)[0] for asked in _StepSampler(self._order, parts, step, step + 1)]

    def list_indices(self, step: int) -> list[list[int]]:
        """Return the samples' indices of each micro-batch of map-style data that this rank trains in a step.

        Args:
            step: the number of steps that are completed before this step.
        """
        assert self._order is not None
        return [asked.indices for asked in _StepSampler(self._order, self._shares, step, step + 1)]

    def state_dict(self) -> Any:
        """Return the position in the data, as a state to save.

        For a stream with ``state_dict`` this is the stream's own state; for another stream, a digest of the samples
        that were read. For map-style data this is None, because the step determines the position.
        """
        if self._order is not None or self._loader is None:
            return None
        return self._loader.state_dict() if self.has_state else {READ: self._read}


@dataclass(frozen=True)
class Indices:
    """A request for a part of a micro-batch.

    Attributes:
        number: the micro-batch's number in the whole run.
        indices: the indices of the part's samples.
        share: the part's number.
    """

    number: int
    indices: list[int]
    share: int = 0


class _StepSampler:
    """A torch batch sampler over the micro-batches of the steps ``start <= step < stop``."""

    def __init__(self, order: Order, shares: Sequence[Share], start: int, stop: int) -> None:
        self._order, self._shares, self._start, self._stop = order, shares, start, stop

    def __iter__(self) -> Iterator[Indices]:
        for step in range(self._start, self._stop):
            for share in self._shares:
                for number, micro_batch in enumerate(self._order.step_indices(step), step * self._order.grad_accum):
                    yield Indices(number, share.of(micro_batch).tolist(), share.rank)

    def __len__(self) -> int:
        return (self._stop - self._start) * self._order.grad_accum * len(self._shares)


class Samples:
    """A map-style dataset that returns a whole, collated micro-batch with its name.

    Attributes:
        data: the dataset of single samples.
    """

    def __init__(self, data: Any, collate: Collate, seed: int) -> None:
        self.data, self._collate, self._seed = data, collate, seed

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, asked: Indices) -> tuple[str, Any]:
        with seeded(self._seed, asked.number, asked.share):
            fetch = getattr(self.data, "__getitems__", None)
            samples = fetch(asked.indices) if fetch else [self.data[index] for index in asked.indices]
            batch = self._collate(samples)
        return f"{digest_indices(np.array(asked.indices, dtype=np.int64))}-{digest_content(batch)}", batch

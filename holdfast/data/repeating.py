"""The micro-batches of a stream of samples, which is read from its beginning in each pass."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from holdfast.data.content import digest_content
from holdfast.data.sharing import Share, seeded
from holdfast.data.streams import begin_pass, read_position
from holdfast.errors import RecipeError


class Repeating(IterableDataset[tuple[str, Any]]):
    """An endless iterable dataset of micro-batches. It repeats the data, and drops an incomplete batch of each pass."""

    def __init__(self, data: Any, collate: Any, share: Share, seed: int) -> None:
        self._data, self._collate, self._share, self._seed = data, collate, share, seed
        self._pass = 0
        self._given = 0  # the number of micro-batches returned so far, over all passes
        self._is_resumed = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        worker = get_worker_info()
        place = worker.id if worker else 0
        while True:
            before = self._given
            # Every rank reads the same whole batches, and cuts out its own part later. While reading, all ranks draw
            # the same random numbers.
            with seeded(self._seed, self._given, 0, place):
                samples = self._begin_pass()
            while (batch := self._take(samples, place)) is not None:
                yield batch
            if self._given == before and not self._is_resumed:
                raise RecipeError(
                    f"the data has fewer samples than one micro-batch of {self._share.batch_size} samples",
                    hint="lower the batch size, or use data with more samples",
                )
            self._pass, self._is_resumed = self._pass + 1, False

    def _begin_pass(self) -> Iterator[Any]:
        if not self._is_resumed:
            begin_pass(self._data, self._pass)
        return iter(self._data)

    def _take(self, samples: Iterator[Any], place: int) -> tuple[str, Any] | None:
        with seeded(self._seed, self._given, 0, place):
            group = list(itertools.islice(samples, self._share.batch_size))
        if len(group) < self._share.batch_size:
            return None
        with seeded(self._seed, self._given, self._share.rank, place):
            batch = self._collate(self._share.of(group))
        self._given += 1
        return digest_content(batch), batch

    def state_dict(self) -> dict[str, Any]:
        inner = read_position(self._data) if hasattr(self._data, "state_dict") else None
        return {"pass": self._pass, "given": self._given, "data": inner}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._pass, self._given, self._is_resumed = saved["pass"], saved["given"], True
        begin_pass(self._data, self._pass)
        self._data.load_state_dict(saved["data"])

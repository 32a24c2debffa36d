"""The batches of an iterable that yields batches and has a ``state_dict``."""

from collections.abc import Iterator
from typing import Any

from holdfast.data.content import digest_content
from holdfast.data.loading import Watch
from holdfast.data.sharing import Gathering
from holdfast.data.stateful import restart_never
from holdfast.data.streams import begin_pass, read_position
from holdfast.errors import RecipeError


class IterableBatches:
    """The batches of an iterable with a ``state_dict``, such as torchdata's ``StatefulDataLoader`` of a stream.

    At the end of each pass a new iteration over the iterable begins; see `streams.begin_pass`.
    """

    has_state = True
    has_common_position = False  # each rank reads a different part of the data
    is_at_end = False  # not known before the next batch is read

    def __init__(self, batches: Any, ranks: Gathering) -> None:
        self._given, self._ranks = batches, ranks
        self._batches: Iterator[Any] | None = None
        self._pass = -1
        # whether the stream is divided over the ranks, so that they get different batches; None before the first batch
        self._is_divided: bool | None = None
        restart_never(batches)

    def begin(self, step: int, stop: int, saved: Any = None, watch: Watch | None = None) -> bool:
        """Begin after ``step`` steps; see `Batches.begin`."""
        if saved is not None:
            self._pass = saved["pass"]
            begin_pass(self._given, self._pass)
            self._given.load_state_dict(saved["iterable"])
            self._batches = iter(self._given)
        return False

    def move_to(self, step: int, per_epoch: int) -> str:
        """Read and drop ``step`` batches, one for each step. Return "", because the position is known exactly."""
        for _ in range(step):
            next(self)
        return ""

    def __next__(self) -> tuple[str, Any]:
        for _ in range(2):  # if the pass has no further batch, the second round begins a new pass
            if self._batches is None:
                self._pass += 1
                begin_pass(self._given, self._pass)
                self._batches = iter(self._given)
            for batch in self._batches:
                name = digest_content(batch)
                self._check_share(name)
                return name, batch
            self._batches = None
        raise RecipeError("the data has yielded no batch in a whole pass")

    def end_pass(self) -> None:
        """End the pass over the data early: the next batch is the first of a new pass."""
        self._batches = None

    def _check_share(self, name: str) -> None:
        """Raise RecipeError if all ranks get the same first batch, although each needs its own part of the data."""
        if self._is_divided is None:
            names = self._ranks.gather_samples(name)
            self._is_divided = len(names) == 1 or len(set(names)) > 1
        if not self._is_divided:
            raise RecipeError(
                "all ranks get the same batches from a stream that is not divided over the ranks",
                hint="let each rank read its own part of the stream: divide it by run.data_rank and run.data_ranks, "
                "or by torch.distributed.get_rank()",
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for `begin`."""
        return {"pass": self._pass, "iterable": read_position(self._given)}

    def describe(self) -> dict[str, int]:
        """Return what the fingerprint records of the data's size: nothing, because the size isn't known."""
        return {}

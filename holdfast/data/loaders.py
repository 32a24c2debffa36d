"""The batches of the data that a user's loop passes to `Run.steps`: a torch ``DataLoader``, an iterable, or no data."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.data.iterables import IterableBatches
from holdfast.data.loading import Indices, Samples, Watch
from holdfast.data.samplers import (
    EndlessPass,
    LongPass,
    Requests,
    is_endless,
    is_long,
    keep_attributes,
    list_generators,
    list_samplers,
    pack_indices,
    shares_out,
    unpack_indices,
)
from holdfast.data.sharing import Gathering, Share
from holdfast.data.streams import describe_flaw
from holdfast.data.workers import StayingWorkers, make_loader, start_loading
from holdfast.errors import RecipeError
from holdfast.state import capture_rng, digest_rng, has_methods, restore_rng


class NoBatches:
    """A source without batches, for a loop that makes its own batches."""

    has_state = False
    has_common_position = True

    def begin(self, step: int, stop: int, saved: Any = None, watch: Any = None) -> bool:
        """Do nothing; see `Batches.begin`."""
        return False

    def __next__(self) -> tuple[str, Any]:
        raise AssertionError("the loop makes its own batches")

    def state_dict(self) -> None:
        """Return None, because there is no position to save."""

    def describe(self) -> dict[str, int]:
        """Return an empty dict: the fingerprint records no size, because the data's size isn't known."""
        return {}


class LoaderBatches:
    """The batches of a map-style ``DataLoader`` in the order of the loader's own sampler, beginning at any step.

    At the beginning of each pass the sampler draws from its usual generators, so the order is the same as that of the
    loader without Holdfast. A checkpoint contains the states of these generators at the beginning of the pass, the
    samplers' attributes, and the position in the pass. On resume the sampler draws the same order again, and no batch
    has to be read and skipped. If the dataset's length has changed since the pass began, the checkpoint contains the
    order itself.

    All ranks draw the main rank's order, and share out each batch. A loader that accelerate has prepared for several
    ranks, or that has a ``DistributedSampler``, divides the data itself.

    Args:
        loader: the loader. Its settings for workers apply, except for the number of workers.
        shares: the parts of each batch that this rank trains, one after the other.
        workers: the number of workers in the configuration.
    """

    has_state = True

    def __init__(
        self, loader: "DataLoader[Any]", shares: Sequence[Share], seed: int, workers: int, ranks: Gathering
    ) -> None:
        self._loader, self._shares, self._seed, self._workers = loader, shares, seed, workers
        self._ranks = ranks
        self._is_main = ranks.own_number == 0
        self._is_shared = shares_out(loader)
        self.has_common_position = not self._is_shared
        self._pass, self._given = 0, 0  # the number of the pass, and how many of its batches were returned
        self._number = 0  # the number of batches that were returned in the whole run
        self._parts = 0  # the number of parts of the next batch that were returned already
        self._before: dict[str, Any] | None = None  # the generators' states at the beginning of the pass
        self._samples = 0  # the size of the dataset at the beginning of the pass
        self._indices: list[list[Any]] | LongPass = []
        self._batches: Iterator[tuple[str, Any]] | None = None
        self._requests = Requests()  # the requests for the rest of this pass
        self._staying = StayingWorkers(loader, workers)
        self._attributes = [keep_attributes(each) for each in list_samplers(loader)[1:]]

    def begin(self, step: int, stop: int, saved: Any = None, watch: Watch | None = None) -> bool:
        """Begin after ``step`` steps; see `Batches.begin`.

        Args:
            saved: the result of `state_dict` after ``step`` steps; None if no state was saved.
        """
        if saved is not None:
            self._pass, self._given, self._number = saved["pass"], saved["given"], saved["number"]
            self._before = saved["before"]
            self._batches, self._parts = None, 0
            self._samples = saved.get("samples", len(self._loader.dataset))  # type: ignore[arg-type]
            if self._before is not None:
                now = self._capture() | {"own": saved["own"], "epochs": saved["epochs"]}
                now |= {"samplers": saved["samplers"]} if "samplers" in saved else {}
                if "indices" in saved:
                    self._indices = unpack_indices(saved["indices"])
                else:
                    self._restore(self._before)
                    self._list_indices()
                self._restore(now)
        return False

    def move_to(self, step: int, per_epoch: int) -> str:
        """Move to the first batch after ``step`` steps that another program has trained.

        Args:
            per_epoch: the number of steps of an epoch. If an epoch can be one pass over the data, with equally many
                batches in all of its steps but the last, a step has taken this number of batches; otherwise one batch.

        Returns: a text that says which part of the position isn't known; empty if the position is exact. The order of
            the pass in progress is known only if the sampler uses no generator, or seeds a generator with the number of
            the pass.
        """
        length = len(self._loader)
        taken = -(-length // per_epoch)  # the number of batches of a step, if an epoch is a pass
        is_pass = -(-length // taken) == per_epoch
        self._pass, steps = divmod(step, per_epoch) if is_pass else divmod(step, length)
        self._given = min(steps * taken, length) if is_pass else steps
        self._number = self._pass * length + self._given
        for sampler in list_samplers(self._loader):
            if isinstance(getattr(sampler, "epoch", None), int):
                sampler.epoch = self._pass
        if not self._given:
            return ""
        before = self._capture()
        self._list_indices()
        order = None if isinstance(self._indices, LongPass) else [*self._indices]
        self._restore({**before, "own": self._capture_own()["own"]})
        torch.manual_seed(torch.initial_seed() + 1)
        self._list_indices()
        is_known = order is not None and order == self._indices
        self._restore(before)
        self._list_indices()
        self._before, self._samples = before, len(self._loader.dataset)  # type: ignore[arg-type]
        restore_rng(before["global"] | {"cuda": []})
        return (
            ""
            if is_known
            else f"the order of the samples in pass {self._pass + 1}, which step {step} belongs to, is drawn again"
        )

    def __next__(self) -> tuple[str, Any]:
        if self._before is None or self.is_at_end:
            self._begin_pass()
        if self._batches is None:
            self._batches = self._start_loading()
        named = next(self._batches)
        self._parts = (self._parts + 1) % len(self._shares)
        if not self._parts:
            self._given, self._number = self._given + 1, self._number + 1
        return named

    @property
    def is_at_end(self) -> bool:
        """Return whether the last batch ended a pass."""
        return self._given == len(self._indices)

    def end_pass(self) -> None:
        """End the pass over the data early: the next batch is the first of a new pass."""
        self._given, self._batches = len(self._indices), None

    def _begin_pass(self) -> None:
        is_next, now = self._before is not None, self._capture()
        self._before, self._samples = self._ranks.gather(now)[0], len(self._loader.dataset)  # type: ignore[arg-type]
        if not self._is_main:
            self._restore(self._before)
        self._list_indices()
        # If a rank's generators had different states than the main rank's before the draw, restore the rank's own
        # states. Otherwise keep the states after the draw, as the main rank does.
        own, main = (each["global"] | {"cuda": []} for each in (now, self._before))
        if not self._is_main and digest_rng(own) != digest_rng(main):
            restore_rng(own)
        self._pass, self._given, self._batches = self._pass + is_next, 0, None
        if not self._indices:
            raise RecipeError(
                "the loader yields no batch", hint="use more data, a smaller batch_size, or drop_last=False"
            )

    def _list_indices(self) -> None:
        """Draw the order of a pass from the sampler. First draw one random number, as a loader's own iterator does."""
        loader = self._loader
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if is_endless(loader):
            self._indices = EndlessPass(loader, self._capture_drawn, self._restore_drawn)
        elif is_long(loader):
            self._indices = LongPass(loader)
        elif loader.batch_sampler is not None:
            self._indices = [list(each) for each in loader.batch_sampler]
        else:
            self._indices = [[each] for each in loader.sampler]

    def _start_loading(self) -> Iterator[tuple[str, Any]]:
        """Begin to load the rest of this pass. Return an iterator over the batches' names and the batches."""
        numbered = itertools.islice(enumerate(self._indices, self._number - self._given), self._given, None)
        requests = (
            Indices(number, list(indices) if self._is_shared else share.of(indices), share.rank)
            for number, indices in numbered
            for share in self._shares
        )
        length = (len(self._indices) - self._given) * len(self._shares)
        self._requests.set(requests if isinstance(self._indices, LongPass) else list(requests), length)
        return start_loading(self._staying.find(self._make_loader))

    def _make_loader(self) -> Any:
        collate = self._loader.collate_fn
        if self._loader.batch_sampler is None:
            collate = functools.partial(_collate_single, collate)
        samples = Samples(self._loader.dataset, collate, self._seed)
        return make_loader(samples, self._requests, self._workers, self._seed, like=self._loader)

    def _capture(self) -> dict[str, Any]:
        """Return the states on which the order of batches depends: of the global generators, and of `_capture_own`."""
        return {"global": {name: each for name, each in capture_rng().items() if name != "cuda"}, **self._capture_own()}

    def _capture_own(self) -> dict[str, Any]:
        """Return the states of the loader and its samplers: generators, epoch numbers, and attributes."""
        own = [each.get_state() for each in list_generators(self._loader)]
        epochs = [getattr(each, "epoch", None) for each in list_samplers(self._loader)]
        # Copy the attributes, because the states must stay as they were at the pass's beginning, and a loop may change
        # a sampler's weights.
        attributes = [copy.deepcopy(each.state_dict()) for each in self._attributes]
        return {"own": own, "epochs": epochs} | ({"samplers": attributes} if any(attributes) else {})

    def _capture_drawn(self) -> dict[str, Any]:
        own = [each.get_state() for each in list_generators(self._loader)]
        return {"global": capture_rng() | {"cuda": []}, "own": own}

    def _restore_drawn(self, states: dict[str, Any]) -> None:
        restore_rng(states["global"])
        for generator, state in zip(list_generators(self._loader), states["own"], strict=True):
            generator.set_state(state)

    def _restore(self, states: dict[str, Any]) -> None:
        restore_rng(states["global"] | {"cuda": []})
        for generator, state in zip(list_generators(self._loader), states["own"], strict=True):
            generator.set_state(state)
        for sampler, epoch in zip(list_samplers(self._loader), states["epochs"], strict=True):
            if epoch is not None:
                sampler.epoch = epoch
        attributes = states.get("samplers", [{}] * len(self._attributes))
        for sampler, state in zip(self._attributes, attributes, strict=True):
            sampler.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, for `begin`."""
        position = {"pass": self._pass, "given": self._given, "number": self._number, "before": self._before}
        if self._before is not None and len(self._loader.dataset) != self._samples:  # type: ignore[arg-type]
            if isinstance(self._indices, LongPass):
                raise RecipeError(
                    f"the dataset's length has changed in a pass of {len(self._indices)} batches, whose order is too "
                    "long for a checkpoint",
                    hint="keep the dataset's length, or let the sampler draw fewer samples in a pass",
                )
            position |= {"samples": self._samples, "indices": pack_indices(self._indices)}
        return position | self._capture_own()

    @property
    def unused_workers(self) -> int:
        """Return the loader's ``num_workers`` if this process itself loads the data; 0 if workers load the data."""
        return 0 if self._workers else self._loader.num_workers

    def describe(self) -> dict[str, int]:
        """Return the number of samples, which the fingerprint records."""
        return {"samples": len(self._loader.dataset)}  # type: ignore[arg-type]


def list_saved(source: Any) -> list[Any]:
    """Return the objects inside a source of batches whose state a checkpoint contains.

    Args:
        source: the result of `take_apart`; None if a loop makes its own batches. The state of an iterable includes that
            of all objects inside it. Of a torch loader only the generators are saved.
    """
    if source is None:
        return []
    return [*list_generators(source)] if is_torch_loader(source) else [source]


def is_torch_loader(source: Any) -> bool:
    """Return whether a source of batches is a loader over a map-style dataset that has no ``state_dict``."""
    return isinstance(source, DataLoader) and not has_methods(source)


def _collate_single(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Collate the batch of a loader without a batch size: a single sample."""
    return collate(samples[0])


def list_batch_sizes(source: Any) -> list[int]:
    """Return the different sizes of a source's batches; empty if unknown, or if they depend on the number of ranks.

    Args:
        source: the result of `take_apart`. Sizes are known only for a loader over map-style data with a batch size.
    """
    if not is_torch_loader(source) or shares_out(source) or not source.batch_size or is_endless(source):
        return []
    rest = 0 if source.drop_last else len(source.sampler) % source.batch_size
    return [source.batch_size, *([rest] if rest else [])]


def make_batches(source: Any, shares: Sequence[Share], seed: int, workers: int, ranks: Gathering) -> Any:
    """Return the object from which a rank gets the batches of a source.

    Args:
        source: the result of `take_apart`; None if the loop makes its own batches.
        shares: the parts of each batch that this rank trains.
        workers: the number of loader processes.
    """
    if source is None:
        return NoBatches()
    if not is_torch_loader(source):
        return IterableBatches(source, ranks)
    return LoaderBatches(source, shares, seed, workers, ranks)


def take_apart(loader: Any, instead: str) -> "DataLoader[Any] | Any":
    """Return the loader that accelerate has wrapped in ``loader``; if it hasn't, return ``loader`` itself.

    Args:
        instead: the code that the hint of an error suggests, such as ``run.batches(dataset, batch_size=...)``. It makes
            batches with which a run can resume exactly.

    Raises:
        RecipeError: the loader's position can't be restored.
    """
    inner = getattr(loader, "base_dataloader", loader)
    if isinstance(inner, DataLoader) and not isinstance(inner.dataset, IterableDataset) and not has_methods(inner):
        return inner
    hint = f"use {instead}, which makes the batches"
    if not has_methods(inner):
        what = "DataLoader over a stream" if isinstance(inner, DataLoader) else type(inner).__qualname__
        raise RecipeError(
            f"a resume can't restore the position of a {what}",
            hint=f"{hint}; or use a DataLoader over a map-style dataset, or an iterable with state_dict and "
            "load_state_dict, such as torchdata's StatefulDataLoader",
        )
    if flaw := describe_flaw(inner):
        raise RecipeError(
            f"a resume can't restore the exact position of a {type(inner).__qualname__}: {flaw}",
            hint=f"{hint} and resumes exactly, with compute.loader_workers processes",
        )
    return inner

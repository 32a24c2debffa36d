"""The batches of a loop's own data: of a torch ``DataLoader``, of an iterable with state, or none."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.data.content import digest_content
from holdfast.data.loading import Indices, Samples, Share, Watch, make_loader
from holdfast.errors import RecipeError
from holdfast.state import capture_rng, restore_rng


class NoBatches:
    """The batches of a loop that makes its own."""

    has_state = False

    def begin(self, step: int, stop: int, saved: Any = None, watch: Any = None) -> bool:
        """Do nothing; see `Batches.begin`."""
        return False

    def __next__(self) -> tuple[str, Any]:
        raise AssertionError("the loop makes its own batches")

    def state_dict(self) -> None:
        """Return None: there is no position."""

    def describe(self) -> dict[str, int]:
        """Return the fingerprint's part about the data's size: nothing is known."""
        return {}


class LoaderBatches:
    """The batches of a map-style ``DataLoader``, in the order of its own sampler, from any step.

    At the beginning of each pass the sampler draws from the generators that it always draws from, so that the order is
    that of the loader alone. A checkpoint has these generators' states from then, and the position in the pass: on
    resume the sampler draws the same order again, and nothing is read to be skipped. All ranks draw the main rank's
    order, and share out each batch; a loader that accelerate has prepared for several ranks, or one with a
    ``DistributedSampler``, shares them out itself.

    Args:
        loader: the loader. Its workers are replaced by those of the configuration.
        from_main: returns the value that the main rank passes; all ranks call it together.
    """

    has_state = True

    def __init__(
        self, loader: "DataLoader[Any]", share: Share, seed: int, workers: int, from_main: Callable[[Any], Any]
    ) -> None:
        self._loader, self._share, self._seed, self._workers = loader, share, seed, workers
        self._from_main = from_main
        from accelerate.data_loader import BatchSamplerShard  # not above: loader processes import this module, too

        is_sharded = isinstance(loader.batch_sampler, BatchSamplerShard)
        self._is_shared = is_sharded or isinstance(loader.sampler, DistributedSampler)
        self._pass, self._given = 0, 0  # batches of this pass
        self._number = 0  # batches of the whole run
        self._before: dict[str, Any] | None = None
        self._indices: list[list[Any]] = []
        self._batches: Iterator[tuple[str, Any]] | None = None

    def begin(self, step: int, stop: int, saved: Any = None, watch: Watch | None = None) -> bool:
        """Begin after ``step`` steps; see `Batches.begin`.

        Args:
            saved: the result of `state_dict` then.
        """
        if saved is not None:
            self._pass, self._given, self._number = saved["pass"], saved["given"], saved["number"]
            self._before = saved["before"]
            if self._before is not None:
                now = self._capture() | {"own": saved["own"], "epochs": saved["epochs"]}
                self._restore(self._before)
                self._list_indices()
                self._restore(now)
        return False

    def __next__(self) -> tuple[str, Any]:
        if self._before is None or self.is_at_end:
            self._begin_pass()
        if self._batches is None:
            self._batches = iter(self._make_loader())
        named = next(self._batches)
        self._given, self._number = self._given + 1, self._number + 1
        return named

    @property
    def is_at_end(self) -> bool:
        """Return whether the last batch ended a pass."""
        return self._given == len(self._indices)

    def _begin_pass(self) -> None:
        is_next, now = self._before is not None, self._capture()
        self._before = self._from_main(now)
        if self._share.rank:
            self._restore(self._before)
        self._list_indices()
        if self._share.rank:  # its random numbers are its own
            restore_rng(now["global"] | {"cuda": []})
        self._pass, self._given, self._batches = self._pass + is_next, 0, None
        if not self._indices:
            raise RecipeError("the loader gives no batch", hint="more data, a smaller batch_size, or drop_last=False")

    def _list_indices(self) -> None:
        """Let the sampler draw the order of a pass, after the number that a loader's iterator draws first."""
        loader = self._loader
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        if loader.batch_sampler is not None:
            self._indices = [list(each) for each in loader.batch_sampler]
        else:
            self._indices = [[each] for each in loader.sampler]

    def _make_loader(self) -> Any:
        numbered = itertools.islice(enumerate(self._indices, self._number - self._given), self._given, None)
        share = list if self._is_shared else self._share.of
        requests = [Indices(number, share(indices)) for number, indices in numbered]
        collate = self._loader.collate_fn
        if self._loader.batch_sampler is None:
            collate = functools.partial(_collate_single, collate)
        samples = Samples(self._loader.dataset, collate, self._seed, self._share.rank)
        return make_loader(samples, requests, self._workers, self._seed)

    def _capture(self) -> dict[str, Any]:
        """Return what the order depends on: the states of global generators, and `_capture_own`."""
        return {"global": {name: each for name, each in capture_rng().items() if name != "cuda"}, **self._capture_own()}

    def _capture_own(self) -> dict[str, Any]:
        """Return the states of the samplers' own generators, and the epochs that samplers were told."""
        own = [each.get_state() for each in self.list_generators()]
        return {"own": own, "epochs": [getattr(each, "epoch", None) for each in self._list_samplers()]}

    def _restore(self, states: dict[str, Any]) -> None:
        restore_rng(states["global"] | {"cuda": []})
        for generator, state in zip(self.list_generators(), states["own"], strict=True):
            generator.set_state(state)
        for sampler, epoch in zip(self._list_samplers(), states["epochs"], strict=True):
            if epoch is not None:
                sampler.epoch = epoch

    def list_generators(self) -> list[torch.Generator]:
        """Return the generators of the loader and of its samplers.

        accelerate's ``SeedableRandomSampler`` makes its generator when it is first used, and seeds it for each pass
        from its epoch, which is saved.
        """
        from accelerate.data_loader import SeedableRandomSampler  # not above: see `__init__`

        samplers = (each for each in self._list_samplers() if not isinstance(each, SeedableRandomSampler))
        found = [getattr(each, "generator", None) for each in samplers]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _list_samplers(self) -> list[Any]:
        """Return the loader, its samplers, and the samplers inside them."""
        found: list[Any] = [self._loader]
        for each in found:
            inner = [getattr(each, name, None) for name in ("batch_sampler", "sampler")]
            found += [one for one in inner if one is not None and one not in found]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for `begin`."""
        position = {"pass": self._pass, "given": self._given, "number": self._number, "before": self._before}
        return position | self._capture_own()

    def describe(self) -> dict[str, int]:
        """Return the fingerprint's part about the data's size."""
        return {"samples": len(self._loader.dataset)}  # type: ignore[arg-type]


def _collate_single(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Collate the batch of a loader without a batch size, which is one sample."""
    return collate(samples[0])


class IterableBatches:
    """The batches that an iterable with a ``state_dict`` gives, such as torchdata's ``StatefulDataLoader`` of a stream.

    It is iterated again at the end of each pass.
    """

    has_state = True
    is_at_end = False  # unknown

    def __init__(self, batches: Any) -> None:
        self._given = batches
        self._batches: Iterator[Any] | None = None
        if hasattr(batches, "restart_on_stop_iteration"):
            # torchdata's Loader restarts at a pass's end; after a resume exactly there, its state then never changes.
            batches.restart_on_stop_iteration = False

    def begin(self, step: int, stop: int, saved: Any = None, watch: Watch | None = None) -> bool:
        """Begin after ``step`` steps; see `Batches.begin`."""
        if saved is not None:
            self._given.load_state_dict(saved["iterable"])
            self._batches = iter(self._given)
        return False

    def __next__(self) -> tuple[str, Any]:
        for _ in range(2):  # the second time after the end of a pass
            if self._batches is None:
                self._batches = iter(self._given)
            for batch in self._batches:
                return digest_content(batch), batch
            self._batches = None
        raise RecipeError("a pass over the batches gives none")

    def state_dict(self) -> dict[str, Any]:
        """Return the position, for `begin`."""
        return {"iterable": self._given.state_dict()}

    def describe(self) -> dict[str, int]:
        """Return the fingerprint's part about the data's size: nothing is known."""
        return {}


def take_apart(loader: Any) -> "DataLoader[Any] | Any":
    """Return the ``DataLoader`` inside a loader that accelerate has prepared, or the loader itself.

    Raises:
        RecipeError: its position can't be restored.
    """
    inner = getattr(loader, "base_dataloader", loader)
    if isinstance(inner, DataLoader):
        is_stream = isinstance(inner.dataset, IterableDataset)
        if not is_stream or isinstance(inner, StatefulDataLoader):
            return inner
        raise RecipeError(
            "a DataLoader over a stream can't be put back to a position",
            hint="run.batches(dataset, batch_size=...) makes its batches, or use torchdata's StatefulDataLoader",
        )
    if callable(getattr(inner, "state_dict", None)) and callable(getattr(inner, "load_state_dict", None)):
        return inner
    raise RecipeError(
        f"a {type(inner).__qualname__} can't be put back to a position in its batches",
        hint="give a DataLoader, or an iterable with state_dict and load_state_dict",
    )

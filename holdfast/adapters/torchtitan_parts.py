"""The parts of a torchtitan Trainer that a run keeps or replaces: its data, its logs, its own state, fused weights.

This module uses private attributes of torchtitan 0.3's datasets; tests/project/test_private_names.py lists all of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import BaseLogger
from torchtitan.hf_datasets.interleaved import InterleavedDataset
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from holdfast.data.streams import describe_flaw
from holdfast.errors import RecipeError
from holdfast.state import has_methods
from holdfast.training.own_loop.loop import OwnLoop
from holdfast.training.own_loop.run import Run

# The numbers of torchtitan's logs that a run records, each with its name in the run. All other numbers in the logs are
# times, speeds and sizes.
RECORDED = {
    "loss_metrics/global_avg_loss": "loss",
    "grad_norm": "grad_norm",
    "validation_metrics/loss": "validation_loss",
}
# The degrees of parallelism: the name in torchtitan's config, and the name in its `ParallelDims`.
DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "tensor_parallel_degree": "tp",
}

# The attributes in which a text dataset buffers the tokens of documents that it has read and not yet returned.
BUFFERS = ("_inputs_buffer", "_labels_buffer", "_positions_buffer")


class HeldBatches:
    """The loader over which the Trainer iterates. Its batches come from the run, and stay on the CPU."""

    def __init__(self, loader: Any, loop: OwnLoop) -> None:
        self._loader, self._loop = loader, loop

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._loop.next_batch(is_moved=False)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class LoaderPosition:
    """A torchtitan loader as the run uses it: an iterable of batches with a position that can be saved and restored.

    torchtitan's loader inherits torchdata's loader. Its ``state_dict`` contains a pickle of torchdata's ``state_dict``,
    under the number of the data-parallel rank. This class uses torchdata's ``state_dict`` itself, without the pickle.

    Raises:
        RecipeError: a stream in the loader can't restore its exact position.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self.dataset = loader, getattr(loader, "dataset", None)
        is_pickled = type(loader).state_dict is ParallelAwareDataloader.state_dict
        self._state: Any = super(ParallelAwareDataloader, loader) if is_pickled else loader
        for each in self.dataset._datasets if isinstance(self.dataset, InterleavedDataset) else [self.dataset]:
            for stream in filter(has_methods, vars(each).values()) if hasattr(each, "__dict__") else ():
                if flaw := describe_flaw(stream):
                    raise RecipeError(f"the dataloader, a {type(each).__name__}, can't be resumed exactly: {flaw}")
            if isinstance(each, HuggingFaceTextDataset):
                _drain(each)

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader
        raise RecipeError(
            "the data has ended before training.steps steps were trained",
            hint="set dataloader.infinite = True, or lower training.steps",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._state.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position."""
        self._state.load_state_dict(state)


def _drain(dataset: Any) -> None:
    """Make a text dataset yield the samples whose tokens are in its buffer before it reads the next document.

    After a resume, torchtitan's own dataset would read the next document first. The samples would be the same, but the
    dataset's state would differ from the state in a run that was never killed.

    Between a load and the next read, the ``state_dict`` of a Hugging Face stream doesn't return the loaded state. In
    that time this dataset returns the loaded state.
    """
    own = type(dataset)

    class Drained(own):  # type: ignore[misc,valid-type]
        unread: Any = None  # the state that the stream has loaded; None once the stream is read

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.unread = state.get("data")

        def state_dict(self) -> dict[str, Any]:
            state: dict[str, Any] = super().state_dict()
            return state if self.unread is None else state | {"data": self.unread}

        def __iter__(self) -> Iterator[Any]:
            size = self.seq_len
            while len(self._inputs_buffer) >= size:
                inputs, labels, positions = (getattr(self, name)[:size] for name in BUFFERS)
                for name in BUFFERS:
                    setattr(self, name, getattr(self, name)[size:])
                positions = torch.LongTensor(self._normalize_positions(positions))
                yield {"input": torch.LongTensor(inputs), "positions": positions}, torch.LongTensor(labels)
            self.unread = None
            yield from super().__iter__()

    Drained.__module__, Drained.__qualname__, Drained.__name__ = own.__module__, own.__qualname__, own.__name__
    dataset.__class__ = Drained


class Recorder(BaseLogger):
    """Records the numbers of torchtitan's logs with the step of the run, and passes them on to torchtitan's logger."""

    def __init__(self, logger: BaseLogger, run: Run) -> None:
        self._logger, self._run = logger, run

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Record the numbers of a log, and pass them on."""
        self._logger.log(metrics, step)
        self._run.log(**{own: metrics[name] for name, own in RECORDED.items() if name in metrics})

    def close(self) -> None:
        """Close the logger."""
        self._logger.close()


class TrainState:
    """A Trainer's own state, and the degrees of parallelism, which must not change when a run resumes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"own": self._trainer.state_dict(), "degrees": self._degrees}

    @property
    def _degrees(self) -> dict[str, int]:
        return {name: getattr(self._trainer.parallel_dims, short) for name, short in DEGREES.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state.

        Raises:
            RecipeError: a degree of parallelism has changed, so each rank would read a different part of the data.
        """
        for name, degree in self._degrees.items():
            trained = state["degrees"][name]
            if degree != trained:
                raise RecipeError(
                    f"parallelism.{name} = {degree}, but the run was trained with {trained}: each data-parallel rank "
                    "has its own position in the data",
                    hint=f"set parallelism.{name} = {trained}, and compute.ranks as before",
                )
        self._trainer.load_state_dict(state["own"])


@contextlib.contextmanager
def merged(model: torch.nn.Module) -> Iterator[None]:
    """Remove the hooks that split fused weights in the model's ``state_dict``; restore the hooks after the block.

    Without this, torchtitan's ``state_dict`` contains a fused weight (``wqkv``) as separate weights (``wq``, ``wk``,
    ``wv``), each gathered on all ranks. But an optimizer's moments belong to the fused weight.
    """
    found: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for module in model.modules():
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            found.append((hooks, {**hooks}))
            for key, each in found[-1][1].items():
                if str(getattr(getattr(each, "hook", each), "__module__", "")).startswith("torchtitan."):
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, before in found:
            hooks.clear()
            hooks.update(before)

"""The `Recipe`: the model, data, optimizer and loss to train."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from holdfast.errors import RecipeError
from holdfast.recipe.probe import Limits
from holdfast.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from holdfast.recipe.anneal import Anneal

USUAL_BATCH_SIZE = 32


class Stateful(Protocol):
    """An object with state that the next step depends on, for example an average of weights or a normaliser."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(kw_only=True)
class Recipe:
    """Everything that a run trains with.

    Args:
        model: the module to train, which ``loss`` calls. The module is in ``train()`` mode for steps and in ``eval()``
            mode for ``evaluate``.
        data: map-style (``len(data)`` samples, ``data[index]``), or iterable. Random numbers drawn in it and in
            ``collate`` are seeded for each micro-batch. On resume, iterable data with ``state_dict`` and
            ``load_state_dict`` continues where it was; other iterable data is read again from its beginning, and has to
            yield the same samples. Each loader worker reads iterable data on its own, so the data has to divide itself
            among the workers with ``torch.utils.data.get_worker_info``. With ``batch_size=None`` the data yields
            batches; see ``batch_size``.
        optimizer: an optimizer over the model's parameters, with the base learning rates; or several optimizers, by
            name. With a ``loss``, all of them step along the gradient of this loss.
        loss: a function from ``(model, batch)`` to a scalar tensor, the mean over the collated batch.
        step: in place of ``loss``, a function that takes a batch and makes the whole step: it computes gradients and
            steps the optimizers. The function returns the loss, or a dict of numbers to record. ``model`` is in
            ``train()`` mode. Gradients are averaged over several ranks when an optimizer steps, and autocast is on if
            the configuration has ``mixed_precision``. Accumulated gradients that no optimizer's step has used yet are
            saved.
        batch_size: samples of a micro-batch over all ranks together. None in two cases: ``data`` is an iterable of
            batches with ``state_dict`` and ``load_state_dict``, and yields different batches on each rank; or ``data``
            is a torch ``DataLoader``, whose batches keep its own order and are divided among the ranks.
        grad_accum: micro-batches whose gradients make one step.
        steps_per_epoch: the length of an epoch, by default one pass over ``data``. Required for data without a length.
        clip_norm: the largest norm of the gradient; None for no clipping.
        schedule: a `Schedule`, or torch schedulers over ``optimizer``, stepped after every step. A
            ``ReduceLROnPlateau`` is stepped at the end of every epoch instead, with the epoch's mean loss. For several
            optimizers, a dict of these by the optimizers' names.
        evaluate: a function from the model, in ``eval()`` mode, to a few numbers by name; called at the end of every
            epoch. Changes that the function makes to the model's buffers and attributes, and to random generators, are
            undone; changes of ``extras`` stay. The function may also return texts (``str``) and pictures (``bytes`` of
            a PNG or an SVG), at most 1 MiB each. Texts and pictures are shown to people, and aren't part of the state.
        measured: names of metrics of ``evaluate`` that differ each time, such as times and memory. These metrics are
            logged and shown, but are not part of the state. Names that end in ``_s`` (``samples_per_s``) needn't be
            listed.
        after_step: a function called after every step, when the weights have changed, for example to update an average.
        extras: further objects with state, by name, saved and restored with the rest. Modules are moved to the device.
            Every rank has its own state of each extra.
        synchronized: names of the extras (modules) that all ranks train together. The modules' gradients are averaged
            over the ranks when an optimizer of the recipe or of the extras steps, and their buffers are those of the
            main rank.
        anneals: values that are functions of the step, by name; ``loss`` reads their ``value``.
        probe: a function from the model, in ``eval()`` mode, to tensors and numbers by name, which show whether a
            resumed model equals the saved model. Changes that the function makes to the model's buffers and attributes
            are undone. The default is the loss and the model's output on the first micro-batch; for iterable data only
            if this micro-batch has at most 256 KiB.
        health: a `Limits` for each number of the probe to check, by name, and for ``loss_window``, the mean loss of
            the last 20 steps. A run doesn't continue from a checkpoint that breaks a limit.
        collate: a function from a list of samples to a batch, by default torch's.
        data_sha256: content hash of the data, part of the fingerprint.
        content: further content hashes by name that are part of the fingerprint, for example of a tokenizer or a
            vocabulary.
        sources: further parts of the recipe's code: modules, and files or folders (a header, a JSON file) by path
            relative to the recipe's module. Modules that the recipe imports needn't be listed.
        parallelize: a function from ``(model, mesh)`` that shards the whole model in place, for ``compute.parallel =
            "fsdp"`` on several ranks, for example with torch's ``parallelize_module`` over ``mesh["tensor"]`` and
            ``fully_shard`` over ``mesh["replicate", "shard"]``. ``mesh`` is a ``DeviceMesh`` of the shape
            ``compute.mesh``. The default shards each block of the model.
        sample_size: how many of the units that ``unit`` names (such as tokens) a sample has. Holdfast shows the speed
            in these units.
        flops_per_sample: floating-point operations of a sample's forward and backward pass, for the model FLOPs
            utilization (MFU) of ``log.metrics``; a transformer of P parameters has about 6 P for each token.

    Raises:
        RecipeError: a number is out of range, or arguments exclude each other.
    """

    # Functions get the model as Any, so that a type checker accepts a function that names the model's own class.
    model: "Module"
    data: "Dataset[Any] | Iterable[Any]"
    optimizer: "Optimizer | Mapping[str, Optimizer]"
    loss: "Callable[[Any, Any], Tensor] | None" = None
    step: "Callable[[Any], Tensor | Mapping[str, float | Tensor]] | None" = None
    batch_size: int | None = USUAL_BATCH_SIZE
    grad_accum: int = 1
    steps_per_epoch: int | None = None
    clip_norm: float | None = None
    schedule: "Schedule | LRScheduler | Sequence[LRScheduler] | Mapping[str, Any] | None" = None
    evaluate: "Callable[[Any], Mapping[str, float | Tensor | str | bytes]] | None" = None
    measured: Sequence[str] = ()
    after_step: Callable[[], object] | None = None
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    synchronized: Sequence[str] = ()
    anneals: Mapping[str, "Anneal"] = field(default_factory=dict)
    probe: "Callable[[Any], Mapping[str, float | Tensor]] | None" = None
    health: Mapping[str, Limits] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    data_sha256: str = ""
    content: Mapping[str, str] = field(default_factory=dict)
    sources: "Sequence[str | PathLike[str]]" = ()
    parallelize: Callable[[Any, Any], object] | None = None
    sample_size: int = 1
    unit: str = "samples"
    flops_per_sample: float | None = None
    # True in the subclass for a user's own loop: the loop makes the steps, and the recipe contains the objects that the
    # loop registers.
    has_own_loop: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "grad_accum", "steps_per_epoch", "sample_size"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise RecipeError(f"the recipe's {name} = {value!r}: expected an int above 0")
        if self.flops_per_sample is not None and not 0 < self.flops_per_sample < math.inf:
            raise RecipeError(f"the recipe's flops_per_sample = {self.flops_per_sample!r}: expected a number above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RecipeError(
                f"the recipe's clip_norm = {self.clip_norm!r}: expected a number above 0", hint="inf means no limit"
            )

        for name, extra in self.extras.items():
            if not (hasattr(extra, "state_dict") and hasattr(extra, "load_state_dict")):
                raise RecipeError(
                    f"the recipe's extras[{name!r}] is of {type(extra).__name__}, without state_dict and "
                    "load_state_dict, so no checkpoint can contain its state",
                    hint="give the object both methods, or put the value into a module; for a tensor, register_buffer",
                )
        self._check_step()
        self._check_batches()

    def _check_step(self) -> None:
        if self.has_own_loop:
            return
        if (self.loss is None) == (self.step is None):
            raise RecipeError(
                f"the recipe has {'neither loss nor step' if self.loss is None else 'a loss and a step'}",
                hint="give exactly one: with loss=... Holdfast steps the optimizer; step=... is a function that does "
                "the whole step",
            )
        for name, usual in (("grad_accum", 1), ("clip_norm", None)) if self.step is not None else ():
            if (value := getattr(self, name)) != usual:
                raise RecipeError(
                    f"the recipe's {name} = {value!r} has no effect, because your step function does the whole "
                    "optimizer step",
                    hint=f"leave {name} out, and let that function do its work",
                )

    def _check_batches(self) -> None:
        gives_batches = hasattr(self.data, "dataset") and hasattr(self.data, "batch_sampler")
        if gives_batches and self.batch_size not in (None, USUAL_BATCH_SIZE):
            raise RecipeError(
                f"the data is a {type(self.data).__name__}, which yields batches already: batch_size has no effect",
                hint="leave batch_size out, or give data=dataset with batch_size and collate",
            )
        if gives_batches:
            self.batch_size = None
        if self.batch_size is None and self.collate is not None:
            raise RecipeError(
                "Recipe(collate=...) has no effect, because the data yields whole batches", hint="leave collate out"
            )

    def is_measured(self, metric: str) -> bool:
        """Return whether a metric differs at each evaluation, so that it is not part of the state."""
        return metric.endswith("_s") or metric in self.measured

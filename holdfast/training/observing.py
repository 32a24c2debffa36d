"""The observation of one step while it is trained: its samples, its updates and its activations.

The step itself gets the same bits as without the observation. But then `StepObserver.finish` sets the parameters back
to their values from before the step, to compute the samples' losses. So this process can't train on, and must end.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import find_batch_size, slice_tensors
from torch import Tensor, nn

from holdfast.checkpoint.observed import Activation, SampleLoss, Update
from holdfast.data import digest_content
from holdfast.state import gather_whole, is_sharded, local_of
from holdfast.training.build import Training
from holdfast.training.naming import name_parameters
from holdfast.training.optimizers import list_stepped
from holdfast.training.probing import take_loss

# A layer's output has left its range if its largest absolute value exceeds this multiple of the largest absolute value
# in the step before.
RANGE_FACTOR = 2.0


@dataclass
class Observation:
    """The observations of all ranks.

    Attributes:
        activations: the layers whose outputs left their range, in the order in which they were computed.
        notes: for each thing that was not observed, the reason.
    """

    samples: list[SampleLoss] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    activations: list[Activation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class StepObserver:
    """The observer of a step in this rank.

    Args:
        step: the number of the step, from 1.
        most: the largest number of samples whose gradient norm is computed, and of updates that are returned of each
            step. These are the samples with the largest losses, and the largest updates.
    """

    def __init__(self, training: Training, step: int, most: int) -> None:
        self._training, self._step, self._most = training, step, most
        self._now = 0  # the step that is being trained
        self._batches: list[tuple[int, Any]] = []
        self._before: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._updates: list[Update] = []
        self._usual: dict[str, Tensor] = {}
        self._found: dict[str, Tensor] = {}
        self._notes: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the losses and layers of the steps that the block trains. Each step has to run inside `trained`."""
        recipe = self._training.recipe
        loss = recipe.loss

        def watch_loss(model: nn.Module, batch: Any) -> Tensor:
            if self._is_near:
                self._batches.append((self._now, copy.deepcopy(batch)))
            assert loss is not None
            return loss(model, batch)

        with contextlib.ExitStack() as stack:
            if loss is not None:
                recipe.loss = watch_loss
                stack.callback(setattr, recipe, "loss", loss)
            if is_compiled(recipe.model):
                self._notes.append("no activations: the model is compiled, so its layers can't be watched")
            else:
                for name, module in recipe.model.named_modules():
                    if not any(True for _ in module.children()):
                        stack.callback(module.register_forward_hook(self._make_hook(name)).remove)
            yield

    @property
    def _is_near(self) -> bool:
        """Return whether the step being trained is the observed step or the step before the observed step."""
        return self._step - self._now in (0, 1)

    @contextlib.contextmanager
    def trained(self, step: int) -> Iterator[None]:
        """Record how a step, which the block trains, changes the parameters."""
        self._now = step
        if self._is_near:
            model: nn.Module = self._training.recipe.model
            self._before = {name: each.detach().clone() for name, each in self._parameters()}
            self._buffers = [(each, each.detach().clone()) for each in model.buffers()]
        yield
        if self._is_near:
            found = [Update(step=step, name=name, size=self._measure(name, each)) for name, each in self._parameters()]
            self._updates += sorted(found, key=lambda each: -each.size)[: self._most]

    def finish(self) -> Observation:
        """Compute the losses of the samples, and return the observations of all ranks. All ranks call it together.

        Afterwards the model has the weights from before the observed step, and is in evaluation mode.
        """
        samples = self._compute_losses()
        own = Observation(samples, self._updates, self._list_activations(), self._notes)
        every = self._training.ranks.gather(own)
        samples = [each for found in every for each in found.samples]
        return Observation(
            samples=[*{(each.step, each.index, each.content): each for each in samples}.values()],
            updates=own.updates,
            activations=[each for found in every for each in found.activations],
            notes=[*dict.fromkeys(note for found in every for note in found.notes)],
        )

    # ---- updates

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [*zip(name_parameters(self._training), list_stepped(self._training.optimizer), strict=True)]

    def _measure(self, name: str, now: nn.Parameter) -> float:
        before = self._before[name]
        change, norm = (_take_norm(each) for each in (now.detach() - before, before))
        return change / norm if norm else (math.inf if change else 0.0)

    # ---- activations

    def _make_hook(self, layer: str) -> Any:
        def note(module: nn.Module, given: Any, output: Any) -> None:
            for tensor in _list_numbers(output):
                largest = tensor.abs().amax().float()
                largest = torch.where(largest.isnan(), math.inf, largest)
                known = self._found if self._now == self._step else self._usual
                known[layer] = torch.maximum(known[layer], largest) if layer in known else largest

        return note

    def _list_activations(self) -> list[Activation]:
        rank, usual = self._training.ranks.own_number, self._usual
        seen = [(name, float(each), float(usual[name])) for name, each in self._found.items() if name in usual]
        return [
            Activation(layer=name, rank=rank, largest=now, before=before)
            for name, now, before in seen
            if now > RANGE_FACTOR * before or not math.isfinite(now)
        ]

    # ---- samples

    def _compute_losses(self) -> list[SampleLoss]:
        """Return the loss of each sample of the observed step and of the step before.

        The losses are computed with the parameters from before the observed step.
        """
        found: list[tuple[SampleLoss, Any]] = []
        with torch.no_grad():
            for name, parameter in self._parameters():
                parameter.copy_(self._before[name])
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._training.recipe.model.eval()
        places: dict[int, int] = {}
        indices = {step: self._list_indices(step) for step in dict(self._batches)}
        for step, batch in self._batches:
            for sample in self._cut(batch):
                place = places[step] = places.get(step, -1) + 1
                try:
                    loss = self._take_loss(sample, has_gradient=False)[0]
                except Exception as error:  # a recipe's loss may fail on a single sample
                    self._notes.append(f"samples: the loss of a single sample fails: {type(error).__name__}: {error}")
                    return []
                index = indices[step][place] if indices[step] else place
                content, rank = digest_content(sample), self._training.ranks.own_number
                found.append((SampleLoss(step=step, rank=rank, index=index, content=content, loss=loss), sample))
        if not self._batches:
            self._notes.append("no losses of single samples: the program has no loss function that takes a batch")
        return self._add_norms(found)

    def _add_norms(self, found: list[tuple[SampleLoss, Any]]) -> list[SampleLoss]:
        """Add the gradient norm to the samples with the largest losses in the observed step. Return all samples.

        No norm is added if the model's parameters are sharded.
        """
        if any(is_sharded(parameter) for _, parameter in self._parameters()):
            self._notes.append("no gradient norms of single samples: the parameters are sharded")
            return [each for each, _ in found]
        largest = [place for place, (each, _) in enumerate(found) if each.step == self._step]
        largest.sort(key=lambda place: -_order(found[place][0].loss))
        chosen = {*largest[: self._most]}
        return [
            each.model_copy(update={"grad_norm": self._take_loss(sample, has_gradient=True)[1]})
            if place in chosen
            else each
            for place, (each, sample) in enumerate(found)
        ]

    def _cut(self, batch: Any) -> Iterator[Any]:
        size = find_batch_size(batch)
        if size is None:
            self._notes.append("no losses of single samples: the batch has no tensors that can be cut into samples")
            return
        for place in range(size):
            yield slice_tensors(batch, slice(place, place + 1))

    def _list_indices(self, step: int) -> list[int]:
        """Return the indices of this rank's samples of a step in map-style data; an empty list for a stream."""
        if self._training.order is None:
            return []
        return [index for part in self._training.batches.list_indices(step - 1) for index in part]

    def _take_loss(self, sample: Any, *, has_gradient: bool) -> tuple[float, float | None]:
        training, norm = self._training, None
        with training.generators.borrowed(training.config.seed), torch.set_grad_enabled(has_gradient):
            loss = take_loss(training, training.recipe.model, sample)
            if has_gradient:
                trained = [each for _, each in self._parameters() if each.requires_grad]
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                norm = float(nn.utils.get_total_norm([each.float() for each in gradients if each is not None]))
        return float(gather_whole(loss.detach())), norm


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has compiled the model or a layer of it."""
    # Compare the class's name, because an import of torch._dynamo would take a second.
    return any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None for each in model.modules()
    )


def _order(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _take_norm(tensor: Tensor) -> float:
    return float(gather_whole(torch.linalg.vector_norm(tensor.float())))


def _list_numbers(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating-point numbers in a layer's output that are on this rank and not empty."""
    if isinstance(output, Tensor):
        own = local_of(output) if is_sharded(output) else output.detach()
        if own.is_floating_point() and own.numel():
            yield own
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _list_numbers(each)
    elif isinstance(output, dict):
        yield from _list_numbers([*output.values()])

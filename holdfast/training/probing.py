"""The measurement of the probe: the numbers by which a resume compares a restored model with the saved model."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast import state
from holdfast.checkpoint import digest_payload
from holdfast.config import did_you_mean
from holdfast.errors import RecipeError
from holdfast.machine.compiling import find_autotuners
from holdfast.provenance.canonical import finite_or_none
from holdfast.recipe.probe import Probe
from holdfast.state import clone_on_host, gather_whole, is_on_device, is_sharded
from holdfast.state.checksum import checksum_together
from holdfast.training.build import Training
from holdfast.training.capturing import await_device, copy_extras
from holdfast.training.naming import name_parameters
from holdfast.training.optimizers import list_stepped
from holdfast.training.undisturbed import ModelSnapshot, undisturbed

SAMPLE_NUMBERS = 32

# The cause if two gradients of the same micro-batch differ.
NOISE = (
    "an operation in the loss or its backward pass isn't deterministic, for example a kernel with atomic additions, or "
    'the code changes its own state at each call; use another operation, or --set determinism.mode="fast"'
)

Outputs = Callable[[nn.Module], Mapping[str, Any]]


def measure_probe(training: Training, saved_by: int | None = None) -> Probe:
    """Measure and return the probe, and set ``training.probes.touched``. The state of the training stays unchanged.

    If a GPU has too little memory, free the memory that torch holds for later, and try once more. Several ranks don't
    try again, because the others may wait for a rank that has failed.

    Args:
        saved_by: the number of data ranks that saved the checkpoint; None if it is the present number. If the numbers
            differ, the probe gets the micro-batch that the main rank had at the save. Then no gradient is computed,
            because its bits couldn't be equal.

    Raises:
        RecipeError: the probe changes a parameter, or ``health`` has limits for a number that the probe doesn't return.
    """
    try:
        return _measure(training, saved_by)
    except torch.OutOfMemoryError:
        if training.ranks.has_others:
            raise
    # outside of the `except`, because the error's traceback refers to the first attempt's tensors
    torch.cuda.empty_cache()
    return _measure(training, saved_by)


def check_first_step(training: Training) -> None:
    """On a GPU, measure the probe right after the run's first step. All ranks call it together.

    A probe may need more memory than a step. Here the error costs a minute of training; at the first save it would cost
    a chunk. The gradient is measured twice: see `has_noise`.
    """
    if training.accelerator.device.type == "cpu":
        return
    measure_probe(training)
    if training.config.determinism.mode != "strict":
        return
    if kernels := find_autotuners():
        training.record.warnings.append(
            f"{', '.join(kernels)}: Triton times several configurations of these kernels in each process, and "
            "another one may give different bits; leave one configuration in @triton.autotune for bits that repeat"
        )
    if any(training.ranks.gather(has_noise(training))):
        training.record.warnings.append(
            f"after step 1, two gradients of the same micro-batch, computed from the same state, differ: {NOISE}"
        )


def has_noise(training: Training) -> bool:
    """Return whether two gradients of the same micro-batch differ, though both are computed from the same state.

    Kernels with atomic additions in any order compute such gradients, for example in some packages for attention.
    """
    can_probe = training.recipe.loss is not None and training.has_probe_batch
    if not can_probe or not training.config.resume.training_probe:
        return False
    training.set_anneals()
    return _take_gradient(training, training.probe_batch()) != _take_gradient(training, training.probe_batch())


def _measure(training: Training, saved_by: int | None) -> Probe:
    await_device(training)
    training.set_anneals()
    training.probes.touched = {}
    takes_gradient = training.config.resume.training_probe and saved_by is None
    can_probe = training.recipe.loss is not None and training.has_probe_batch
    needs_batch = can_probe and (takes_gradient or training.recipe.probe is None)
    batch = training.probe_batch(saved_by) if needs_batch else None
    outputs = training.recipe.probe or _default_probe(training, batch)
    losses = training.progress.recent_losses
    values = {"loss_window": math.fsum(losses) / len(losses)} if losses else {}
    found = {} if outputs is None else _take_outputs(training, outputs)
    numbers = {name: float(value) for name, value in found.items() if _is_number(value)}
    if unknown := sorted(training.recipe.health.keys() - numbers.keys() - {"loss_window"}):
        raise RecipeError(
            f"Recipe(health=...) has limits for {unknown[0]!r}, but the probe returns no value of this name",
            hint=did_you_mean(unknown[0], numbers),
        )
    # Read the outputs before the gradient's pass, which may write to their memory: torch.compile's "reduce-overhead".
    sha256, sample = digest_payload(state.to_payload(found)) if found else "", _sample(found)
    return Probe(
        sha256=sha256,
        gradient=_take_gradient(training, batch) if takes_gradient else "",
        values={name: finite_or_none(value) for name, value in (values | numbers).items()},
        sample=sample,
    )


def _take_outputs(training: Training, outputs: Outputs) -> dict[str, Any]:
    """Call a probe with the model in evaluation mode and return its outputs. Restore the model afterwards.

    First call the probe without gradients. If the probe computes gradients itself, call it again with gradients.
    """
    model: nn.Module = training.recipe.model
    with _undisturbed(training, model, may_swap=training.recipe.probe is not None) as kept:
        training.ranks.share_buffers(model)
        try:
            with training.generators.borrowed(training.config.seed), torch.no_grad():
                return {name: gather_whole(value) for name, value in outputs(model).items()}
        except RuntimeError as error:
            if "require grad" not in str(error):
                raise
        kept.put_back()
        training.ranks.share_buffers(model)
        with training.generators.borrowed(training.config.seed), torch.enable_grad():
            found = outputs(model.eval())
            found = {name: gather_whole(value) for name, value in found.items()}
            return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}


@contextlib.contextmanager
def _undisturbed(training: Training, model: nn.Module, *, may_swap: bool = False) -> Iterator[ModelSnapshot]:
    with undisturbed(model, training.optimizer, may_swap=may_swap) as kept:
        yield kept
    training.probes.touched |= kept.touched


def _default_probe(training: Training, batch: Any) -> Outputs | None:
    """Return a probe that computes the loss and the outputs of a micro-batch; None if ``batch`` is None."""
    if batch is None:
        return None

    def outputs(model: nn.Module) -> dict[str, Any]:
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, given, output: seen.append(_to_host(output)))
        try:
            with _kept_extras(training):
                loss = take_loss(training, model, batch)
        finally:
            hook.remove()
        return {"loss": loss, **{f"output.{number}": tensor for number, tensor in enumerate(_tensors(seen))}}

    return outputs


def take_loss(training: Training, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss on a copy of the batch, because a loss function may change its batch."""
    with training.accelerator.autocast():
        return training.recipe.loss(model, copy.deepcopy(batch))  # type: ignore[misc]  # the caller has checked it


@contextlib.contextmanager
def _kept_extras(training: Training) -> Iterator[None]:
    """Restore the state of all extras after the block: a loss may change an extra, such as a normaliser."""
    put_back = copy_extras(training)
    try:
        yield
    finally:
        put_back()


def _take_gradient(training: Training, batch: Any) -> str:
    """Return a checksum of the first micro-batch's loss and gradient in training mode; empty without a batch.

    Unlike the outputs, the gradient depends on state that only training mode reads, such as dropout rates and batch
    statistics.
    """
    if batch is None:
        return ""
    model: nn.Module = training.recipe.model
    named = zip(name_parameters(training), list_stepped(training.optimizer), strict=True)
    # Sorted by name, because the order in which an optimizer gets its parameters may differ between processes.
    parameters = [each for _, each in sorted(named, key=lambda pair: pair[0]) if each.requires_grad]
    with _undisturbed(training, model) as kept, _kept_extras(training), torch.enable_grad():
        training.ranks.share_buffers(model)
        gradient: Sequence[Tensor | None] | None = None
        try:
            if not any(map(is_sharded, parameters)):  # autograd.grad gives no gradient of a shard; only backward() does
                with training.generators.borrowed(training.config.seed):
                    loss = take_loss(training, model.train(), batch)
                    gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            # activation checkpointing with use_reentrant=True supports only backward(): undo the failed autograd.grad
            kept.put_back()
            training.ranks.share_buffers(model)
        if gradient is None:
            with training.generators.borrowed(training.config.seed):
                loss = take_loss(training, model.train(), batch)
                loss.backward()  # type: ignore[no-untyped-call]
                gradient = tuple(each.grad for each in parameters)
        # An embedding's gradient may be sparse.
        dense = [each if is_sharded(each) else each.to_dense() for each in gradient if each is not None]
        return f"{checksum_together([loss, *dense]):016x}"


def _to_host(output: Any) -> Any:
    """Return a model's output with its tensors copied from a device, where the next pass may write to their memory."""
    found = _tensors(output)
    return [clone_on_host(each) for each in found] if any(map(is_on_device, found)) else output


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for key in sorted(value, key=str) for tensor in _tensors(value[key])]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _sample(found: Mapping[str, Any]) -> list[float | None]:
    flat = [tensor.detach().flatten().float().cpu() for tensor in _tensors(found) if tensor.numel()]
    if not flat:
        return []
    numbers = torch.cat(flat)
    places = torch.linspace(0, len(numbers) - 1, min(SAMPLE_NUMBERS, len(numbers))).long()
    return [finite_or_none(value) for value in numbers[places].tolist()]

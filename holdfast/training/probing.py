"""The probe, measured on the model that is in this process."""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from holdfast import state
from holdfast.checkpoint import serialize
from holdfast.config import did_you_mean
from holdfast.errors import RecipeError
from holdfast.probe import Probe

if TYPE_CHECKING:
    from holdfast.training.build import Training

SAMPLE_NUMBERS = 32

Outputs = Callable[[nn.Module], Mapping[str, Any]]


def measure(training: "Training") -> Probe:
    """What the probe gives now. Nothing that the next step depends on has changed."""
    training.set_anneals()
    outputs = training.recipe.probe or _default_probe(training)
    losses = training.progress.recent_losses
    values = {"loss_window": math.fsum(losses) / len(losses)} if losses else {}
    found: dict[str, Any] = {}
    if outputs is not None:
        with training.generators.borrowed(training.config.seed), _undisturbed(training) as model:
            found = dict(outputs(model))
    numbers = {name: float(value) for name, value in found.items() if _is_number(value)}
    if unknown := sorted(training.recipe.health.keys() - numbers.keys() - {"loss_window"}):
        raise RecipeError(
            f"health has limits for {unknown[0]!r}, which the probe doesn't give",
            hint=did_you_mean(unknown[0], numbers),
        )
    return Probe(sha256=_digest(found) if found else "", values=_finite(values | numbers), sample=_sample(found))


class _undisturbed:  # noqa: N801, a context manager
    """The model in evaluation; afterwards all is as it was."""

    def __init__(self, training: "Training") -> None:
        self._training = training
        self._model: nn.Module = training.accelerator.unwrap_model(training.model)
        self._no_grad = torch.no_grad()

    def __enter__(self) -> nn.Module:
        self._modes = [(module, module.training) for module in self._model.modules()]
        self._no_grad.__enter__()
        return self._model.eval()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        for module, mode in self._modes:
            module.training = mode


def _default_probe(training: "Training") -> Outputs | None:
    """The loss on the first micro-batch of map-style data, and what the model gave for it."""
    if training.order is None:
        return None

    def outputs(model: nn.Module) -> dict[str, Any]:
        # A loss may change what the recipe has registered: an average, a counter, a normaliser.
        extras = {name: copy.deepcopy(extra.state_dict()) for name, extra in training.recipe.extras.items()}
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, given, output: seen.append(output))
        try:
            with training.accelerator.autocast():
                loss = training.recipe.loss(model, training.probe_batch())
        finally:
            hook.remove()
            for name, extra in training.recipe.extras.items():
                extra.load_state_dict(extras[name])
        return {"loss": loss, **{f"output.{number}": tensor for number, tensor in enumerate(_tensors(seen))}}

    return outputs


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


def _digest(found: Mapping[str, Any]) -> str:
    sha256 = hashlib.sha256()
    for piece in serialize(state.to_payload(dict(found))):
        sha256.update(piece)
    return sha256.hexdigest()


def _sample(found: Mapping[str, Any]) -> list[float | None]:
    flat = [tensor.detach().flatten().float().cpu() for tensor in _tensors(found) if tensor.numel()]
    if not flat:
        return []
    numbers = torch.cat(flat)
    places = torch.linspace(0, len(numbers) - 1, min(SAMPLE_NUMBERS, len(numbers))).long()
    return [value if math.isfinite(value) else None for value in numbers[places].tolist()]


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}

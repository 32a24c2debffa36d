"""The beginning of a new run with the weights of another run's checkpoint."""

from pathlib import Path
from typing import Any

from holdfast.checkpoint import Metadata, Payload
from holdfast.config import InitFrom, did_you_mean
from holdfast.errors import ConfigError
from holdfast.provenance.model_files import find_model_files
from holdfast.state import is_sharded
from holdfast.training import capturing
from holdfast.training.build import Training
from holdfast.training.elastic import take_extras
from holdfast.training.moving.files import load_weights
from holdfast.training.moving.weights import add_tied, match_weights
from holdfast.training.naming import has_names, name_parameters
from holdfast.training.optimizers import lay_out_state


def begin_from(training: Training, payload: Payload, metadata: Metadata, init: InitFrom) -> None:
    """Load a checkpoint's weights into a model at step 0, and the other components of its state that ``init`` names.

    Learning rates and all other hyperparameters stay as the recipe built them, even if the optimizer's moments are
    loaded.

    Raises:
        ConfigError: a weight, or a name in ``init``, is missing from the checkpoint or from the recipe, or a weight has
            a different shape.
        StateError: an extra's saved state doesn't fit the recipe's extra.
    """
    saved = capturing.decode(payload)
    model = training.recipe.model
    model.load_state_dict(_weights(model.state_dict(), saved["model"], init.reset))
    if init.load_optimizer:
        training.optimizer.load_state_dict(_moments(training, saved["optimizer"], init.reset))
        lay_out_state(training.recipe.optimizer, are_saved=False)
    extras = take_extras(training, saved, init.extras) if init.extras else {}
    for name in init.extras:
        if name not in extras or name not in training.recipe.extras:
            known = extras.keys() & training.recipe.extras.keys()
            raise ConfigError(
                f"init_from.extras: the extra {name!r} is missing in the checkpoint or in the recipe",
                hint=did_you_mean(name, known),
            )
        capturing.load(f"extra {name}", training.recipe.extras[name], extras[name])
    continued = metadata.optimizer_steps_total + metadata.anneal_offset
    training.progress.anneal_offset = continued if init.anneal_offset is None else init.anneal_offset


def begin_from_folder(training: Training, folder: Path, init: InitFrom) -> None:
    """Load the weights of a Hugging Face folder into a model at step 0.

    Raises:
        ConfigError: the weights can't be read or don't fit the model, or ``init`` asks for the optimizer or extras,
            which a folder doesn't have.
    """
    for name in ("load_optimizer", "extras"):
        if getattr(init, name):
            raise ConfigError(f"init_from.{name}: the folder {folder} contains only weights", hint=f"leave {name} out")
    file, model = find_model_files(folder), training.recipe.model
    if file is None:
        raise ConfigError(
            f"init_from: the folder {folder} contains no weights any more: its files were moved or deleted"
        )
    if any(map(is_sharded, model.parameters())):
        raise ConfigError(
            f'init_from: compute.parallel = "fsdp" shards the model, and the weights in {folder} are not sharded',
            hint='import them into a run with compute.parallel = "ddp", and set init_from.run to that run',
        )
    own, saved = model.state_dict(), load_weights(file)
    model.load_state_dict(
        _weights(own, add_tied(own, saved), init.reset) if init.reset else match_weights(own, {"": saved}, {}).weights
    )
    training.progress.anneal_offset = init.anneal_offset or 0


def _weights(own: dict[str, Any], saved: dict[str, Any], reset: tuple[str, ...]) -> dict[str, Any]:
    """Return the saved weights; for the modules and weights that ``reset`` names, the model's own weights."""
    for prefix in reset:
        if not any(_is_below(name, prefix) for name in own.keys() | saved.keys()):
            names = {name.rpartition(".")[0] for name in own}
            raise ConfigError(
                f"init_from.reset: the model has no module or weight {prefix!r}", hint=did_you_mean(prefix, names)
            )
    kept_own = {name for name in own if any(_is_below(name, prefix) for prefix in reset)}
    taken = {name: value for name, value in saved.items() if not any(_is_below(name, prefix) for prefix in reset)}
    for name in sorted(taken.keys() ^ (own.keys() - kept_own)):
        lacks = "the checkpoint" if name in own else "the recipe's model"
        raise ConfigError(
            f"init_from: {lacks} has no weight {name}",
            hint=(f'init_from.reset = ["{name}"] keeps the model\'s own first values'),
        )
    for name, value in taken.items():
        if own[name].shape != value.shape:
            raise ConfigError(
                f"init_from: the weight {name} has the shape {tuple(value.shape)} in the checkpoint, and "
                f"{tuple(own[name].shape)} in the model",
                hint=f'init_from.reset = ["{name}"] keeps the model\'s own first values',
            )
    return {**own, **taken}


def _moments(training: Training, saved: dict[str, Any], reset: tuple[str, ...]) -> dict[str, Any]:
    """Return a state for the optimizer: the saved moments, with the hyperparameters that the recipe built.

    Parameters that ``reset`` names, or whose modules it names, get no saved moments.
    """
    own = training.optimizer.state_dict()
    own_sizes, saved_sizes = ([len(group["params"]) for group in each["param_groups"]] for each in (own, saved))
    if own_sizes != saved_sizes:
        raise ConfigError(
            f"init_from.load_optimizer: the optimizer's groups have {own_sizes} tensors, but the saved optimizer's "
            f"groups have {saved_sizes}",
            hint="init_from.load_optimizer = false begins with a fresh optimizer",
        )
    if [group.keys() for group in own["param_groups"]] != [group.keys() for group in saved["param_groups"]]:
        raise ConfigError(
            "init_from.load_optimizer: the recipe's optimizer is of a different class than the saved optimizer",
            hint="init_from.load_optimizer = false begins with a fresh optimizer",
        )
    names = name_parameters(training)
    moments = saved["state"]
    if not has_names(saved):  # earlier versions saved the parameters' numbers
        moments = {names[number]: value for number, value in moments.items()}
    moments = {name: value for name, value in moments.items() if not any(_is_below(name, each) for each in reset)}
    if unknown := sorted(moments.keys() - set(names)):
        raise ConfigError(
            f"init_from.load_optimizer: the recipe's optimizer lacks the parameter {unknown[0]}, which the saved "
            "optimizer trained",
            hint=f'init_from.reset = ["{unknown[0]}"] leaves this parameter out; init_from.load_optimizer = false '
            "begins with a fresh optimizer",
        )
    return {**own, "state": {number: moments[name] for number, name in enumerate(names) if name in moments}}


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")

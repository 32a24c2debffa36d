"""The `Recipe`, which says what to train, and the search for a run's function, by ``module:attribute``.

Only a function is called that is annotated to return a `Recipe`, or to take a `Run`, so that a configuration can't call
other code, such as ``os:system``.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ConfigDict, ValidationError, create_model

from holdfast.anneal import Anneal
from holdfast.config import did_you_mean
from holdfast.errors import HoldfastError, RecipeError
from holdfast.location import describe_error
from holdfast.permission import check_recipe
from holdfast.probe import Limits
from holdfast.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset


class Stateful(Protocol):
    """An object with state that the next step depends on, such as an average of weights or a normaliser."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


@dataclass(kw_only=True)
class Recipe:
    """Everything that a run trains with.

    Args:
        model: the module to train, which ``loss`` calls. It is in ``train()`` mode for steps and in ``eval()`` mode for
            ``evaluate``.
        data: map-style (``len(data)`` samples, ``data[index]``), or iterable. Random numbers drawn in it and in
            ``collate`` are seeded for each micro-batch. On resume, iterable data with ``state_dict`` and
            ``load_state_dict`` continues where it was; other iterable data is read again from its beginning, and has to
            yield the same samples. Each loader worker reads iterable data on its own: the data has to divide itself
            among them by ``torch.utils.data.get_worker_info``.
        optimizer: an optimizer over the model's parameters, with the base learning rates.
        loss: a function from ``(model, batch)`` to a scalar tensor, the mean over the collated batch.
        batch_size: samples of a micro-batch over all ranks together.
        grad_accum: micro-batches whose gradients make one step.
        steps_per_epoch: the length of an epoch, by default one pass over ``data``. Required for iterable data.
        clip_norm: the largest norm of the gradient; None for no clipping.
        schedule: a `Schedule`, or torch schedulers over ``optimizer``, stepped after every step. A
            ``ReduceLROnPlateau`` is stepped at the end of every epoch instead, with the epoch's mean loss.
        evaluate: a function from the model, in ``eval()`` mode, to a few numbers by name; called at the end of every
            epoch. Its changes of the model's buffers and attributes, and of random generators, are undone; its changes
            of ``extras`` stay.
        measured: names of metrics of ``evaluate`` that differ each time, such as times and memory. They are logged and
            shown, but are not part of the state. Names that end in ``_s`` (``samples_per_s``) needn't be listed.
        after_step: a function called after every step, when the weights have changed, for example to update an average.
        extras: further objects with state, by name, saved and restored with the rest.
        anneals: values that are functions of the step, by name; ``loss`` reads their ``value``.
        probe: a function from the model, in ``eval()`` mode, to tensors and numbers by name, which show whether a
            resumed model is the saved one. Its changes of the model's buffers and attributes are undone. The default is
            the loss and the model's output on the first micro-batch (of a stream only if it is at most 256 KiB).
        health: limits for the probe's numbers and for the built-in ``loss_window``; see `holdfast.probe`.
        collate: a function from a list of samples to a batch, by default torch's.
        data_sha256: content hash of the data, part of the fingerprint.
        content: further content hashes by name that are part of the fingerprint: a tokenizer's, a vocabulary's.
        sources: further parts of the recipe's code: modules, and files or folders (a header, a JSON file) by path
            relative to the recipe's module. Modules that the recipe imports count without being listed.
        sample_size: how many ``unit``\\ s a sample has, for the speed that is shown.

    Raises:
        RecipeError: a number is out of range.
    """

    model: "Module"
    data: "Dataset[Any]"
    optimizer: "Optimizer"
    loss: "Callable[[Module, Any], Tensor]"
    batch_size: int = 32
    grad_accum: int = 1
    steps_per_epoch: int | None = None
    clip_norm: float | None = None
    schedule: "Schedule | LRScheduler | Sequence[LRScheduler] | None" = None
    evaluate: "Callable[[Module], Mapping[str, float | Tensor]] | None" = None
    measured: Sequence[str] = ()
    after_step: Callable[[], object] | None = None
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    anneals: Mapping[str, Anneal] = field(default_factory=dict)
    probe: "Callable[[Module], Mapping[str, float | Tensor]] | None" = None
    health: Mapping[str, Limits] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    data_sha256: str = ""
    content: Mapping[str, str] = field(default_factory=dict)
    sources: "Sequence[str | PathLike[str]]" = ()
    sample_size: int = 1
    unit: str = "samples"

    def __post_init__(self) -> None:
        for name in ("batch_size", "grad_accum", "steps_per_epoch", "sample_size"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise RecipeError(f"the recipe's {name} = {value!r}: expected an int above 0")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RecipeError(
                f"the recipe's clip_norm = {self.clip_norm!r}: expected a number above 0", hint="inf means no limit"
            )

    def is_measured(self, metric: str) -> bool:
        """Return whether a metric differs at each evaluation, so that it is not part of the state."""
        return metric.endswith("_s") or metric in self.measured


Function = Callable[..., Any]


def find_program(name: str) -> Function:
    """Import the module of ``module:attribute`` and return the function.

    Raises:
        RecipeError: the operator doesn't allow the recipe (then nothing is imported); the module can't be imported (if
            its own code raised, the message names the line) or lacks the attribute; or the function isn't annotated to
            return a `Recipe` or to take a `Run`.
    """
    check_recipe(name)
    module_name, attribute = split_recipe(name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise make_build_error(name, error) from error
        raise RecipeError(
            f"recipe {name!r}: there is no module {error.name}",
            hint="run from the folder that holds it, or put that folder on PYTHONPATH",
        ) from None
    except Exception as error:
        raise make_build_error(name, error) from error
    try:
        builder = getattr(module, attribute)
    except AttributeError:
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RecipeError(
            f"recipe {name!r}: {module_name} has no {attribute}", hint=did_you_mean(attribute, functions)
        ) from None
    if not callable(builder):
        raise RecipeError(f"recipe {name!r}: expected a function, found a {type(builder).__name__}")
    if not returns_recipe(builder) and not takes_run(builder):
        raise RecipeError(
            f"recipe {name!r} is not called: it doesn't say that it returns a Recipe or takes a Run",
            hint=f"annotate it: def {attribute}(...) -> Recipe, or def {attribute}(run: holdfast.Run)",
        )
    return builder  # type: ignore[no-any-return]


def split_recipe(name: str) -> tuple[str, str]:
    """Return the names of a recipe's module and function. A file's folder goes to the front of ``sys.path``.

    Raises:
        RecipeError: there is no such file, or a module of its name is loaded from elsewhere.
    """
    module, _, attribute = name.rpartition(":")
    if not module.endswith(".py"):
        return module, attribute
    path = Path(module).resolve()
    if not path.is_file():
        raise RecipeError(f"recipe {name!r}: there is no file {module}", hint=f"paths are relative to {Path.cwd()}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    loaded = getattr(sys.modules.get(path.stem), "__file__", None)
    if path.stem in sys.modules and (loaded is None or Path(loaded).resolve() != path):
        raise RecipeError(
            f"recipe {name!r}: another module {path.stem} is loaded, from {loaded or 'Python itself'}",
            hint="give the file another name",
        )
    return path.stem, attribute


def returns_recipe(builder: Function) -> bool:
    """Return whether a callable is annotated to return a `Recipe`, or is a subclass of it.

    The annotation may be in quotes, even if only a type checker can resolve it. For a `functools.partial`, a decorated
    function or an object with ``__call__``, the annotation of the function inside counts.
    """
    if isinstance(builder, type):
        return issubclass(builder, Recipe)
    function = _find_inner(builder)
    found = _resolve(getattr(function, "__annotations__", {}).get("return"), function)
    if isinstance(found, str):
        return _is_last_part(found, "Recipe")
    return isinstance(found, type) and issubclass(found, Recipe)


def takes_run(function: Function) -> bool:
    """Return whether a callable has a parameter that is annotated as a `Run`."""
    return _run_parameter(function) is not None


def _run_parameter(function: Function) -> str | None:
    if isinstance(function, type):
        return None
    inner = _find_inner(function)
    annotations: dict[str, Any] = getattr(inner, "__annotations__", {})
    for name, annotation in annotations.items():
        found = _resolve(annotation, inner)
        is_class = isinstance(found, type) and (found.__module__, found.__name__) == ("holdfast.training.run", "Run")
        if name != "return" and (is_class or (isinstance(found, str) and _is_last_part(found, "Run"))):
            return name
    return None


def _find_inner(function: Any) -> Any:
    """Return the function inside a `functools.partial`, a decorated function or an object with ``__call__``."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    return function if inspect.isroutine(function) else type(function).__call__


def _resolve(annotation: Any, function: Any) -> Any:
    """Return what an annotation stands for; the annotation itself if only a type checker can resolve it."""
    found = annotation
    try:
        for _ in range(2):  # twice, for quotes in a module with postponed annotations
            if isinstance(found, str):
                found = eval(found, getattr(function, "__globals__", {}))
    except Exception:
        return str(found)
    return found


def _is_last_part(annotation: str, name: str) -> bool:
    return annotation.strip("'\"").rpartition(".")[2] == name


def _list_parameters(function: Function) -> list[inspect.Parameter]:
    """Return a function's parameters, without the one for its `Run`."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # an annotation that only a type checker can resolve
        parameters = inspect.signature(function).parameters
    run_parameter = _run_parameter(function)
    return [each for name, each in parameters.items() if name != run_parameter]


def resolve_settings(builder: Function, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings against a function's signature and return them together with the defaults of the others.

    A function whose only parameter is its `Run` reads its settings there, and takes any.

    Raises:
        RecipeError: a setting is unknown (the hint names the nearest known one), missing, or of the wrong type.
    """
    parameters = _list_parameters(builder)
    if not parameters and takes_run(builder):
        return {}
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise RecipeError(f"the recipe takes {parameter} by position; settings are passed by name")
        is_known = parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
        annotation = parameter.annotation if is_known else Any
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (annotation, default)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    unknown = sorted(settings.keys() - fields.keys())
    if unknown and not takes_any:
        raise RecipeError(f"unknown key settings.{unknown[0]}", hint=did_you_mean(unknown[0], fields))
    model = create_model("Settings", __config__=ConfigDict(extra="allow", protected_namespaces=()), **fields)
    try:
        checked = model.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise RecipeError(f"settings.{name} is missing", hint=f"add {name} under [settings]") from None
        raise RecipeError(f"settings.{name} = {first['input']!r}: {first['msg']}") from None
    return {name: getattr(checked, name) for name in type(checked).model_fields} | (checked.model_extra or {})


def build_recipe(name: str, settings: Mapping[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """Build a recipe. Return it with the settings that it was built with, defaults included.

    Raises:
        RecipeError: the recipe can't be found, its settings are wrong, or its code raised.
    """
    builder = find_program(name)
    resolved = resolve_settings(builder, settings)
    try:
        recipe = builder(**resolved)
    except HoldfastError:
        raise
    except Exception as error:
        raise make_build_error(name, error) from error
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {name!r}: expected a holdfast.Recipe, found a {type(recipe).__name__}")
    return recipe, resolved


def default_settings(name: str) -> dict[str, Any]:
    """Return the default values of a recipe's settings."""
    parameters = _list_parameters(find_program(name))
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def make_build_error(name: str, error: Exception) -> RecipeError:
    """Return the error for a function that raised before its first step."""
    return RecipeError(
        f"recipe {name!r} can't be built: {describe_error(error)}", hint="the traceback is in the attempt's log"
    )

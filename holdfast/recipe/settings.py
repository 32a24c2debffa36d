"""The settings of a run's function: its parameters, or the fields of a pydantic model."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from holdfast.config import did_you_mean
from holdfast.errors import RecipeError
from holdfast.recipe.annotations import DEVICE, Function, own_parameters, takes_run

# A parameter with this name, annotated as a pydantic model, takes all settings together.
WHOLE = "settings"


def _list_parameters(function: Function) -> list[inspect.Parameter]:
    """Return a function's parameters, except those for the `Run` and for the device."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # the function has an annotation that only a type checker can resolve
        parameters = inspect.signature(function).parameters
    own = own_parameters(function)
    return [each for name, each in parameters.items() if name not in own]


def _find_model(parameters: list[inspect.Parameter]) -> type[BaseModel] | None:
    """Return the pydantic model that the parameter for all settings is annotated with; None without such a parameter.

    Raises:
        RecipeError: the function has further parameters.
    """
    whole = next((each for each in parameters if each.name == WHOLE), None)
    if whole is None or not (isinstance(whole.annotation, type) and issubclass(whole.annotation, BaseModel)):
        return None
    for each in parameters:
        if each is not whole:
            raise RecipeError(
                f"the function takes `{each.name}` beside `{WHOLE}: {whole.annotation.__name__}`, which takes all "
                "settings",
                hint=f"make {each.name} a field of {whole.annotation.__name__}",
            )
    return whole.annotation


def _make_model(parameters: list[inspect.Parameter]) -> type[BaseModel]:
    """Return a pydantic model with a field for each parameter."""
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise RecipeError(
                f"the recipe's function takes {parameter} by position only, but settings are passed by name"
            )
        is_known = parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
        annotation = parameter.annotation if is_known else Any
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (annotation, default)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    config = ConfigDict(extra="allow" if takes_any else "forbid", protected_namespaces=())
    try:
        return create_model("Settings", __config__=config, **fields)
    except PydanticSchemaGenerationError:
        name = next(name for name, field in fields.items() if not _can_be_a_setting(field))
        kind = getattr(fields[name][0], "__name__", fields[name][0])
        raise RecipeError(
            f"the parameter {name} of the recipe's function has the type {kind}, which no setting can have",
            hint=f"create {name} inside the function; settings are numbers, strings, booleans, lists and tables",
        ) from None


def _can_be_a_setting(field: tuple[Any, Any]) -> bool:
    try:
        create_model("Settings", value=field)
    except PydanticSchemaGenerationError:
        return False
    return True


def _check_settings(function: Function, settings: Mapping[str, Any]) -> BaseModel:
    """Return settings as an instance of the function's pydantic model, or of a model made from its parameters."""
    parameters = _list_parameters(function)
    model = _find_model(parameters) or _make_model(parameters)
    _refuse_unknown(model, settings)
    try:
        return model.model_validate(dict(settings))
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(part) for part in first["loc"]]
        key = ".".join(["settings", *names])
        description = _describe_field(model, names)
        if first["type"] == "missing":
            table = ".".join(["settings", *names[:-1]])
            hint = f"add {names[-1]} under [{table}]" + (f": {description}" if description else "")
            raise RecipeError(
                f"the recipe needs the setting {key}, and the configuration doesn't have it", hint=hint
            ) from None
        # Leave out the value of an error of the whole model, for example from a validator over several fields, because
        # that value is all settings together.
        value = f" = {first['input']!r}" if names else ""
        raise RecipeError(f"{key}{value}: {first['msg']}", hint=description) from None


def _describe_field(model: type[BaseModel], names: Sequence[str]) -> str:
    """Return the description of a field of a model; empty if it has none.

    Args:
        names: the path to the field: the name of a field of the model, then names of fields in nested models.
    """
    field = model.model_fields.get(names[0]) if names else None
    if field is None:
        return ""
    if len(names) > 1 and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return _describe_field(field.annotation, names[1:])
    return field.description or ""


def _refuse_unknown(model: type[BaseModel], settings: Mapping[str, Any], table: str = "settings") -> None:
    """Raise RecipeError if the settings, or a table in them, have a key without a field.

    Pydantic would ignore the key.
    """
    known = dict(model.model_fields)
    aliases = {each.alias: each for each in known.values() if each.alias}
    for key, value in settings.items():
        field = known.get(key) or aliases.get(key)
        if field is None and model.model_config.get("extra") != "allow":
            raise RecipeError(f"unknown key {table}.{key}", hint=did_you_mean(key, known))
        inner = field.annotation if field is not None else None
        if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, Mapping):
            _refuse_unknown(inner, value, f"{table}.{key}")


def _takes_any(function: Function) -> bool:
    """Return whether a function's only parameter is its `Run`. Such a function reads its settings from the `Run`."""
    return takes_run(function) and not _list_parameters(function)


def resolve_settings(function: Function, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings against a function's parameters. Return them with the defaults of all further parameters.

    A parameter ``settings`` that is annotated as a pydantic model takes all settings, as the model's fields. A function
    whose only parameter is its `Run` reads its settings from the `Run`, so any settings are accepted.

    Raises:
        RecipeError: a setting is unknown (the hint names the nearest known one), missing, or of the wrong type.
    """
    if _takes_any(function):
        return dict(settings)
    checked = _check_settings(function, settings)
    return {name: getattr(checked, name) for name in type(checked).model_fields} | (checked.model_extra or {})


def make_arguments(function: Function, settings: Mapping[str, Any], device: object) -> dict[str, Any]:
    """Return the arguments for a function except its `Run`: its settings, and the device if it has such a parameter.

    Raises:
        RecipeError: see `resolve_settings`.
    """
    own = {name: device for name, kind in own_parameters(function).items() if kind == DEVICE}
    if _takes_any(function):
        return own
    if _find_model(_list_parameters(function)) is not None:
        return own | {WHOLE: _check_settings(function, settings)}
    return own | resolve_settings(function, settings)


def list_defaults(function: Function) -> dict[str, Any]:
    """Return the default values of a function's settings."""
    parameters = _list_parameters(function)
    if (model := _find_model(parameters)) is not None:
        fields = model.model_fields.items()
        return {name: each.get_default(call_default_factory=True) for name, each in fields if not each.is_required()}
    return {each.name: each.default for each in parameters if each.default is not each.empty}

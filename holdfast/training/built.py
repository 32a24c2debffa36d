"""The record of a recipe's hyperparameters: plain values from its optimizer, schedule, functions and modules, by name.

The values are taken before the first step, so values that a step changes (counters, rates) have their initial values in
every process. Values that depend on the process or the machine (paths, times, ids, devices) are left out.
"""

import dataclasses
import functools
import getpass
import hashlib
import inspect
import socket
import sys
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.provenance.fingerprint import VARIABLES, to_plain
from holdfast.provenance.hyperparameters import LEFT_OUT, LISTED_ITEMS, SECRET, as_plain_json, is_public
from holdfast.provenance.ownership import is_own
from holdfast.state.slots import read_attributes
from holdfast.training.build import Training
from holdfast.training.closures import list_closure, walk_code
from holdfast.training.kept import Kept
from holdfast.training.optimizers import parts_of
from holdfast.training.schedulers import name_schedules

Values = Iterator[tuple[str, Any]]


def describe_built(training: Training) -> dict[str, Any]:
    """Return the recipe's hyperparameters by dotted name, as plain JSON. Call it before the first step."""
    recipe = training.recipe
    found: dict[str, Any] = {
        name: to_plain(getattr(recipe, name)) for name in ("batch_size", "grad_accum", "clip_norm")
    } | {"steps_per_epoch": training.steps_per_epoch}
    # The optimizer, modules and extras are recorded below under their own names: skip them among a function's captured
    # values.
    parts = (recipe.optimizer, *parts_of(recipe.optimizer), *recipe.model.modules(), *recipe.extras.values())
    seen = {id(each) for each in parts}
    for name in ("loss", "after_step", "collate", *(["step"] if recipe.step is not None else [])):
        found |= _walk(name, getattr(recipe, name), seen)
    if isinstance(recipe, Kept):
        found |= _describe_function("loop", recipe.function, seen)
        found |= _describe_constants(recipe.constants, training.ranks.number, seen)
        # The only number of ranks on which the bits depend if any number of data ranks trains the same bits.
        if training.ranks.has_common_state:
            found[f"{VARIABLES}run.ranks_of_a_sample"] = training.ranks.number // training.ranks.data.count
    found |= _describe_optimizer(recipe.optimizer)
    for name, schedule in name_schedules(recipe).items():
        if dataclasses.is_dataclass(schedule):
            found |= _walk(f"schedule.{name}" if name else "schedule", schedule, seen)
    for number, scheduler in enumerate(training.schedulers):
        found |= _describe_object(f"scheduler.{number}", scheduler, seen)
    found |= _describe_model("model", recipe.model, seen)
    for name, extra in sorted(recipe.extras.items()):
        if isinstance(extra, nn.Module):
            found |= _describe_model(f"extras.{name}", extra, seen)
        else:
            found |= _describe_object(f"extras.{name}", extra, seen)
    for name, anneal in sorted(recipe.anneals.items()):
        found |= {key: value for key, value in _walk(f"anneals.{name}", anneal, seen) if not key.endswith(".value")}
    return found


def _describe_constants(constants: Mapping[str, Any], ranks: int, seen: set[int]) -> dict[str, Any]:
    """Return, by name, the numbers, booleans and single words among the values that a loop reads and never assigns.

    Texts that aren't words are left out, because most of them name files. Some values depend on the number of ranks.
    Therefore each name contains this number, unless it is 1: a resume with a different number of ranks then records new
    names instead of changed values.
    """
    found: dict[str, Any] = {}
    of_ranks = "" if ranks == 1 else f".of_{ranks}_ranks"
    for name, value in sorted(constants.items()):
        is_settings = dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace | Namespace)
        if is_settings or as_plain_json(value) is not LEFT_OUT:
            values = _walk(f"{VARIABLES}{name}", value, seen)
            found |= {f"{key}{of_ranks}": each for key, each in values if not isinstance(each, str) or _is_word(each)}
    return {key: value for key, value in found.items() if value is not None}


def _is_word(text: str) -> bool:
    return text.isalpha() and text not in (socket.gethostname(), getpass.getuser())


def _describe_optimizer(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizer": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            number_of = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if key != "params" and (plain := as_plain_json(number_of)) is not LEFT_OUT:
                found[f"optimizer.{number}.{key}"] = plain
    return found


def _describe_model(name: str, model: nn.Module, seen: set[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for inner, module in model.named_modules():
        found |= _describe_object(f"{name}.{inner}" if inner else name, module, seen)
    for inner, parameter in model.named_parameters():
        if not parameter.requires_grad:
            found[f"{name}.{inner}.requires_grad"] = False
    return found


def _describe_object(name: str, thing: Any, seen: set[int]) -> dict[str, Any]:
    """Return the name of an object's class and the plain values among its public attributes."""
    found: dict[str, Any] = {name: _class_of(thing).__qualname__}
    for key, value in sorted(getattr(thing, "__dict__", {}).items()):
        if is_public(key):
            found |= _walk(f"{name}.{key}", value, seen)
    return found


def _class_of(thing: Any) -> type:
    """Return an object's class; for a module that `fully_shard` has sharded, the class from before the sharding."""
    first, *others = type(thing).__bases__
    return others[0] if others and first.__module__.startswith("torch.distributed.fsdp") else type(thing)


def _walk(name: str, value: Any, seen: set[int]) -> Values:
    plain = as_plain_json(value)
    if isinstance(value, str) and SECRET.search(name.rpartition(".")[2]):
        return
    if plain is not LEFT_OUT:
        yield name, plain
    elif isinstance(value, torch.Tensor):
        return
    elif isinstance(value, nn.Module):
        if id(value) not in seen:
            seen.update(map(id, value.modules()))
            yield from _describe_model(name, value, seen).items()
    elif isinstance(value, functools.partial):
        yield from _walk(name, value.func, seen)
        yield from _walk(f"{name}.args", list(value.args), seen)
        yield from _walk(f"{name}.keywords", value.keywords, seen)
    elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        yield from _describe_object(name, value, seen).items()
    elif callable(value):
        yield from _describe_function(name, value, seen)
    elif id(value) not in seen:
        yield from _walk_inside(name, value, seen)


def _walk_inside(name: str, value: Any, seen: set[int]) -> Values:
    """Yield the name and value of each value inside a settings object, a dict, or a list of functions or schedulers."""
    if dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace | Namespace):
        seen.add(id(value))
        value = {key: each for key, each in read_attributes(value).items() if not key.startswith("_")}
    # Look only into a plain dict, because os.environ is a mapping, too, and may contain secrets.
    if isinstance(value, dict) and len(value) <= LISTED_ITEMS:
        for key, each in value.items():
            if isinstance(key, str | int):
                yield from _walk(f"{name}.{key}", each, seen)
    elif isinstance(value, list | tuple) and len(value) <= LISTED_ITEMS:
        for number, each in enumerate(value):
            yield from _walk(f"{name}.{number}", each, seen)


def _describe_function(name: str, function: Any, seen: set[int]) -> Values:
    """Yield a function's name; for a function of the user's, also its code's digest, defaults and captured values."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(inner, "__code__", None)
    yield name, getattr(inner, "__qualname__", None) or type(inner).__qualname__
    if id(inner) in seen:
        return
    seen.add(id(inner))
    if code is None:
        if not inspect.isbuiltin(inner) and not inspect.isclass(inner):
            yield from list(_describe_object(name, inner, seen).items())[1:]
        return
    if not is_own(inner):
        return
    # Another Python version compiles other bytecode. Therefore the name contains the version, as in ``cpython-312``:
    # under a different version the digest has a new name, and doesn't count as a changed value.
    yield f"{name}.code.{sys.implementation.cache_tag}", _digest_code(code)
    values = _find_captured(inner)
    defaults = {**dict(enumerate(inner.__defaults__ or ())), **(inner.__kwdefaults__ or {})}
    for kind, each in (("captured", values), ("defaults", defaults)):
        for key, value in sorted(each.items(), key=str):
            # Leave None out, as paths are left out: whether a variable is a path or None may depend on whether a file
            # exists.
            if value is not None and not isinstance(value, types.ModuleType | type):
                yield from _walk(f"{name}.{kind}.{key}", value, seen)


def _find_captured(function: Any) -> dict[str, Any]:
    """Return, by name, a function's closure variables, and the globals that it or its inner functions use."""
    known = getattr(function, "__globals__", {})
    names = {name for code in walk_code(function.__code__) for name in code.co_names}
    return {name: known[name] for name in names & known.keys()} | dict(list_closure(function))


def _digest_code(code: types.CodeType) -> str:
    sha256 = hashlib.sha256(code.co_code)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            sha256.update(_digest_code(const).encode())
        else:  # a set is sorted, since its order differs between processes
            sha256.update(repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const).encode())
    sha256.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return sha256.hexdigest()[:16]

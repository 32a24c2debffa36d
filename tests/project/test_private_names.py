"""The private names of other libraries that the code uses: each exists in the installed version, and none is unlisted.

A library may rename them in any version. A name that is gone fails here by name, before a run meets it.
"""

import ast
import functools
import importlib
import inspect
import random
import re
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT

ROOMS = ("holdfast", "tasks", "flows", "deployments", "examples")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Classes whose base class is another library's: their own private names, and else a method's name is the library's.
SUBCLASSES = {"_HeldTrainer": {"_held"}, "HeldFitLoop": {"_boundary"}}
# Texts that only look like a private name: ends and beginnings of other names, and formats on disk.
TEXTS = {
    "_ATTR", "_METHOD",
    "_abc", "_anneal_", "_anneal_end_step", "_anneal_start_step", "_extra_state", "_final", "_frac", "_global_",
    "_held", "_hooks", "_initial", "_machines", "_multiprocessing", "_per_second", "_pydev", "_ranks", "_runtime",
    "_s", "_sd", "_sdp", "_sdp_enabled", "_state", "_state_dict", "_step", "_sysconfigdata", "_timestamp", "_type",
}  # fmt: skip


class Owner(NamedTuple):
    """What has private names that the code uses.

    Attributes:
        library: a library of an extra; empty for one that is always there.
        make: returns an object that has the names.
    """

    library: str
    make: Callable[[], Any]
    names: str


def make_module() -> Any:
    from torch import nn

    return nn.BatchNorm1d(2)


def make_parameter() -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(2))


def make_stepped_scheduler() -> Any:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, [2])
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    return scheduler


def make_cyclic(scale: Callable[[float], float] | None = abs) -> Any:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, scale_fn=scale)


def make_one_cycle() -> Any:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=4)


def make_optimizer_that_stepped() -> Any:
    return make_stepped_scheduler().optimizer


def make_backward_hook() -> Any:
    module = make_module()
    module.register_full_backward_hook(lambda *arguments: None)
    return module


def make_pruned() -> Any:
    from torch.nn.utils import prune

    module = make_module()
    prune.l1_unstructured(module, "weight", 1)
    return next(iter(module._forward_pre_hooks.values()))


def make_sparse() -> Any:
    import torch

    return torch.zeros(2).to_sparse()


def make_loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader([1, 2])  # type: ignore[arg-type]


def make_accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def find_tensor_utils() -> Any:
    import torch.distributed.tensor._utils

    return torch.distributed.tensor


def find_in_torch(module: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(f"torch.{module}")


def make_fsdp_state() -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    state = FSDPState()
    state.init((torch.nn.Linear(1, 1),), torch.device("cpu"), MixedPrecisionPolicy(), False)
    return state


def find_names_of_unsharding() -> Any:
    """An object with the names that FSDP2 uses to make a parameter's gathered value, which it makes in a step."""
    parameter = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param").FSDPParam
    return SimpleNamespace(**dict.fromkeys(parameter.init_unsharded_param.__code__.co_names))


def find_names_of_steps() -> Any:
    """An object with the name of the function that torch's decorator makes of an optimizer's step."""
    decorated = importlib.import_module("torch.optim.optimizer")._use_grad_for_differentiable(lambda: None)
    return SimpleNamespace(**{decorated.__code__.co_name: None})


def find_fsdp_module() -> Any:
    return find_in_torch("distributed.fsdp")().FSDPModule


def find_layout_functions() -> Any:
    return find_tensor_utils()._utils


def make_stream() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()


def find_trainer() -> Any:
    import transformers

    return transformers.Trainer


def find_names_of_trainer() -> Any:
    """Return an object with the attributes that a Trainer's code names: it has some of them only while it trains."""
    names = re.findall(r"self\.(\w+)", inspect.getsource(find_trainer()))
    return SimpleNamespace(**dict.fromkeys(names))


def make_lightning() -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def find_results() -> Any:
    from lightning.pytorch.trainer.connectors.logger_connector import result

    return result


def find_fit_loop() -> Any:
    from lightning.pytorch.loops import fit_loop

    return fit_loop


def find_data_connector() -> Any:
    from lightning.pytorch.trainer.connectors import data_connector

    return data_connector


def make_sync() -> Any:
    return find_results()._Sync()


def make_model_parallel() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy()


def make_ddp() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy()


def make_metric() -> Any:
    from torchmetrics import MeanMetric

    return MeanMetric()


def make_collection() -> Any:
    from torchmetrics import MeanMetric, MetricCollection

    return MetricCollection(MeanMetric())


def make_interleaved() -> Any:
    from tests.support import titan

    return titan.read("interleaved", 1).dataset


def find_file_system() -> Any:
    from fsspec import AbstractFileSystem

    return AbstractFileSystem


def find_distribution() -> Any:
    from importlib.metadata import distribution

    return distribution("numpy")


def find_random_state() -> Any:
    import numpy as np

    return np.random.mtrand


MODULE = (
    "_parameters _buffers _modules _non_persistent_buffers_set _forward_pre_hooks _state_dict_hooks"
    " _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks _load_from_state_dict"
    " _save_to_state_dict _compiled_call_impl"
)
OWNERS = [
    # ---- Python and NumPy
    Owner("", lambda: random, "_inst"),
    Owner("", lambda: sys, "_getframe"),
    Owner("", lambda: __import__("os"), "_exit"),  # public, in spite of its name
    Owner("", lambda: threading, "_DummyThread"),
    Owner("", lambda: namedtuple("Pair", "a b"), "_fields _make"),  # public, in spite of their names
    Owner("", find_distribution, "_path"),
    Owner("", find_random_state, "_rand"),
    Owner("", lambda: find_random_state()._rand, "_bit_generator"),
    Owner("", lambda: __import__("numpy"), "_core"),
    Owner("", lambda: __import__("numpy")._core.multiarray, "_reconstruct"),
    # ---- torch
    Owner("", make_module, MODULE),
    Owner("", lambda: make_module().state_dict(), "_metadata"),
    Owner("", make_backward_hook, "_is_full_backward_hook"),
    Owner("", make_parameter, "_version _backward_hooks _post_accumulate_grad_hooks"),
    Owner("", make_sparse, "_indices _values"),
    Owner("", make_pruned, "_tensor_name"),
    Owner("", make_stepped_scheduler, "_schedulers _milestones _last_lr _is_initial"),
    Owner("", lambda: make_stepped_scheduler()._schedulers[0], "_step_count _get_lr_called_within_step"),
    Owner("", make_optimizer_that_stepped, "_opt_called"),
    Owner("", lambda: make_optimizer_that_stepped().step, "_wrapped_by_lr_sched"),
    Owner("", make_cyclic, "_scale_fn_custom"),
    Owner("", lambda: make_cyclic(scale=None), "_scale_fn_ref"),
    Owner("", make_one_cycle, "_schedule_phases _anneal_func_type"),
    Owner("", find_in_torch("serialization"), "_get_layout"),
    Owner("", lambda: importlib.import_module("torch"), "_C"),
    Owner("", find_in_torch("_C"), "_get_accelerator _current_graph_task_id"),
    Owner("", lambda: find_in_torch("autograd")().Variable, "_execution_engine"),
    Owner("", find_in_torch("distributed.checkpoint"), "_traverse"),
    Owner("", find_in_torch("distributed.checkpoint.default_planner"), "_EmptyStateDictLoadPlanner"),
    Owner("", find_in_torch("distributed.checkpoint.filesystem"), "_StorageInfo"),
    Owner("", find_in_torch("distributed.checkpoint.metadata"), "_MEM_FORMAT_ENCODING"),
    Owner("", find_in_torch("distributed.checkpoint.state_dict_loader"), "_load_state_dict"),
    Owner("", find_tensor_utils, "_utils"),
    Owner("", find_fsdp_module, "_get_fsdp_state"),
    Owner("", make_fsdp_state, "_mp_policy"),
    Owner("", make_fsdp_state, "_fsdp_param_groups _fsdp_param_group"),
    Owner("", find_names_of_unsharding, "_unsharded_param"),
    Owner("", find_names_of_steps, "_use_grad"),
    Owner(
        "", make_optimizer_that_stepped, "_optimizer_load_state_dict_pre_hooks _optimizer_load_state_dict_post_hooks"
    ),
    Owner("", find_layout_functions, "_compute_local_shape_and_global_offset"),
    # ---- torchdata, accelerate, fsspec
    Owner("", make_loader, "_iterator _initial_iter_for_state_dict"),
    Owner("", make_accelerator, "_custom_objects"),
    Owner("", lambda: make_accelerator().state, "_shared_state"),
    Owner("", find_file_system, "_strip_protocol"),
    # ---- datasets, transformers
    Owner("datasets", make_stream, "_ex_iterable"),
    Owner(
        "transformers",
        find_trainer,
        "_init_training_state _prepare_for_training _run_epoch _load_rng_state _evaluate _get_grad_norm"
        " _finalize_training",
    ),
    Owner("transformers", find_names_of_trainer, "_globalstep_last_logged"),
    # ---- lightning and torchmetrics
    Owner(
        "lightning",
        make_lightning,
        "_logger_connector _data_connector _signal_connector _results _val_check_time_interval",
    ),
    Owner(
        "lightning",
        lambda: make_lightning()._logger_connector,
        "_progress_bar_metrics _logged_metrics _callback_metrics _first_loop_iter _current_fx",
    ),
    Owner("lightning", lambda: make_lightning()._data_connector, "_prepare_dataloader"),
    Owner("lightning", lambda: make_lightning().strategy, "_lightning_optimizers"),
    Owner("lightning", make_ddp, "_ddp_kwargs"),
    Owner("lightning", make_model_parallel, "_data_parallel_size _tensor_parallel_size"),
    Owner(
        "lightning",
        lambda: make_lightning().fit_loop,
        "_data_fetcher _combined_loader _data_source _restart_stage _restarting _loaded_from_state_dict"
        " _resuming_from_checkpoint",
    ),
    Owner("lightning", lambda: make_lightning().fit_loop.epoch_loop, "_results _batches_that_stepped"),
    Owner(
        "lightning",
        lambda: make_lightning().fit_loop.epoch_loop.val_loop,
        "_results _has_run _seen_batches_per_dataloader",
    ),
    Owner("lightning", find_fit_loop, "_FitLoop"),
    Owner("lightning", find_data_connector, "_DataLoaderSource _parse_num_batches _request_dataloader"),
    Owner("lightning", find_results, "_Metadata _ResultCollection _ResultMetric _Sync"),
    Owner("lightning", make_sync, "_should _op"),
    Owner("torchmetrics", make_metric, "_defaults _update_count _computed _forward_cache"),
    Owner("torchmetrics", make_collection, "_groups _groups_checked _state_is_copy"),
    # ---- torchtitan, in .venv/titan: tests/holdfast/adapters/test_torchtitan.py looks them up there
    Owner(
        "torchtitan", make_interleaved, "_datasets _inputs_buffer _labels_buffer _positions_buffer _normalize_positions"
    ),
]
CASES = [
    pytest.param(owner.make, name, marks=[pytest.mark.extras(owner.library)] if owner.library else [], id=name)
    for owner in OWNERS
    for name in owner.names.split()
]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_a_private_name_exists(make: Callable[[], Any], name: str) -> None:
    assert hasattr(make(), name)


@pytest.mark.extras("datasets")
def test_the_buffer_of_a_shuffled_stream_is_found() -> None:
    from holdfast.data.streams import BUFFER

    assert type(make_stream().shuffle(1)._ex_iterable).__name__ == BUFFER


def test_every_private_name_of_another_library_is_listed() -> None:
    listed = {name for owner in OWNERS for name in owner.names.split()}
    foreign = {name: place for path in list_files() for name, place in list_foreign(path)}
    assert {name: foreign[name] for name in foreign.keys() - listed - TEXTS} == {}, "list them in OWNERS"
    used = {name for path in list_files() for name, _ in list_used(read_tree(path))}
    assert (listed | TEXTS) - used == set(), "nothing uses these any more"


def list_files() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def list_foreign(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the private names in a file that no file of its room defines, each with its place."""
    own = find_defined(path.parent)
    for name, line in list_used(read_tree(path)):
        if PRIVATE.fullmatch(name) and name not in own:
            yield name, f"{path.relative_to(ROOT)}:{line}"


@functools.cache
def read_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def find_defined(room: Path) -> set[str]:
    return {name for each in room.glob("*.py") for name in list_defined(read_tree(each))}


def list_defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that source defines: functions, classes, variables and attributes of ``self``."""
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of source, without those inside of SUBCLASSES."""
    yield node
    for inner in ast.iter_child_nodes(node):
        if not (isinstance(inner, ast.ClassDef) and inner.name in SUBCLASSES):
            yield from walk(inner)


def list_used(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that source imports, looks up, or has as a text, and all of SUBCLASSES, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.ctx, ast.Store) and is_self(node.value)):
            yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for name in (*(node.module or "").split("."), *(each.name for each in node.names)):
                yield name, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif isinstance(node, ast.ClassDef) and node.name in SUBCLASSES:
            yield from list_of_subclass(node)


def list_of_subclass(tree: ast.ClassDef) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef) else getattr(node, "attr", "")
        if name not in SUBCLASSES[tree.name]:
            yield name, getattr(node, "lineno", tree.lineno)


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")

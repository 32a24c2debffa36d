"""Everything besides weights and optimizers that the next step of a Lightning loop depends on.

Lightning's own checkpoints lack the logged numbers, the metrics in the middle of an epoch, and the names of frozen
parameters.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from holdfast.state.tensor_forms import place_of
from holdfast.training.forgotten_state.digests import has_digest
from holdfast.training.own_loop.run import Run, loop_of

# Attributes of a metric, and of a collection of metrics, that belong to its state without a call of `add_state`.
METRIC = ("_update_count", "_computed", "_forward_cache")
COLLECTION = ("_groups", "_groups_checked", "_state_is_copy")
# The fields of a logged value's metadata that are plain values.
META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip
LOGGED = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
CONNECTOR = ("_first_loop_iter", "_current_fx")
# The names of the counts in one of Lightning's progress objects, and the progress objects that Lightning resets at each
# epoch.
READY = ("ready", "started", "processed", "completed")
OF_EPOCH = (
    "epoch_loop.scheduler_progress", "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.optim_step_progress",
)  # fmt: skip
RESTARTING = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


class Counters:
    """The counters of all loops, as a state: epochs, batches, optimizer steps."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        loop = self._trainer.fit_loop
        validation = loop.epoch_loop.val_loop
        return {
            "progress": loop.state_dict(),
            "has_validated": validation._has_run,
            "validated": dict(validation._seen_batches_per_dataloader),
            "should_stop": self._trainer.should_stop,
            "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters, and switch off Lightning's own handling of a restarted loop."""
        loop = self._trainer.fit_loop
        training, validation = loop.epoch_loop, loop.epoch_loop.val_loop
        loop.load_state_dict(state["progress"])
        for each in (loop, training, training.automatic_optimization, training.manual_optimization, validation):
            vars(each).update(dict.fromkeys(RESTARTING, False))
        validation._has_run = state["has_validated"]
        validation._seen_batches_per_dataloader = defaultdict(int, state["validated"])
        self._trainer.should_stop = state["should_stop"]
        self._trainer.accumulate_grad_batches = state["accumulate_grad_batches"]

    covers = ("trainer",)

    def move_in(self, checkpoint: Any, step: int, steps_per_epoch: int) -> list[str]:
        """Load the counters of a Lightning checkpoint, and set them as Lightning has them when it requests a batch.

        Args:
            step: the number of batches that were trained before the checkpoint.

        Returns: the names of the state that the checkpoint lacks.
        """
        epoch, within = divmod(step, steps_per_epoch)
        saved = copy.deepcopy(checkpoint.framework.get("loops", {}).get("fit_loop"))
        progress: dict[str, Any] = saved or self._trainer.fit_loop.state_dict()
        batches, own = progress["epoch_loop.batch_progress"], progress["epoch_loop.state_dict"]
        # Lightning may save before it counts the last batch, so count that batch here.
        if saved is not None and self._trainer.accumulate_grad_batches == 1:
            own["_batches_that_stepped"] += batches["total"]["ready"] - batches["total"]["completed"]
        batches["total"], batches["current"] = dict.fromkeys(READY, step), dict.fromkeys(READY, within)
        batches["is_last_batch"] = False
        epochs = dict(zip(READY, (epoch + 1, epoch + 1, epoch, epoch), strict=True))
        progress["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
        if not within:
            _reset_current([each for name, each in progress.items() if name in OF_EPOCH])
        validation = progress["epoch_loop.val_loop.batch_progress"]
        validation["total"] = dict.fromkeys(READY, 0)
        validated = validation["current"]["ready"]
        self.load_state_dict(
            {
                "progress": progress,
                "has_validated": validated > 0,
                "validated": {0: validated} if validated else {},
                "should_stop": False,
                "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
            }
        )
        lost = [] if saved else ["the counters of Lightning's loops"]
        plateaus = [each.scheduler for each in self._trainer.lr_scheduler_configs if each.reduce_on_plateau]
        # Lightning steps ReduceLROnPlateau after an epoch's last save.
        if any(each.last_epoch < epoch for each in plateaus):
            lost.append(f"the step of ReduceLROnPlateau at the end of epoch {epoch}")
        return lost + (["the numbers and metrics that this epoch has logged so far"] if within else [])


def _reset_current(values: Any) -> None:
    """Set all counts of the present epoch to 0."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, dict) and "current" in value:
            value["current"] = dict.fromkeys(value["current"], 0)
        elif isinstance(value, dict):
            _reset_current(value)


class TrainerState:
    """The logged numbers, the metrics in the middle of an epoch, and the names of frozen parameters, as a state."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        connector = self._trainer._logger_connector
        return {
            "logged": {name: [[*item] for item in getattr(connector, name).items()] for name in LOGGED},
            "connector": {name: getattr(connector, name) for name in CONNECTOR},
            "results": [_read_results(each) for each in self._list_results()],
            "metrics": {name: _read_metric(each) for name, each in self._list_metrics()},
            "frozen": [name for name, each in self._module.named_parameters() if not each.requires_grad],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        state = move_data_to_device(state, self._trainer.strategy.root_device)
        connector = self._trainer._logger_connector
        for name, items in state["logged"].items():
            setattr(connector, name, dict(items))
        vars(connector).update(state["connector"])
        for name, each in self._list_metrics():
            vars(each).update(state["metrics"][name])
        for results, saved in zip(self._list_results(), state["results"], strict=True):
            self._write_results(results, saved)
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(name not in state["frozen"])

    def _list_results(self) -> list[_ResultCollection]:
        loop = self._trainer.fit_loop.epoch_loop
        return [loop._results, loop.val_loop._results]

    def _list_metrics(self) -> list[tuple[str, Any]]:
        modules = self._module.named_modules()
        return [(name, each) for name, each in modules if isinstance(each, Metric | MetricCollection)]

    def _write_results(self, results: _ResultCollection, saved: list[Any]) -> None:
        """Create the objects that Lightning creates at the first `self.log` of each name, and restore their values."""
        results.clear()
        for key, each in saved:
            reduce_fx = each["reduce_fx"]
            meta = _Metadata(**each["meta"], reduce_fx=BUILTINS.get(reduce_fx, reduce_fx))
            meta.sync = _Sync(fn=self._trainer.strategy.reduce, **each["sync"])
            result = _ResultMetric(meta, each["is_tensor"])
            vars(result).update(each["values"])
            if not result.is_tensor:
                result.value = self._module.get_submodule(meta.metric_attribute)
            results[key] = result


# Reductions that are Python's built-in functions. They are saved with different names than torch's functions sum, max
# and min.
BUILTINS = {"builtins.sum": sum, "builtins.max": max, "builtins.min": min}


def _read_results(results: _ResultCollection) -> list[Any]:
    return [[key, _read_result(each)] for key, each in results.items()]


def _read_result(result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    states = ("value", "cumulated_batch_size") if result.is_tensor else ()
    builtin = next((name for name, each in BUILTINS.items() if each is meta.reduce_fx), None)
    return {
        "meta": {name: getattr(meta, name) for name in META},
        "reduce_fx": builtin or meta.reduce_fx.__name__,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only, "_op": meta.sync.op},
        "is_tensor": result.is_tensor,
        "values": {name: getattr(result, name) for name in (*states, *METRIC, "has_reset") if hasattr(result, name)},
    }


def _read_metric(metric: Metric | MetricCollection) -> dict[str, Any]:
    names = COLLECTION if isinstance(metric, MetricCollection) else (*metric._defaults, *METRIC)
    return {name: getattr(metric, name) for name in names}


class Checkpointed:
    """The state that the user's hooks would add to Lightning's own checkpoints.

    It contains the states of callbacks and of the data module, and the entries that ``on_save_checkpoint`` adds. A
    callback that writes checkpoints is excluded, because its state is only the names of its files.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        callbacks = [each for each in trainer.callbacks if not isinstance(each, Checkpoint)]
        self._callbacks = {each.state_key: each for each in callbacks if is_overridden("state_dict", each)}
        self._hooks: list[Any] = [each for each in callbacks if is_overridden("on_save_checkpoint", each)]
        self._data: Any = trainer.datamodule

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {
            "callbacks": {key: each.state_dict() for key, each in self._callbacks.items()},
            "data": self._data.state_dict() if self._data is not None else {},
            "added": self._read_added(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of the callbacks and the data module, and call the ``on_load_checkpoint`` hooks.

        Call this after the module's weights are restored, because the hooks get the module's ``state_dict``.
        """
        for key, each in self._callbacks.items():
            each.load_state_dict(state["callbacks"][key])
        if self._data is not None:
            self._data.load_state_dict(state["data"])
        checkpoint = self._begin()
        checkpoint |= _put_back(state["added"], checkpoint["state_dict"])
        for each in self._hooks:
            each.on_load_checkpoint(self._trainer, self._module, checkpoint)
        self._module.on_load_checkpoint(checkpoint)

    covers: tuple[str, ...] = ()

    def move_in(self, saved: Any, step: int, steps_per_epoch: int) -> list[str]:
        """Load the states of callbacks and data module from a Lightning checkpoint, and call the loading hooks.

        Returns: the names of the callbacks whose state the checkpoint lacks.
        """
        states, added = saved.framework.get("callbacks", {}), saved.framework.get("added", {})
        for key, each in self._callbacks.items():
            if key in states:
                each.load_state_dict(states[key])
        data = type(self._data).__qualname__
        if self._data is not None and data in added:
            self._data.load_state_dict(added[data])
        checkpoint = self._begin() | added
        for each in self._hooks:
            each.on_load_checkpoint(self._trainer, self._module, checkpoint)
        if is_overridden("on_load_checkpoint", self._module):
            self._module.on_load_checkpoint(checkpoint)
        return [f"the callback {key}" for key in self._callbacks if key not in states]

    def _read_added(self) -> dict[str, Any]:
        """Return the entries that ``on_save_checkpoint`` adds to a checkpoint, or replaces in it.

        In the entries, the module's tensors are replaced by their names, because the run saves these tensors itself.
        It saves the main rank's buffers, from which other ranks' buffers may differ.
        """
        if not self._hooks and not is_overridden("on_save_checkpoint", self._module):
            return {}
        before = self._begin()
        checkpoint = {**before}
        for each in self._hooks:
            each.on_save_checkpoint(self._trainer, self._module, checkpoint)
        self._module.on_save_checkpoint(checkpoint)
        added = {name: each for name, each in checkpoint.items() if each is not before.get(name)}
        named: dict[str, Any] = _name_own(added, {_place(each): name for name, each in before["state_dict"].items()})
        return named

    def _begin(self) -> dict[str, Any]:
        step, epoch = self._trainer.global_step, self._trainer.current_epoch
        return {"state_dict": self._module.state_dict(), "global_step": step, "epoch": epoch}


# The prefix of a text that replaces a tensor of the module in the state. The tensor's name follows the prefix.
OWN = "holdfast, of the module: "


def _place(value: Any) -> Any:
    """Return a key that is equal for tensors with the same elements in memory.

    The key is None for an empty tensor, and for a value that isn't a tensor.
    """
    if not isinstance(value, Tensor) or not value.numel():
        return None
    return place_of(value)


def _name_own(value: Any, names: dict[Any, str]) -> Any:
    """Return a value in which the module's tensors are replaced by their names.

    Args:
        names: the names of the module's tensors, by their keys from `_place`.
    """
    if isinstance(value, dict):
        return {key: _name_own(each, names) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_name_own(each, names) for each in value])
    place = _place(value)
    return f"{OWN}{names[place]}" if place in names and place is not None else value


def _put_back(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value in which the names that `_name_own` has inserted are replaced by the module's tensors."""
    if isinstance(value, dict):
        return {key: _put_back(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_put_back(each, tensors) for each in value])
    return tensors[value.removeprefix(OWN)] if isinstance(value, str) and value.startswith(OWN) else value


class UnsavedAttributes:
    """The module's and callbacks' attributes that no checkpoint contains, for the search for forgotten state."""

    def __init__(self, run: Run, trainer: pl.Trainer) -> None:
        self._run, self._trainer = run, trainer

    def list_variables(self) -> list[tuple[str, Any]]:
        """Return attributes by name: those of callbacks and data module that save no state, and those of modules."""
        found = [pair for owner, each in self._list_plain() for pair in _list_public(owner, each)]
        return [*self._list_reached(), *((name, each) for name, each in found if has_digest(each))]

    def _list_open(self) -> Iterator[tuple[str, Any]]:
        """Yield the user's callbacks that save no state, each with its name."""
        for each in self._trainer.callbacks:
            has_state = is_overridden("state_dict", each) or is_overridden("on_save_checkpoint", each)
            if not has_state and not type(each).__module__.startswith(("lightning.", "holdfast.")):
                yield loop_of(self._run).find_name(each), each

    def _list_plain(self) -> Iterator[tuple[str, Any]]:
        module = self._trainer.lightning_module
        if not is_overridden("on_save_checkpoint", module):
            for name, each in module.named_modules():
                yield f"{loop_of(self._run).find_name(module)}{'.' if name else ''}{name}", each
        yield from self._list_open()

    def _list_reached(self) -> Iterator[tuple[str, Any]]:
        yield from ((f"{name}.{key}", value) for name, each in self._list_open() for key, value in vars(each).items())
        data = self._trainer.datamodule
        if data is not None and not is_overridden("state_dict", data):
            name = loop_of(self._run).find_name(data)
            yield from ((f"{name}.{key}", value) for key, value in vars(data).items())


def _list_public(owner: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of an object, except those that `TrainerState` and torch save."""
    kept = {"training", *(value._defaults if isinstance(value, Metric) else ())}
    for name, each in vars(value).items():
        if not name.startswith("_") and name not in kept:
            yield f"{owner}.{name}", each

"""Ranks without processes and without a recipe: they train a model of one array instead of a run's recipe.

Attempt, journal, store, observers, sinks and checkpoints are real. The recipe alone is left out, and never imported. So
a project can test everything around its training in milliseconds, without a GPU, data or other processes.
"""

import contextlib
import json
import math
import os
import random
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO
from unittest import mock

from holdfast import checkpoint
from holdfast.attempt import life
from holdfast.checkpoint import Payload, Saved, Tensor, in_memory
from holdfast.config import RunConfig
from holdfast.errors import CheckpointDamaged, ConfigError, HoldfastError
from holdfast.journal import Commit, now
from holdfast.provenance.canonical import mark_exactly, read_exactly
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import (
    Damaged,
    End,
    Evaluate,
    Evaluated,
    Event,
    Failed,
    Finished,
    Order,
    Progress,
    Ready,
    Restore,
    Restored,
    Save,
    Stop,
    Train,
    decode_order,
    encode_message,
)
from holdfast.rank.process import CONFIG_VARIABLE
from holdfast.recipe.probe import Probe
from holdfast.store import open_store

LR = 0.1
MOMENTUM = 0.9
# An id that no process and no process group has, so that no process gets its signals. Source: Linux, PID_MAX_LIMIT is
# 2**22.
NOBODY = 2**31 - 1
SIZE = 8


class ArrayModel:
    """A model that is one array of numbers, with its optimizer. Each step moves the numbers toward random numbers.

    A step depends on every part of the state, so that a part that a resume forgets changes the bytes of the next
    checkpoint. It uses only sums and products, so that every machine computes the same bytes.

    Attributes:
        step: the number of trained steps.
        history: an entry for each completed epoch, with ``avg_loss`` and ``metrics``.
    """

    def __init__(self, seed: int, steps_per_epoch: int) -> None:
        self._seed, self.steps_per_epoch = seed, steps_per_epoch
        self._values, self._momentum = array("d", bytes(8 * SIZE)), array("d", bytes(8 * SIZE))
        self.step, self._loss_sum, self._loss_steps = 0, 0.0, 0
        self.history: list[dict[str, Any]] = []

    @property
    def avg_loss(self) -> float | None:
        """Return the mean loss of this epoch so far, or of the last epoch if this epoch has no step yet."""
        if self._loss_steps:
            return self._loss_sum / self._loss_steps
        return float(self.history[-1]["avg_loss"]) if self.history else None

    def train_step(self) -> float:
        """Train one step. Return its loss."""
        drawn = random.Random(f"{self._seed} {self.step}")
        loss = 0.0
        for index, value in enumerate(self._values):
            gradient = value - drawn.random()
            loss += gradient * gradient / SIZE
            self._momentum[index] = MOMENTUM * self._momentum[index] + gradient
            self._values[index] -= LR * self._momentum[index]
        self.step += 1
        self._loss_sum, self._loss_steps = self._loss_sum + loss, self._loss_steps + 1
        if self.step % self.steps_per_epoch == 0:
            self.history.append({"avg_loss": self._loss_sum / self._loss_steps, "metrics": self.evaluate()})
            self._loss_sum, self._loss_steps = 0.0, 0
        return loss

    def evaluate(self) -> dict[str, float]:
        """Return the mean of the numbers, as a metric."""
        return {"mean": math.fsum(self._values) / SIZE}  # not sum(), whose bits Python 3.12 and 3.14 have changed

    def capture(self) -> Payload:
        """Return the state in the format of checkpoints; see `holdfast.FORMAT`."""
        arrays = {"model.values": self._values, "optimizer.momentum": self._momentum}
        progress = {
            "step": self.step, "epoch_loss_sum": mark_exactly(self._loss_sum), "epoch_loss_steps": self._loss_steps,
            "history": [each | {"avg_loss": mark_exactly(each["avg_loss"])} for each in self.history],
        }  # fmt: skip
        tree = {
            "model": {"values": {"$tensor": "model.values"}},
            "optimizer": {"momentum": {"$tensor": "optimizer.momentum"}},
            "progress": progress,
        }
        return Payload({name: Tensor("F64", (SIZE,), (each.tobytes(),)) for name, each in arrays.items()}, tree)

    def restore(self, payload: Payload) -> None:
        """Restore a captured state."""
        for name, values in (("model.values", self._values), ("optimizer.momentum", self._momentum)):
            data = b"".join(bytes(in_memory(piece)) for piece in payload.tensors[name].pieces)
            values[:] = array("d", data)
        progress = payload.tree["progress"]
        self.step, self._loss_steps = progress["step"], progress["epoch_loss_steps"]
        self._loss_sum = read_exactly(progress["epoch_loss_sum"])
        self.history = [each | {"avg_loss": read_exactly(each["avg_loss"])} for each in progress["history"]]


@contextlib.contextmanager
def array_ranks(*, steps_per_epoch: int = 10, kill_at: Iterable[int] = ()) -> Iterator[set[int]]:
    """Inside the block, train an `ArrayModel` in this process in place of the recipe of any run.

    Yield a set: the steps of ``kill_at`` in which no rank has died yet.

    Args:
        steps_per_epoch: the length of an epoch of every run.
        kill_at: steps in which the ranks die without a report, as by SIGKILL, once in each step. The attempt then
            starts new ranks from the last verified checkpoint. With real ranks it would pause before this retry; here
            it doesn't.
    """
    kills = set(kill_at)

    def spawn(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> "_Process":
        config = RunConfig.model_validate_json(environment[CONFIG_VARIABLE])
        return _Process(_Rank(config, steps_per_epoch, kills))

    with mock.patch.object(Ranks, "spawn", staticmethod(spawn)), mock.patch.object(life, "RETRY_AFTER_S", 0.0):
        yield kills


class _Killed(Exception):
    """The exception that ends a rank without a report."""


class _Process:
    """A rank that runs in a thread, with the interface of `holdfast.rank.spawn.Process`."""

    pid = NOBODY

    def __init__(self, rank: "_Rank") -> None:
        orders, orders_in = os.pipe()
        events, events_in = os.pipe()
        self.stdin = os.fdopen(orders_in, "w", buffering=1, encoding="utf-8")
        self.stdout = os.fdopen(events, encoding="utf-8")
        self._returncode = 0
        self._thread = threading.Thread(target=self._serve, args=(rank, orders, events_in), daemon=True)
        self._thread.start()

    def _serve(self, rank: "_Rank", orders: int, events: int) -> None:
        with (
            os.fdopen(orders, encoding="utf-8") as orders_in,
            os.fdopen(events, "w", buffering=1, encoding="utf-8") as sent,
        ):
            try:
                rank.serve(map(decode_order, orders_in), lambda event: sent.write(encode_message(event)))
            except _Killed:
                self._returncode = -signal.SIGKILL
            except HoldfastError as error:
                self._returncode = error.exit_code
                sent.write(encode_message(Failed.of(error)))

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self._returncode

    def wait(self) -> int:
        self._thread.join()
        return self._returncode


class _Rank:
    """A rank that executes orders as `holdfast.rank.serving` does, with an `ArrayModel`.

    Args:
        kills: the steps in which to die. A step is removed when the rank dies in it.
    """

    def __init__(self, config: RunConfig, steps_per_epoch: int, kills: set[int]) -> None:
        self._config, self._kills = config, kills
        self._folder = open_store(config.store).inside(config.run).existing()
        self._model = ArrayModel(config.seed, steps_per_epoch)
        self._trail: list[str] = []
        self._saved = ""  # the content id of the last checkpoint

    def serve(self, orders: Iterator[Order], send: Callable[[Event], object]) -> None:
        """Execute orders until an order to end or to stop.

        Raises:
            _Killed: the rank was to die in a step.
            HoldfastError: a checkpoint can't be written, or the array model can't execute an order.
        """
        send(self._describe())
        for order in orders:
            match order:
                case Restore():
                    send(self._restore(order.commit))
                case Evaluate():
                    send(Evaluated(metrics=self._model.evaluate(), measured=[], anneals={}, probe=Probe()))
                case Train():
                    self._train(order, send)
                case Save() | Stop():
                    pass  # nothing is left to save, because each `Train` order has saved before it ended
                case End():
                    break
                case _:
                    raise ConfigError(
                        f"the array model of array_ranks doesn't support {type(order).__name__}",
                        hint="prove, audit and init_from need the recipe's own ranks: call them outside array_ranks",
                    )
            if isinstance(order, Stop):
                return
        if self._model.step >= self._config.epochs * self._model.steps_per_epoch:
            send(Finished())

    def _describe(self) -> Ready:
        """Describe the array model. Its environment is empty, because its bytes are the same on every machine."""
        return Ready(
            settings=self._config.settings, defaults={}, data={"sha256": ""},
            steps_per_epoch=self._model.steps_per_epoch, samples_per_step=1, sample_size=1, unit="samples",
            model_params=SIZE, device="cpu", environment={},
        )  # fmt: skip

    def _restore(self, commit: Commit) -> Restored | Damaged:
        try:
            self._model.restore(checkpoint.read_payload(self._folder, commit))
        except CheckpointDamaged as error:
            return Damaged.of(error)
        self._saved = commit.checkpoint_sha256
        return Restored(step=commit.step, summary="the array")

    def _train(self, order: Train, send: Callable[[Event], object]) -> None:
        """Train up to the order's last step, report each step, then save and report the checkpoint."""
        model, began = self._model, time.monotonic()
        while model.step < order.stop:
            loss = model.train_step()
            if model.step in self._kills:
                self._kills.remove(model.step)
                raise _Killed
            line = {"step": model.step, "epoch": (model.step - 1) // model.steps_per_epoch, "loss": loss, "lrs": [LR]}
            self._trail.append(json.dumps(line, sort_keys=True))
            send(Progress(step=model.step, loss=loss, steps_per_s=1 / (time.monotonic() - began)))
        send(self._save(order, time.monotonic() - began))

    def _save(self, order: Train, train_s: float) -> Saved:
        model = self._model
        epoch, within = divmod(model.step, model.steps_per_epoch)
        metadata = {
            "epoch": epoch, "created_at": now(), "optimizer_steps_total": model.step,
            "optimizer_steps_epoch": within or model.steps_per_epoch, "steps_per_epoch": model.steps_per_epoch,
            "grad_accum": 1, "avg_loss": model.avg_loss, "scheduler_type": "constant", "current_lrs": [LR],
            "learning_rate_history": [[LR]] * epoch, "learning_rate_history_len": epoch,
            "metrics": model.history[-1]["metrics"] if model.history else {}, "model_params": SIZE,
            "previous_checkpoint_sha256": self._saved, "config_fingerprint": order.fingerprint,
        }  # fmt: skip
        trail = "".join(f"{line}\n" for line in self._trail)
        self._trail.clear()
        saved = checkpoint.save(self._folder, model.capture(), metadata, trail)
        self._saved = saved.metadata.checkpoint_sha256
        return saved.model_copy(update={"train_s": train_s})

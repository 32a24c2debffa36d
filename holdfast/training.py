"""The loop, and what it runs on."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    gather_object,
    send_to_device,
)

from holdfast import checkpoint, determinism, state
from holdfast.config import RunConfig
from holdfast.data import Order, StepSampler, build_loader, digest
from holdfast.errors import ConfigError, RecipeError
from holdfast.journal import now
from holdfast.recipe import Recipe, build_recipe
from holdfast.schedule import Schedule
from holdfast.store import Store

Report = Callable[[dict[str, Any]], None]


@dataclass
class Progress:
    """Where a run stands. Part of the state: equal runs have equal progress, however they were cut into chunks."""

    step: int = 0
    epoch_loss_sum: float = 0.0
    epoch_loss_steps: int = 0
    # One entry a completed epoch: avg_loss, lrs (of its last step, one a parameter group) and metrics.
    history: list[dict[str, Any]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update({name: saved[name] for name in vars(self)})

    @property
    def avg_loss(self) -> float | None:
        """Mean loss of the steps of this epoch so far, or of the epoch that has just ended."""
        if self.epoch_loss_steps:
            return self.epoch_loss_sum / self.epoch_loss_steps
        return self.history[-1]["avg_loss"] if self.history else None


class Training:
    """A recipe made ready to train in this process, at step 0.

    Raises:
        RecipeError, ConfigError: the recipe can't be built, or doesn't fit the configuration.
    """

    def __init__(self, config: RunConfig) -> None:
        use_cuda = torch.cuda.is_available() and config.compute.device != "cpu"
        if config.compute.device == "cuda" and not use_cuda:
            raise ConfigError('compute.device = "cuda": torch sees no GPU here', hint='device = "auto" or "cpu"')
        determinism.apply(config.determinism, config.seed)
        self.config = config
        self.recipe, self.settings = build_recipe(config.recipe, config.settings)
        self.accelerator = Accelerator(
            cpu=not use_cuda,
            mixed_precision=config.compute.mixed_precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=self.recipe.grad_accum, sync_with_dataloader=False
            ),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
        # Every rank builds the same model; from here on each has random numbers of its own.
        determinism.reseed(config.seed + self.accelerator.process_index)
        self.order = self._order()
        self.steps_per_epoch = self.recipe.steps_per_epoch or self.order.steps_per_pass
        self.model, self.optimizer = self.accelerator.prepare(self.recipe.model, self.recipe.optimizer)
        schedule = self.recipe.schedule
        self.scheduler: Any = (
            schedule.build(self.recipe.optimizer, self.steps_per_epoch) if isinstance(schedule, Schedule) else schedule
        )
        self.scheduler_type = schedule.name if isinstance(schedule, Schedule) else type(schedule).__name__
        self.progress = Progress()
        self.metrics: list[dict[str, Any]] = []  # a line a step, since the last checkpoint
        self._unread: list[tuple[int, torch.Tensor, torch.Tensor, list[float]]] = []
        self._batches: Iterator[Any] | None = None

    def _order(self) -> Order:
        recipe: Recipe = self.recipe
        ranks = self.accelerator.num_processes
        if recipe.batch_size % ranks:
            raise ConfigError(f"compute.ranks = {ranks}: the batch of {recipe.batch_size} can't be shared out evenly")
        order = Order(len(recipe.data), recipe.batch_size, recipe.grad_accum, self.config.seed)  # type: ignore[arg-type]
        if order.steps_per_pass < 1:
            raise RecipeError(
                f"the data has {order.samples} samples, but one step takes {recipe.batch_size} x {recipe.grad_accum}",
                hint="more data, or a smaller batch_size",
            )
        return order

    @property
    def lrs(self) -> list[float]:
        """The learning rate of each parameter group, as the next step will use it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        return gather_object([value]) if self.accelerator.num_processes > 1 else [value]

    def next_batch(self) -> Any:
        """The next micro-batch of this rank, on its device."""
        if self._batches is None:
            sampler = StepSampler(
                self.order,
                self.progress.step,
                self.config.epochs * self.steps_per_epoch,
                self.accelerator.process_index,
                self.accelerator.num_processes,
            )
            workers = self.config.compute.loader_workers
            self._batches = iter(build_loader(self.recipe.data, sampler, self.recipe.collate, workers))
        return send_to_device(next(self._batches), self.accelerator.device)

    def record_step(self, loss: torch.Tensor, grad_norm: torch.Tensor, lrs: list[float]) -> None:
        """One more step is done. Its numbers stay on the device until they are read."""
        self.progress.step += 1
        self._unread.append((self.progress.step, loss, grad_norm, lrs))
        if self.progress.step % self.steps_per_epoch == 0:
            self._end_epoch()

    def read_metrics(self) -> list[dict[str, Any]]:
        """A line for each step since the last checkpoint, with what has been waiting on the device."""
        if self._unread:
            numbers = torch.stack([torch.stack([loss, norm]) for _, loss, norm, _ in self._unread])
            for (step, _, _, lrs), (loss, norm) in zip(self._unread, self._mean(numbers).tolist(), strict=True):
                self.progress.epoch_loss_sum += loss
                self.progress.epoch_loss_steps += 1
                line = {"step": step, "epoch": (step - 1) // self.steps_per_epoch + 1, "loss": loss}
                samples = digest(self.order.step_indices(step - 1))
                self.metrics.append(line | {"grad_norm": norm, "lrs": lrs, "samples": samples})
            self._unread.clear()
        return self.metrics

    def _mean(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(numbers, "mean") if self.accelerator.num_processes > 1 else numbers

    def _end_epoch(self) -> None:
        last = self.read_metrics()[-1]
        metrics = self._evaluate()
        if metrics:
            last["metrics"] = metrics
        self.progress.history.append({"avg_loss": self.progress.avg_loss, "lrs": last["lrs"], "metrics": metrics})
        self.progress.epoch_loss_sum, self.progress.epoch_loss_steps = 0.0, 0

    def _evaluate(self) -> dict[str, float]:
        if self.recipe.evaluate is None:
            return {}
        rng = state.capture_rng()
        model = self.accelerator.unwrap_model(self.model).eval()
        with torch.no_grad():
            metrics = {name: float(value) for name, value in self.recipe.evaluate(model).items()}
        model.train()
        state.restore_rng(rng)
        return metrics


def train(training: Training, stop: int, is_stopping: Callable[[], bool], report: Report) -> None:
    """Train until ``stop`` steps of the run are completed, or the step in hand when a stop is asked for."""
    began, first = time.monotonic(), training.progress.step
    while training.progress.step < stop and not is_stopping():
        lrs = training.lrs
        loss, grad_norm = train_step(training)
        training.record_step(loss, grad_norm, lrs)
        step = training.progress.step
        if step % training.config.log.every == 0 or step == stop:
            last = training.read_metrics()[-1]
            speed = (step - first) / (time.monotonic() - began)
            report({"step": step, "loss": last["loss"], "steps_per_s": speed, "metrics": last.get("metrics", {})})


def train_step(training: Training) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step; the mean loss of its micro-batches and the gradient's norm, still on the device."""
    accelerator, recipe = training.accelerator, training.recipe
    model, optimizer = training.model, training.optimizer
    model.train()
    loss_sum = torch.zeros((), device=accelerator.device)
    grad_norm = torch.zeros((), device=accelerator.device)
    for _ in range(recipe.grad_accum):
        batch = training.next_batch()
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = recipe.loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), recipe.clip_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
        loss_sum += loss.detach().float()
    if training.scheduler is not None:
        training.scheduler.step()
    return loss_sum / recipe.grad_accum, grad_norm.float()


def save(training: Training, run: Store, parent: str, fingerprint: str) -> checkpoint.Saved | None:
    """The state is a complete, durable checkpoint on the store, with the metrics of the steps since the last one.

    Only the main rank writes; the others return None.

    Args:
        parent: the content id of the checkpoint that these steps were trained from.
    """
    lines = training.read_metrics()
    captured = state.capture(training)
    saved = None
    if training.accelerator.is_main_process:
        text = "".join(json.dumps(_finite(line), sort_keys=True) + "\n" for line in lines)
        saved = checkpoint.save(run, state.to_payload(captured), describe_state(training, parent, fingerprint), text)
    training.metrics = []
    return saved


def describe_state(training: Training, parent: str, fingerprint: str) -> dict[str, Any]:
    """The fields of `checkpoint.Metadata` that don't depend on the payload's bytes."""
    progress = training.progress
    epoch, within = divmod(progress.step, training.steps_per_epoch)
    rates = [entry["lrs"] for entry in progress.history]
    return {
        "epoch": epoch,
        "created_at": now(),
        "optimizer_steps_total": progress.step,
        "optimizer_steps_epoch": within,
        "steps_per_epoch": training.steps_per_epoch,
        "grad_accum": training.recipe.grad_accum,
        "avg_loss": progress.avg_loss,
        "scheduler_type": training.scheduler_type,
        "current_lrs": training.lrs,
        "learning_rate_history": rates,
        "learning_rate_history_len": len(rates),
        "metrics": progress.history[-1]["metrics"] if progress.history else {},
        "model_params": count_params(training),
        "previous_checkpoint_sha256": parent,
        "config_fingerprint": fingerprint,
    }


def count_params(training: Training) -> int:
    """How many numbers the model has; tied ones count once."""
    return sum(parameter.numel() for parameter in training.model.parameters())


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)

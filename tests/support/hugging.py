"""A small Trainer for the tests of its adapter, with callbacks that record what they see. It needs transformers."""

import random
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import holdfast
from holdfast.adapters import transformers as held

SAMPLES, BATCH_SIZE, ACCUMULATED = 27, 4, 2
# Seven batches, of which two make a step, and the last one makes a step alone.
PER_EPOCH, EPOCHS = 4, 3
TOTAL = PER_EPOCH * EPOCHS

# What the callbacks of this process have seen, in order.
seen: list[tuple[str, int, dict[str, float]]] = []


class Points(Dataset[dict[str, Any]]):
    """Points of a plane, labelled by their quadrant."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = self.points[index]
        return {"points": point, "labels": (point > 0).long() @ torch.tensor([1, 2])}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        yield from (Points(SAMPLES, 0)[index] for index in range(SAMPLES))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(points)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """Records the events that it sees, for this process and for the run, and carries state of several kinds."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.random = random.Random(5)
        self.best, self.decay, self.bar = float("inf"), np.ones(2), None
        self.started: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.bar, self.decay, self.best = object(), np.ones(2), float("inf")  # type: ignore[assignment]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._note("epoch_begin", state, {"drawn": float(torch.rand(()))})

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.decay *= 0.9
        self._note("step_end", state, {"drawn": self.random.random(), "decay": float(self.decay[0])})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "train_loss" in logs:
            self._note("log", state, {"train_loss": logs["train_loss"]})
        else:
            self._note("log", state, {**logs})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        self.best = min(self.best, metrics["eval_loss"])
        self._note("evaluate", state, {**metrics, "best": self.best})

    def _note(self, event: str, state: Any, numbers: dict[str, float]) -> None:
        steady = {name: each for name, each in numbers.items() if not name.endswith(held.MEASURED)}
        seen.append((event, state.global_step, steady))
        self.seen.append({"event": event, "step": state.global_step, **numbers})


class Stopper(transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == PER_EPOCH + 1


class Marker(transformers.TrainerCallback):  # type: ignore[misc]
    """Has a time in its state."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.marks = {"at": random.SystemRandom().random()}


def make(output_dir: str, arguments: dict[str, Any]) -> Any:
    """Return the Trainer of a script that doesn't know Holdfast."""
    given = {
        "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH_SIZE, "learning_rate": 0.05, "seed": 3,
        "gradient_accumulation_steps": ACCUMULATED, "logging_steps": 3, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "eval_strategy": "epoch", "dataloader_pin_memory": False,
    }  # fmt: skip
    transformers.set_seed(3)
    return transformers.Trainer(
        model=Net(),
        args=transformers.TrainingArguments(output_dir, **(given | arguments)),
        train_dataset=Points(SAMPLES, 0),
        eval_dataset=Points(10, 1),
        callbacks=[Recorder()],
    )


def train(run: holdfast.Run, output_dir: str, arguments: dict[str, Any] | None = None) -> None:
    trainer = make(output_dir, arguments or {})
    result = held.train(run, trainer)
    seen.append(("result", result.global_step, {"loss": result.training_loss}))


def make_plain(output_dir: str, arguments: dict[str, Any]) -> Any:
    """Return a Trainer none of whose callbacks draws random numbers."""
    trainer = make(output_dir, arguments)
    trainer.remove_callback(Recorder)
    return trainer


def train_plain(run: holdfast.Run, output_dir: str, arguments: dict[str, Any] | None = None) -> None:
    trainer = make_plain(output_dir, arguments or {})
    held.train(run, trainer)
    seen.append(("history", trainer.state.global_step, {"logs": len(trainer.state.log_history)}))


def mistaken(run: holdfast.Run, output_dir: str, how: str, arguments: dict[str, Any] | None = None) -> None:
    trainer = make(output_dir, arguments or {})
    options: dict[str, Any] = {}
    match how:
        case "resumes by itself":
            options["resume_from_checkpoint"] = True
        case "stops early":
            trainer.add_callback(transformers.EarlyStoppingCallback())
        case "stops":
            trainer.add_callback(Stopper())
        case "streams":
            trainer.train_dataset = Stream()
        case "is none":
            trainer = Net()
        case "marks" | "measures":
            trainer.add_callback(Marker())
        case "deepspeed":
            trainer.args.deepspeed = "a file"
    held.train(run, trainer, measured=["at"] if how == "measures" else (), **options)


class Allocator(transformers.TrainerCallback):  # type: ignore[misc]
    """Allocates AdaLoRA's ranks in each step, as peft's documentation shows it."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        model.base_model.update_and_allocate(state.global_step + 1)


def adapts(run: holdfast.Run, output_dir: str) -> None:
    """Train adapters with AdaLoRA."""
    import peft

    trainer = make(output_dir, {"eval_strategy": "no"})
    layers = {"target_modules": ["layers.0", "layers.3"], "init_r": 4, "target_r": 2}
    steps = {"tinit": 1, "tfinal": 4, "deltaT": 2, "total_step": TOTAL}
    adapted = peft.get_peft_model(trainer.model, peft.AdaLoraConfig(**layers, **steps))
    own = transformers.Trainer(adapted, trainer.args, train_dataset=trainer.train_dataset, callbacks=[Allocator()])
    held.train(run, own)

"""A recipe that trains in a second: a small net with dropout on generated data. The environment has the knobs that
tests change between attempts, so that a change is no drift."""

import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from holdfast import Recipe, Schedule

SAMPLES = 64


class Made(Dataset[tuple[Tensor, Tensor]]):
    """A linear function with noise. It notes the index of every sample that is read in the file TOY_SAMPLES."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator)
        self.notes = os.environ.get("TOY_SAMPLES")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.notes:
            with Path(self.notes).open("a") as notes:
                notes.write(f"{index}\n")
        return self.x[index], self.y[index]


class Average:
    """An exponential average of the weights: state outside the model and the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.mean[name] = self.mean[name].to(parameter.device).lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.mean

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean = state


def wait() -> None:
    """Wait TOY_DELAY_S seconds. If the folder TOY_HURRIED has a file of the run's name, the run has no time to wait."""
    delay_s = float(os.environ.get("TOY_DELAY_S", "0"))
    hurried = os.environ.get("TOY_HURRIED")
    if delay_s and not (hurried and (Path(hurried) / json.loads(os.environ["HOLDFAST_CONFIG"])["run"]).exists()):
        time.sleep(delay_s)


def wait_for(held: Path) -> None:
    """Wait while a file exists; see `toy`."""
    if held.exists():
        held.with_suffix(f".{os.getpid()}.waits").touch()
    while held.exists():
        time.sleep(0.01)


def note_trained(model: nn.Module) -> None:
    """Add one mark for a trained micro-batch to the file of the run's name in the folder TOY_TRAINED."""
    folder = os.environ.get("TOY_TRAINED")
    if folder and model.training:
        with (Path(folder) / json.loads(os.environ["HOLDFAST_CONFIG"])["run"]).open("a") as marks:
            marks.write(".")


def toy(
    lr: float = 0.05, width: int = 16, schedule: str = "linear", schedule_epochs: float = 3, poison: int = -1
) -> Recipe:
    """Build the recipe. Its loss raises on a batch with sample ``poison``, and waits while a file TOY_HELD exists.

    A rank that waits makes a file with the suffix ``.waits`` beside it, named after itself.
    """
    data = Made()
    held = os.environ.get("TOY_HELD")
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": lr / 2}], lr=lr
    )
    average = Average(model)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        wait()
        if held:
            wait_for(Path(held))
        x, y = batch
        if poison >= 0 and (x == data.x[poison]).all(1).any():
            raise ZeroDivisionError("as it was told to")
        average.update()
        note_trained(model)
        return F.mse_loss(model(x), y)

    return Recipe(
        model=model,
        data=data,
        optimizer=optimizer,
        loss=loss,
        batch_size=4,
        grad_accum=2,
        steps_per_epoch=10,
        clip_norm=1.0,
        schedule=Schedule(schedule, schedule_epochs, warmup_steps=3, final_lr_scale=0.1),
        evaluate=lambda model: {"weight": next(model.parameters()).sum().item()},
        extras={"average": average},
    )

"""Runs with one planted difference each: whole lives in one process, with the records that a rank makes."""

import contextlib
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState

from holdfast import checkpoint
from holdfast.attempt import Line
from holdfast.attempt.lineage import describe_present
from holdfast.config import RunConfig
from holdfast.journal import Commit, Journal
from holdfast.provenance import opened_files as opened
from holdfast.rank.description import describe_training
from holdfast.rank.record import CodeRecord
from holdfast.store import open_store
from holdfast.training import Gate, SaveRequest, Training, begin_save, resume, run_program, steps
from tests.support.lives import Lives

SAMPLES = 48
STEPS = 12
RECIPE = """\
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import planted_loss
import planted_package
from holdfast import Anneal, Recipe, Schedule

POINTS = Path(__file__).with_name("points.npy")


def build(
    lr: float = 0.02, weight_decay: float = 0.1, dropout: float = 0.1, width: int = 64, batch_size: int = 4,
    clip_norm: float = 1.0, schedule: str = "linear", heat: float = 1.0,
) -> Recipe:
    points = torch.from_numpy(np.load(POINTS))
    model = nn.Sequential(
        nn.Linear(1024, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1)
    )
    average = nn.Linear(1024, width)
    average.load_state_dict(model[0].state_dict())
    temperature = Anneal(heat, 0.5, epochs=2)

    def follow() -> None:
        with torch.no_grad():
            average.weight.lerp_(model[0].weight, 0.1)

    return Recipe(
        model=model, data=TensorDataset(points), loss=lambda model, batch: planted_loss.loss(model, batch, temperature),
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=lr * planted_package.SCALE, weight_decay=weight_decay, eps=0.01
        ),
        batch_size=batch_size, grad_accum=2, clip_norm=clip_norm, steps_per_epoch=6, after_step=follow,
        schedule=Schedule(schedule, 2, warmup_steps=2, final_lr_scale=0.1), extras={"average": average},
        anneals={"temperature": temperature},
    )
"""
# Every planted difference is large, so that no CPU's kernels round it away. A large eps makes a step of AdamW depend on
# the scale of the gradient, and so on the clipping norm. The loss depends on the number of threads itself, because CPUs
# differ in the step in which torch's kernels first depend on it (seen: 2, 3 and 5).
LOSS = """\
import torch


def loss(model: torch.nn.Module, batch: list[torch.Tensor], temperature: object) -> torch.Tensor:
    far = (model(batch[0]) - batch[0].sum(1, keepdim=True)) ** 2
    large = torch.cat([value.flatten() for value in model.parameters()]).square().mean()
    return far.mean() * temperature.value * torch.get_num_threads() + large
"""


@dataclass(frozen=True)
class Planted:
    """A folder with a recipe, and the lives of its runs."""

    folder: Path
    nursery: Lives

    def write(self, code: str = LOSS, scale: float = 1.0, version: str = "1.0", **points: Any) -> "Planted":
        """Write the recipe's code, its package and its data, as `make_points` makes it."""
        (self.folder / "planted_recipe.py").write_text(RECIPE)
        (self.folder / "planted_loss.py").write_text(code)
        np.save(self.folder / "points.npy", make_points(**points))
        (self.folder / "planted_package.py").write_text(f"SCALE = {scale}\n")
        for old in self.folder.glob("*.dist-info/*"):
            old.unlink()
        info = self.folder / f"planted_package-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: planted-package\nVersion: {version}\n")
        (info / "RECORD").write_text("planted_package.py,,\n")
        for old in self.folder.glob("*.dist-info"):
            if not any(old.iterdir()):
                old.rmdir()
        return self

    def train(self, run: str, *, until: int = STEPS, flip: str = "", flip_at: int = 0, **changed: Any) -> str:
        """Train a run, or train it further; return it as the command line names it.

        Args:
            flip, flip_at: the tensor of which a bit flips, and the step after which it does.
            changed: settings of the configuration by their dotted names, with ``__`` for a dot.
        """
        settings: dict[str, Any] = {
            "recipe": "planted_recipe:build", "run": run, "store": f"{self.folder}/runs", "epochs": 2,
            "chunk": {"steps": 3},
        }  # fmt: skip
        for name, value in changed.items():
            *tables, key = name.split("__")
            table = settings
            for each in tables:
                table = table.setdefault(each, {})
            table[key] = value
        done = self.nursery.call(
            "tests.support.planted:live", settings, until, flip, flip_at,
            PYTHONPATH=str(self.folder), PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return f"{self.folder}/runs/{run}"


def make_points(samples: int = SAMPLES, other: int = -1) -> "np.ndarray[Any, Any]":
    """Make the data; ``other`` is the index of a sample with a different value."""
    points = np.random.default_rng(7).standard_normal((samples, 1024)).astype(np.float32)
    if other >= 0:
        points[other, 0] += 1
    return points


def flip_bit(training: Training, name: str) -> None:
    """Flip a bit in the fraction of the first value of a tensor: of the model, of a moment or of an extra."""
    kind, _, rest = name.partition(".")
    if kind == "optimizer":
        parameter, _, moment = rest.rpartition(".")
        tensor = training.recipe.optimizer.state[dict(training.model.named_parameters())[parameter]][moment]
    else:
        owner = training.model if kind == "model" else training.recipe.extras[kind]
        tensor = owner.state_dict()[rest]
    tensor.view(torch.int32).view(-1)[0] ^= 2**20


def live(settings: dict[str, Any], until: int, flip: str, flip_at: int) -> int:
    """Live one attempt in this process, with a rank's record of code, files and machine."""
    AcceleratorState._reset_state(reset_partial_state=True)  # the nursery's was without autocast
    config = RunConfig.model_validate(settings)
    before, watching = {*sys.modules}, contextlib.ExitStack()
    files = watching.enter_context(opened.record_opened_files())

    def serve(training: Training) -> Generator[None, None, None]:
        watching.close()
        built = describe_training(training, CodeRecord(training, before, files))
        present = describe_present(config, built, None)
        journal = Journal(open_store(config.store), config.run)
        journal.begin(config.recipe)
        number = journal.attempts() + 1
        journal.claim_attempt(number, "test", "host", os.getpid(), present.environment)
        journal.record_config(present.fingerprint, present.identity, config.model_dump(mode="json"))
        line = Line(journal, number, present.fingerprint, training.steps_per_epoch)
        line.resume(lambda commit: restore(training, journal, commit))
        while (step := line.head.step if line.head else 0) < until:
            stop = min(config.next_stop(step, training.steps_per_epoch, 1), until)
            for each in sorted({flip_at, stop}):
                if step < each <= stop:
                    yield from steps(training, each, lambda: False)
                    if each == flip_at:
                        flip_bit(training, flip)
            begin_save(training, SaveRequest(journal.store, present.fingerprint, present.environment))
            saved = training.saver.wait()
            assert saved is not None
            line.commit(saved, "chunk")

    run_program(config, serve)
    return 0


def restore(training: Training, journal: Journal, commit: Commit) -> None:
    payload = checkpoint.read_payload(journal.store, commit)
    metadata = checkpoint.read_metadata(journal.store, commit.path)
    assert metadata is not None
    resume(training, payload, metadata, Gate("record"), lambda *skipped: None)

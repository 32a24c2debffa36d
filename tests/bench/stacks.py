"""``python -m tests.bench.stacks STACK FOLDER``: the same steps and saves, as each stack's documentation says.

What holdfast does is among them. The others run in an environment of their own, which has no holdfast: nothing outside
of the class that is asked for may need what that environment lacks.
"""

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.bench.disk import make_cold
from tests.bench.workload import CLIP_NORM, LR, SIZES, Loop, loss, make_data, make_model, make_optimizer

STEPS, EVERY = 32, 9
ROUNDS = 2


class Watch:
    """When steps were done, and how long saves took.

    Args:
        every: steps between saves; 0 for none.
        is_durable: whether each save is waited for, and what it wrote is fsynced.
    """

    def __init__(self, folder: Path, every: int = EVERY, *, is_durable: bool = False) -> None:
        self.folder, self.every, self.is_durable = folder, every, is_durable
        self.steps: list[float] = []
        self.stalls: list[float] = []
        self.durables: list[float] = []

    def note_step(self) -> None:
        self.steps.append(time.perf_counter())

    @property
    def elapsed(self) -> float:
        """Seconds from the second step to the last; the first one takes memory."""
        return self.steps[STEPS - 1] - self.steps[1]

    def is_due(self) -> bool:
        return bool(self.every) and not len(self.steps) % self.every

    @contextlib.contextmanager
    def saving(self, finish: Callable[[], object] = lambda: None) -> Iterator[None]:
        """The block saves; ``finish`` waits for what it has left to be done beside the training."""
        began = time.perf_counter()
        yield
        self.note_save(began, finish)

    def note_save(self, began: float, finish: Callable[[], object] = lambda: None) -> None:
        self.stalls.append(time.perf_counter() - began)
        if self.is_durable:
            finish()
            for path in self.folder.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            self.durables.append(time.perf_counter() - began)


class Bare:
    """No saves."""

    def __init__(self, size: str, folder: Path) -> None:
        self.folder, self.loop = folder, Loop(size)

    def train(self, watch: Watch) -> None:
        for _ in range(STEPS):
            self.loop.step()
            watch.note_step()
            if watch.is_due():
                self.save(watch)

    def save(self, watch: Watch) -> None:
        raise NotImplementedError

    def restore(self) -> float:
        """Seconds from the newest checkpoint, on the disk, to a state that can be trained further."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.loop.model, self.loop.optimizer)
        return {"model": model, "optimizer": optimizer}


class DCP(Bare):
    def save(self, watch: Watch) -> None:
        import torch.distributed.checkpoint as dcp

        with watch.saving():
            dcp.save(self.state(), checkpoint_id=self.folder / "dcp", no_dist=True)

    def restore(self) -> float:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        began = time.perf_counter()
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder / "dcp", no_dist=True)
        model, optimizer = self.loop.model, self.loop.optimizer
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return time.perf_counter() - began


class AsyncDCP(DCP):
    def save(self, watch: Watch) -> None:
        import torch.distributed.checkpoint as dcp

        saves: list[Any] = []
        with watch.saving(lambda: saves[0].result()):
            if hasattr(self, "last"):
                self.last.result()  # one at a time
            saves.append(dcp.async_save(self.state(), checkpoint_id=self.folder / "dcp", no_dist=True))
            self.last = saves[0]

    def restore(self) -> float:
        self.last.result()
        return super().restore()


class Accelerate(Bare):
    def __init__(self, size: str, folder: Path) -> None:
        from accelerate import Accelerator

        super().__init__(size, folder)
        self.accelerator, loop = Accelerator(cpu=True), self.loop
        loop.model, loop.optimizer, self.loader = self.accelerator.prepare(loop.model, loop.optimizer, loop.loader)

    def train(self, watch: Watch) -> None:
        while len(watch.steps) < STEPS:
            for batch in self.loader:
                self.accelerator.backward(loss(self.loop.model, batch))
                self.accelerator.clip_grad_norm_(self.loop.model.parameters(), CLIP_NORM)
                self.loop.optimizer.step()
                self.loop.optimizer.zero_grad()
                watch.note_step()
                if watch.is_due():
                    self.save(watch)
                if len(watch.steps) == STEPS:
                    break

    def save(self, watch: Watch) -> None:
        with watch.saving():
            self.accelerator.save_state(str(self.folder / "accelerate"))

    def restore(self) -> float:
        began = time.perf_counter()
        self.accelerator.load_state(str(self.folder / "accelerate"))
        return time.perf_counter() - began


class Lightning:
    def __init__(self, size: str, folder: Path) -> None:
        self.size, self.path = size, folder / "lightning.ckpt"

    def train(self, watch: Watch, resume_from: Path | None = None) -> float:
        """Seconds until it began to train."""
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self, size: str) -> None:
                super().__init__()
                self.stack = make_model(size)

            def training_step(self, batch: Any, index: int) -> Any:
                return loss(self.stack, batch)

            def configure_optimizers(self) -> Any:
                return make_optimizer(self.stack)

        class Saves(lightning.Callback):
            began = 0.0

            def on_train_start(self, trainer: Any, module: Any) -> None:
                self.began = time.perf_counter()

            def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
                watch.note_step()
                if watch.is_due():
                    with watch.saving():
                        trainer.save_checkpoint(path)

        path, saves = self.path, Saves()
        loader = torch.utils.data.DataLoader(make_data(self.size), SIZES[self.size].batch, shuffle=True, drop_last=True)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=STEPS if resume_from is None else EVERY * (STEPS // EVERY) + 1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=CLIP_NORM, callbacks=[saves], default_root_dir=path.parent,
        )  # fmt: skip
        module, began = Module(self.size), time.perf_counter()
        trainer.fit(module, loader, ckpt_path=resume_from, weights_only=False if resume_from else None)
        return saves.began - began

    def restore(self) -> float:
        """What beginning with a checkpoint takes longer than beginning without."""
        fresh = self.train(Watch(self.path.parent, 0))
        return self.train(Watch(self.path.parent, 0), self.path) - fresh


class Transformers:
    def __init__(self, size: str, folder: Path) -> None:
        self.size, self.folder = size, folder

    def train(self, watch: Watch, resume_from: Path | None = None) -> float:
        """Seconds until it began to train."""
        import transformers

        class Model(torch.nn.Module):
            def __init__(self, size: str) -> None:
                super().__init__()
                self.stack = make_model(size)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": loss(self.stack, (x, y))}

        class Saves(transformers.TrainerCallback):
            began = 0.0

            def on_train_begin(self, *arguments: Any, **named: Any) -> None:
                self.began = time.perf_counter()

            def on_step_end(self, *arguments: Any, **named: Any) -> None:
                watch.note_step()

            def on_save(self, *arguments: Any, **named: Any) -> None:
                watch.note_save(watch.steps[-1])  # which began as soon as the step was done

        data = make_data(self.size)
        saves = Saves()
        trainer = transformers.Trainer(
            model=Model(self.size),
            args=transformers.TrainingArguments(
                output_dir=str(self.folder), max_steps=STEPS if resume_from is None else STEPS + 1,
                save_strategy="steps" if watch.every else "no", save_steps=watch.every or 1, save_total_limit=1,
                per_device_train_batch_size=SIZES[self.size].batch, dataloader_drop_last=True, learning_rate=LR,
                max_grad_norm=CLIP_NORM, use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
                ignore_data_skip=True, remove_unused_columns=False, dataloader_pin_memory=False,
            ),
            train_dataset=data,
            data_collator=lambda samples: dict(zip("xy", map(torch.stack, zip(*samples, strict=True)), strict=True)),
            callbacks=[saves],
        )  # fmt: skip
        began = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        return saves.began - began

    def restore(self) -> float:
        """What beginning with a checkpoint takes longer than beginning without."""
        fresh = self.train(Watch(self.folder, 0))
        (newest,) = self.folder.glob("checkpoint-*")
        return self.train(Watch(self.folder, 0), newest) - fresh


class Holdfast:
    """As a rank trains, saves at the end of a chunk, and resumes; see `holdfast.rank.serving`."""

    def __init__(self, size: str, folder: Path) -> None:
        from holdfast.config import RunConfig
        from holdfast.store import open_store
        from holdfast.training import Training
        from tests.bench.recipe import STEPS_VARIABLE

        os.environ[STEPS_VARIABLE] = os.devnull
        self.store = open_store(str(folder))
        config = {
            "recipe": "tests.bench.recipe:stack", "run": "bench", "settings": {"size": size, "steps": 10**6},
            "determinism": {"threads": torch.get_num_threads()},
        }  # fmt: skip
        self.training = Training(RunConfig.model_validate(config))

    def train(self, watch: Watch) -> None:
        from holdfast.training import SaveRequest, begin_save
        from tests.support.trainings import train_to

        first = self.training.progress.step

        def is_pausing() -> bool:
            if self.training.progress.step > first + len(watch.steps):
                watch.note_step()
                return watch.is_due()
            return False

        while len(watch.steps) < STEPS:
            train_to(self.training, first + STEPS + 1, lambda: is_pausing() or len(watch.steps) == STEPS)
            if watch.is_due():
                with watch.saving(self.training.saver.wait):
                    begin_save(
                        self.training, SaveRequest(self.store, "0" * 64, {}, is_urgent=watch.is_durable), self._note
                    )

    def _note(self, saved: Any) -> None:
        self.saved = saved

    def restore(self) -> float:
        from holdfast.checkpoint import read_payload
        from holdfast.training import Gate, resume
        from tests.support.makers import commit_of

        self.training.saver.wait()
        began = time.perf_counter()
        payload = read_payload(self.store, commit_of(self.saved), self.training.saver.buffers)
        resume(self.training, payload, self.saved.metadata, Gate("exact"), lambda *_: None)
        return time.perf_counter() - began


# And the package whose version says which it is.
STACKS: dict[str, tuple[Callable[[str, Path], Any], str]] = {
    "holdfast": (Holdfast, "holdfast-train"), "DCP save": (DCP, "torch"), "DCP async_save": (AsyncDCP, "torch"),
    "accelerate save_state": (Accelerate, "accelerate"), "Lightning": (Lightning, "lightning"),
    "HF Trainer": (Transformers, "transformers"),
}  # fmt: skip


def measure(name: str, size: str, folder: Path) -> dict[str, float | str]:
    """Medians, in seconds; ``overhead`` is over the bare loop, without a save."""
    build, package = STACKS[name]
    bare, stack = Bare(size, folder), build(size, folder)

    def train(what: Any, every: int = EVERY, *, is_durable: bool = False) -> Watch:
        watch = Watch(folder, every, is_durable=is_durable)
        what.train(watch)
        return watch

    train(stack)  # the first saves take memory
    overheads, stalls = [], []
    before = train(bare, 0).elapsed
    for _ in range(ROUNDS):
        watch = train(stack)
        after = train(bare, 0).elapsed
        overheads.append(watch.elapsed / ((before + after) / 2) - 1)
        stalls += watch.stalls
        before = after
    durables = train(stack, is_durable=True).durables
    restores = []
    for _ in range(ROUNDS):
        make_cold(folder)
        restores.append(stack.restore())
    found = {"stall": stalls, "durable": durables, "restore": restores, "overhead": overheads}
    medians = {key: statistics.median(values) for key, values in found.items()}
    return {"version": f"{package} {metadata.version(package)}", **medians}


def main(name: str, size: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    try:
        found = measure(name, size, Path(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

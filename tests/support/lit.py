"""Lightning modules, callbacks and programs as their authors write them."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import Accuracy, F1Score, MeanMetric, MeanSquaredError, MetricCollection

from holdfast import Run
from holdfast.adapters import lightning as held

SAMPLES, BATCH_SIZE = 22, 4
PER_EPOCH = 6
# What callbacks and loggers of this process saw, in order.
SEEN: list[Any] = []


def quiet(**options: Any) -> dict[str, Any]:
    """Return options of a Trainer that trains on the CPU and prints nothing."""
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "log_every_n_steps": 1}
    return {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "max_epochs": 3} | shown | options


def blobs(count: int = SAMPLES) -> TensorDataset:
    x = torch.linspace(-1, 1, count * 4).view(count, 4)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Data(L.LightningDataModule):
    """Batches of points in an order that is drawn anew in every epoch."""

    def setup(self, stage: str) -> None:
        self.points = blobs()

    def train_dataloader(self) -> Any:
        return DataLoader(self.points, BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.points, 8)


class Classifier(L.LightningModule):
    """A classifier with dropout, metrics in the module, and numbers that are logged in all ways."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.0 if how == "draws nothing" else 0.2),
            nn.Tanh(),
            nn.Linear(8, 2),
        )
        self.accuracy = Accuracy(task="multiclass", num_classes=2)
        both = {"f1": F1Score(task="multiclass", num_classes=2), "right": Accuracy(task="multiclass", num_classes=2)}
        self.scores = MetricCollection(both)
        self.errors = MetricCollection({"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)})
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.accuracy(out, y)
        self.scores.update(out, y)
        self.errors.update(out[:, 1].float(), y.float())
        self.mean.update(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        if batch_idx == 1:
            self.log("rare", loss * 2)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.scores)
        self.log_dict(self.errors)
        self.log("mean", self.mean)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.net(x)
        self.scores.update(out, y)
        self.log("val_loss", nn.functional.cross_entropy(out, y), prog_bar=True)
        if self.how == "draws in validation":
            self.log("noise", torch.rand(()))

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val_{name}": each for name, each in self.scores.compute().items()})
        self.scores.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.how == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        if self.how == "step":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.02, total_steps=int(self.trainer.estimated_stepping_batches) + 1
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Adversaries(L.LightningModule):
    """Two optimizers in manual optimization, and a pool of what one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        self.pool: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        ours, theirs = self.optimizers()  # type: ignore[misc]
        x, _ = batch
        made = self.maker(torch.randn(len(x), 2))
        self.pool.append(made.detach().mean(0))
        del self.pool[:-3]
        self.toggle_optimizer(theirs)
        loss = nn.functional.softplus(self.judge(torch.stack(self.pool))).mean()
        loss = loss + nn.functional.softplus(-self.judge(x)).mean()
        theirs.zero_grad()
        self.manual_backward(loss)
        theirs.step()
        self.untoggle_optimizer(theirs)
        if batch_idx % 2:
            made_loss = nn.functional.softplus(-self.judge(made)).mean()
            ours.zero_grad()
            self.manual_backward(made_loss)
            ours.step()
            self.log("made_loss", made_loss)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.maker.parameters(), 0.01), torch.optim.Adam(self.judge.parameters(), 0.01)


class Witness(L.Callback):
    """A callback with state of its own, which notes what it sees."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def _note(self, hook: str, trainer: Any, *more: Any) -> None:
        metrics = {name: float(each) for name, each in trainer.callback_metrics.items()}
        SEEN.append((hook, trainer.current_epoch, trainer.global_step, self.count, metrics, *more))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._note("epoch start", trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._note("batch start", trainer, batch_idx, batch[0].tolist())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        loss = float(outputs["loss"]) if "loss" in outputs else None
        self._note("batch end", trainer, batch_idx, trainer.is_last_batch, loss)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._note("validated", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note("epoch end", trainer)


class Notes(Logger):
    """A logger that notes what is logged."""

    name, version = "notes", "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        SEEN.append(("logged", step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Moves(L.Callback):
    """A callback that keeps an average beside the model, and puts it into Lightning's checkpoints."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.average = {name: each.detach().clone() for name, each in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        for name, each in pl_module.named_parameters():
            self.average[name].lerp_(each.detach(), 0.1)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.average = dict(checkpoint["average"])


# Each with the Trainer's options.
HOWS: dict[str, dict[str, Any]] = {
    "": {},
    "accumulates": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    "step": {"val_check_interval": 2},
    "plateau": {"num_sanity_val_steps": 0},
    "bf16": {"precision": "bf16-mixed"},
    "limits": {"limit_train_batches": 4, "limit_val_batches": 1},
    "draws in validation": {"val_check_interval": 0.5},
    "averages": {},
    "stops": {},
    "schedules accumulation": {},
    "checkpoints": {"enable_checkpointing": True},
    "draws nothing": {},
}


def build(how: str = "", files: str = "", ranks: int = 1) -> tuple[L.Trainer, L.LightningModule, L.LightningDataModule]:
    """Return a Trainer, a module and its data, as a script makes them."""
    L.seed_everything(7, verbose=False)
    callbacks: list[Any] = [Witness()]
    if how == "averages":
        callbacks += [EMAWeightAveraging(decay=0.9), Moves()]
    if how == "schedules accumulation":
        callbacks.append(GradientAccumulationScheduler({1: 4}))
    if how == "stops":
        callbacks.append(EarlyStopping("val_loss", patience=5))
    if how == "checkpoints":
        callbacks.append(ModelCheckpoint(Path(files), monitor="val_loss", save_top_k=2))
    several = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
    options = quiet(callbacks=callbacks, **HOWS[how]) | {"logger": Notes()} | several
    return L.Trainer(**options), Classifier(how), Data()


def alone(how: str, ranks: int, path: str) -> None:
    """Train with Lightning alone, in one of several ranks; the main rank writes the weights to a file."""
    trainer, module, data = build(how, ranks=ranks)
    trainer.fit(module, datamodule=data)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), path)


def automatic(run: Run, how: str = "", files: str = "") -> None:
    trainer, module, data = build(how, files, run.world_size)
    held.fit(run, trainer, module, datamodule=data)


class Sharded(Classifier):
    """A `Classifier` that shards itself over the ranks by FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        fully_shard(self.net[0], mesh=mesh)
        if self.how != "leaves":
            fully_shard(self.net, mesh=mesh)


def sharded(run: Run, how: str = "", sizes: list[int] | None = None, files: str = "") -> None:
    """Train a `Sharded`.

    Args:
        sizes: the strategy's numbers of data-parallel and of tensor-parallel ranks.
        files: a folder for Lightning's own checkpoints; empty for none.
    """
    L.seed_everything(7, verbose=False)
    data, tensor = sizes or (run.world_size, 1)
    strategy = ModelParallelStrategy(data, tensor, save_distributed_checkpoint=False)
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.9)] if how == "averages" else [Witness()]
    if files:
        callbacks.append(ModelCheckpoint(Path(files), monitor="val_loss", save_top_k=2))
    options = quiet(callbacks=callbacks, devices=run.world_size, strategy=strategy, enable_checkpointing=bool(files))
    if how == "accumulates":
        options |= {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
    held.fit(run, L.Trainer(**options), Sharded(how), datamodule=Data())


class Ordered(Data):
    """The same points in their own order."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.points, BATCH_SIZE)


class Saver(L.Callback):
    """A callback that saves Lightning's own checkpoints: after each batch, and at each epoch's end."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.folder / f"batch-{trainer.fit_loop.epoch_loop.total_batch_idx + 1}.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch + 1}.ckpt")


def build_ordered(how: str) -> tuple[L.Trainer, Classifier, Ordered]:
    """Return what `build` does, for a training that draws no random number."""
    trainer, module, _ = build(how)
    assert isinstance(module, Classifier)
    module.net[2] = nn.Dropout(0.0)
    return trainer, module, Ordered()


def ordered(run: Run, how: str) -> None:
    trainer, module, data = build_ordered(how)
    held.fit(run, trainer, module, datamodule=data)


def build_adversaries() -> tuple[L.Trainer, "Adversaries", Any]:
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(**quiet(callbacks=[Witness()]) | {"logger": Notes()})
    return trainer, Adversaries(), DataLoader(blobs(), BATCH_SIZE, shuffle=True)


def manual(run: Run) -> None:
    trainer, module, loader = build_adversaries()
    run.keep(pool=module.pool)
    held.fit(run, trainer, module, loader)


def stateful(run: Run) -> None:
    """Take batches from a loader that keeps its own position, in epochs that end before its passes."""
    trainer = L.Trainer(**quiet(callbacks=[Witness()], limit_train_batches=4))
    held.fit(run, trainer, Classifier(), StatefulDataLoader(blobs(), BATCH_SIZE, shuffle=True))


if __name__ == "__main__":
    alone(sys.argv[1], int(sys.argv[2]), sys.argv[3])

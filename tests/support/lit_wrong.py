"""Lightning programs that forget state, stop early, or fit in a way that is refused."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from holdfast import Run
from holdfast.adapters import lightning as held
from tests.support.lit import BATCH_SIZE, Classifier, Data, blobs, quiet


class Forgetful(Classifier):
    """A module that a step changes in plain attributes, which nobody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen, self.names = 1.0, 0, ["a", "b"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale *= 0.9
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx) * self.scale


class Averages(L.Callback):
    """A callback with an average of the weights that it puts into no checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = torch.optim.swa_utils.AveragedModel(pl_module.net)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        self.steps += 1
        self.average.update_parameters(pl_module.net)


def forgets(run: Run) -> None:
    trainer, module = L.Trainer(**quiet(callbacks=[Averages()])), Forgetful()
    held.fit(run, trainer, module, datamodule=Data())


def with_options(run: Run, options: dict[str, Any]) -> None:
    """Train with options of a Trainer."""
    held.fit(run, L.Trainer(**quiet(**options)), Classifier(), datamodule=Data())


def stopping(run: Run, interval: float = 1.0) -> None:
    """Stop early, at the first validation after the first."""
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    trainer = L.Trainer(**quiet(callbacks=[stop], val_check_interval=interval))
    held.fit(run, trainer, Classifier(), datamodule=Data())


def wrong(run: Run, how: str) -> None:
    """Fit in a way that is refused."""
    trainer = L.Trainer(**quiet(callbacks=[Timer()] if how == "timer" else []))
    module: Any = Classifier()
    loader: Any = DataLoader(blobs(), BATCH_SIZE)
    if how == "checkpoint":
        held.fit(run, trainer, module, loader, ckpt_path="last")
    if how == "several loaders":
        held.fit(run, trainer, module, [loader, loader])
    if how == "stream":
        held.fit(run, trainer, module, DataLoader(Endless(), BATCH_SIZE))
    if how == "no trainer":
        held.fit(run, module, module, loader)
    if how == "twice":
        held.fit(run, trainer, module, loader)
        held.fit(run, L.Trainer(**quiet()), module, loader)
    if how == "skips":
        module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None
    held.fit(run, trainer, module, loader)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.randn(4), torch.tensor(1)

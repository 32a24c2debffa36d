"""Train a classifier of made-up spirals with Lightning: a data module, metrics, a callback and a logger."""

import os
import tempfile
from collections import deque

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import Accuracy

import holdfast
from holdfast.adapters import lightning as holdfast_lightning


class SpiralData(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        turn = torch.linspace(0.2, 9, 320)
        arms = [torch.stack([turn * (turn + side).cos(), turn * (turn + side).sin()], 1) for side in (0.0, 3.14)]
        dataset = TensorDataset(torch.cat(arms), torch.arange(2).repeat_interleave(320))
        split = torch.Generator().manual_seed(42)
        self.train_set, self.val_set = random_split(dataset, [512, 128], generator=split)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=64)


class SpiralClassifier(L.LightningModule):
    def __init__(self, width=64, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.train_acc = Accuracy(task="multiclass", num_classes=2)
        self.val_acc = Accuracy(task="multiclass", num_classes=2)
        self.recent = deque(maxlen=8)  # the losses of the last batches, to weigh the present one

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.recent.append(loss.item())
        weight = min(2.0, loss.item() / (sum(self.recent) / len(self.recent)))
        self.train_acc(logits, y)
        self.log("loss", loss)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return weight * loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=192)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SmallestLoss(L.Callback):
    """Prints the smallest loss of a batch after each epoch."""

    def __init__(self):
        self.batches = 0
        self.smallest = float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        self.smallest = min(self.smallest, trainer.callback_metrics["loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        print(f"smallest loss of {self.batches} batches: {self.smallest:.4f}")

    def state_dict(self):
        return {"batches": self.batches, "smallest": self.smallest}

    def load_state_dict(self, state_dict):
        self.batches, self.smallest = state_dict["batches"], state_dict["smallest"]


def train(run: holdfast.Run) -> None:
    L.seed_everything(42)
    data = SpiralData()
    module = SpiralClassifier()
    run.keep(recent=module.recent)
    trainer = L.Trainer(
        max_epochs=run.config.epochs,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[SmallestLoss(), LearningRateMonitor(), EarlyStopping("val_loss", patience=20)],
        logger=CSVLogger(os.environ.get("OUTPUT") or tempfile.mkdtemp()),
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    holdfast_lightning.fit(run, trainer, module, datamodule=data)
    print(f"validation loss {trainer.callback_metrics['val_loss']:.4f}")
    torch.save(module.state_dict(), "lightning_module.pt")

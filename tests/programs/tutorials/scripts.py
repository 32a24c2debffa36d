"""Tutorials in the shape of whole scripts: options, loggers, tables of losses, trainers in classes, schedules."""

import argparse
import copy
import csv
import dataclasses
import enum
import logging
import math
import os
import random
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from holdfast import Recipe, Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, labelled, load, pictures, rows

logger = logging.getLogger(__name__)


def net(outputs: int = 1, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, outputs))


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def parse_args():
    parser = argparse.ArgumentParser(description="PyTorch Example")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M")
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true", default=False)
    return parser.parse_args([])


def reads_options(run: Run) -> None:
    """Read options by argparse, log by logging, and write a table of losses."""
    args = parse_args()
    set_seed(args.seed)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")
    logger.info("args %s", vars(args))
    model = net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    out = Path(os.environ.get("OUTPUT", "/tmp/reads_options"))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "losses.csv").open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["epoch", "batch", "loss", "seconds"])
        writer.writeheader()
        since = time.time()
        for epoch in run.epochs(load(rows(), batch_size=args.batch_size)):
            model.train()
            for batch_idx, (data, target) in enumerate(run.batches(), run.batch_number):
                optimizer.zero_grad()
                loss = F.mse_loss(model(data), target)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
                if batch_idx % args.log_interval == 0:
                    logger.info("Train Epoch: %d [%d] Loss: %.6f", epoch, batch_idx * len(data), loss.item())
                    writer.writerow(
                        {"epoch": epoch, "batch": batch_idx, "loss": loss.item(), "seconds": time.time() - since}
                    )
                    file.flush()
                    if args.dry_run:
                        break
            scheduler.step()


def writes_to_tensorboard(run: Run) -> None:
    """Write scalars, histograms and a graph by a SummaryWriter that the script makes."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(Path(os.environ.get("OUTPUT", "/tmp/writes")) / "fashion_mnist_experiment_1")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    writer.add_graph(model, torch.zeros(1, 8))
    running_loss = 0.0
    for epoch in run.epochs(load(rows())):
        for i, (inputs, labels) in enumerate(run.batches(), run.batch_number):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            run.log(loss=loss)
            if i % 5 == 4:
                writer.add_scalar("training loss", running_loss / 5, epoch * STEPS + i)
                running_loss = 0.0
        for name, weight in model.named_parameters():
            writer.add_histogram(name, weight, epoch)
        writer.flush()
    writer.close()


def shows_tqdm(run: Run) -> None:
    """Wrap the batches in tqdm, with a postfix, and print tqdm.write."""
    from tqdm import tqdm

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        losses = []
        bar = tqdm(run.batches(), total=STEPS, initial=run.batch_number, desc=f"Epoch {epoch + 1}", file=sys.stdout)
        for x, y in bar:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{np.mean(losses):.4f}")
            run.log(loss=loss)
        tqdm.write(f"mean loss {np.mean(losses):.4f}", file=sys.stdout)


@dataclasses.dataclass
class TrainState:
    """The state of a trainer, as a dataclass."""

    global_step: int = 0
    best_loss: float = float("inf")
    bad_epochs: int = 0
    history: list = dataclasses.field(default_factory=list)
    best_weights: dict | None = None


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    lr: float = 0.02
    patience: int = 1
    warmup_steps: int = 6
    betas: tuple = (0.9, 0.95)


class Trainer:
    """Trains a model; its state is a dataclass that the run keeps."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.model, self.config, self.state = model, config, TrainState()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.betas)
        self.callbacks = defaultdict(list)

    def on(self, event: str, function) -> None:
        self.callbacks[event].append(function)

    def emit(self, event: str) -> None:
        for function in self.callbacks[event]:
            function(self)

    def fit(self, run: Run, loader) -> None:
        run.keep(model=self.model, optimizer=self.optimizer, state=vars(self.state))
        for self.epoch in run.epochs(loader):
            self.model.train()
            for self.batch in run.batches():
                self.train_step(run)
            self.validate()
            self.emit("epoch_end")

    def train_step(self, run: Run) -> None:
        x, y = self.batch
        scale = min(1.0, (self.state.global_step + 1) / self.config.warmup_steps) / (1 + self.state.bad_epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * scale
        self.loss = F.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        self.loss.backward()
        self.optimizer.step()
        self.state.global_step += 1
        run.log(loss=self.loss)

    @torch.no_grad()
    def validate(self) -> None:
        self.model.eval()
        x, y = rows(24).tensors
        loss = F.mse_loss(self.model(x + 0.1), y).item()
        self.state.history.append((self.epoch, loss))
        if loss < self.state.best_loss:
            self.state.best_loss, self.state.bad_epochs = loss, 0
            self.state.best_weights = copy.deepcopy(self.model.state_dict())
        else:
            self.state.bad_epochs += 1
        if self.state.bad_epochs > self.config.patience:
            self.model.load_state_dict(self.state.best_weights)


def has_a_trainer_with_callbacks(run: Run) -> None:
    """Fit in a class, which carries epoch, batch and loss as attributes; a callback prints."""
    trainer = Trainer(net(dropout=0.1), TrainConfig())
    trainer.on("epoch_end", lambda t: print(t.epoch, t.state.global_step, t.state.best_loss, t.loss.item()))
    trainer.fit(run, load(rows()))


class WholeTrainer:
    """A trainer that the run keeps as an object, with its model, optimizer and counts."""

    def __init__(self) -> None:
        self.model = net(CLASSES)
        self.ema = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.step, self.best_accuracy, self.losses = 0, 0.0, []
        self.rng = np.random.default_rng(5)

    def train_step(self, x, y):
        x = x + torch.from_numpy(self.rng.normal(0, 0.1, x.shape)).float()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        if self.step % 4 == 0:
            self.scheduler.step()
        decay = min(0.9, (1 + self.step) / (10 + self.step))
        for mean, weight in zip(self.ema.parameters(), self.model.parameters()):
            mean.data.lerp_(weight.data, 1 - decay)
        self.losses.append(loss.item())
        return loss


def is_kept_as_an_object(run: Run) -> None:
    """Keep the trainer itself, with all that it has."""
    trainer = WholeTrainer()
    run.keep(trainer=trainer)
    for epoch in run.epochs(load(labelled())):
        for x, y in run.batches():
            run.log(loss=trainer.train_step(x, y))
        x, y = labelled(24).tensors
        with torch.no_grad():
            accuracy = (trainer.ema(x).argmax(1) == y).float().mean().item()
        trainer.best_accuracy = max(trainer.best_accuracy, accuracy)
        print(epoch, accuracy, sum(trainer.losses[-STEPS:]) / STEPS)


class ModelEmaV2(nn.Module):
    """The average of a well-known library of image models."""

    def __init__(self, model, decay=0.9999, device=None) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay, self.device = decay, device

    def _update(self, model, update_fn) -> None:
        with torch.no_grad():
            for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
                ema_v.copy_(update_fn(ema_v, model_v))

    def update(self, model) -> None:
        self._update(model, update_fn=lambda e, m: self.decay * e + (1.0 - self.decay) * m)


class Mixup:
    """Mixup and CutMix by NumPy's random numbers, with a switch that an epoch turns off."""

    def __init__(self, mixup_alpha=0.8, cutmix_alpha=1.0, switch_prob=0.5, smoothing=0.1) -> None:
        self.mixup_alpha, self.cutmix_alpha, self.switch_prob = mixup_alpha, cutmix_alpha, switch_prob
        self.label_smoothing, self.mixup_enabled = smoothing, True

    def __call__(self, x, target):
        off = self.label_smoothing / CLASSES
        hot = torch.full((len(x), CLASSES), off).scatter_(1, target[:, None], 1 - self.label_smoothing + off)
        if not self.mixup_enabled:
            return x, hot
        if np.random.rand() < self.switch_prob:
            lam = np.random.beta(self.cutmix_alpha, self.cutmix_alpha)
            size, ratio = x.shape[-1], math.sqrt(1 - lam)
            cy, cx = np.random.randint(0, size), np.random.randint(0, size)
            half = int(size * ratio) // 2
            yl, yh, xl, xh = max(cy - half, 0), min(cy + half, size), max(cx - half, 0), min(cx + half, size)
            x = x.clone()
            x[:, :, yl:yh, xl:xh] = x.flip(0)[:, :, yl:yh, xl:xh]
            lam = 1 - (yh - yl) * (xh - xl) / size**2
        else:
            lam = np.random.beta(self.mixup_alpha, self.mixup_alpha)
            x = x * lam + x.flip(0) * (1 - lam)
        return x, hot * lam + hot.flip(0) * (1 - lam)


def param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.75):
    groups = OrderedDict()
    named = list(model.named_parameters())
    for number, (name, param) in enumerate(named):
        decay = 0.0 if param.ndim == 1 else weight_decay
        scale = layer_decay ** (len(named) - number)
        groups[name] = {"params": [param], "weight_decay": decay, "lr_scale": scale}
    return list(groups.values())


class CosineLRScheduler:
    """A schedule with warm-up that is told the epoch and the updates, and applies each group's scale."""

    def __init__(self, optimizer, t_initial, lr_min=1e-4, warmup_t=5, warmup_lr_init=1e-4, noise_std=0.0) -> None:
        self.optimizer, self.t_initial, self.lr_min = optimizer, t_initial, lr_min
        self.warmup_t, self.warmup_lr_init, self.noise_std = warmup_t, warmup_lr_init, noise_std
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_values = [group["initial_lr"] for group in optimizer.param_groups]
        self.update_groups(warmup_lr_init)

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state_dict) -> None:
        self.__dict__.update(state_dict)

    def update_groups(self, values) -> None:
        values = values if isinstance(values, list) else [values] * len(self.optimizer.param_groups)
        for group, value in zip(self.optimizer.param_groups, values):
            group["lr"] = value * group.get("lr_scale", 1.0)

    def step_update(self, num_updates: int) -> None:
        if num_updates < self.warmup_t:
            share = num_updates / self.warmup_t
            self.update_groups([self.warmup_lr_init + share * (v - self.warmup_lr_init) for v in self.base_values])
            return
        angle = math.pi * min(num_updates, self.t_initial) / self.t_initial
        lrs = [self.lr_min + 0.5 * (v - self.lr_min) * (1 + math.cos(angle)) for v in self.base_values]
        if self.noise_std:
            g = torch.Generator().manual_seed(num_updates)
            lrs = [lr * (1 + self.noise_std * torch.randn(1, generator=g).item()) for lr in lrs]
        self.update_groups(lrs)


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if not self.training or not self.drop_prob:
            return x
        keep = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.drop_prob)
        return x * keep / (1 - self.drop_prob)


class Block(nn.Module):
    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.GroupNorm(1, dim), nn.GELU()
        self.gamma, self.drop_path = nn.Parameter(torch.full((dim, 1, 1), 0.1)), DropPath(drop_path)

    def forward(self, x):
        return x + self.drop_path(self.gamma * self.act(self.norm(self.conv(x))))


def trains_like_timm(run: Run, mixup_off_epoch: int = 3) -> None:
    """Mix by NumPy, drop paths, decay rates by layer, warm up by updates, and average the weights."""
    set_seed(42)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 4, 4), *(Block(6, rate) for rate in np.linspace(0.1, 0.3, 3).tolist()), nn.Flatten(),
        nn.Linear(24, CLASSES),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    optimizer = torch.optim.AdamW(param_groups_layer_decay(model), lr=0.01)
    scheduler, mixup_fn = CosineLRScheduler(optimizer, t_initial=40, noise_std=0.1), Mixup()
    model_ema = ModelEmaV2(model, decay=0.9)
    saver = {"best_metric": None, "best_epoch": None, "num_updates": 0}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, model_ema=model_ema, saver=saver)
    for epoch in run.epochs(load(pictures(), drop_last=True)):
        if mixup_off_epoch and epoch >= mixup_off_epoch:
            mixup_fn.mixup_enabled = False
        model.train()
        for input_, target in run.batches():
            input_, target = mixup_fn(input_, target)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(input_.contiguous(memory_format=torch.channels_last))
            loss = torch.sum(-target * F.log_softmax(output.float(), dim=-1), dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():  # adaptive gradient clipping
                norm, limit = p.grad.norm(2.0), p.detach().norm(2.0).clamp(min=1e-3) * 0.1
                p.grad.mul_((limit / norm.clamp(min=1e-6)).clamp(max=1.0))
            optimizer.step()
            model_ema.update(model)
            saver["num_updates"] += 1
            scheduler.step_update(num_updates=saver["num_updates"])
            run.log(loss=loss, lr=sum(g["lr"] for g in optimizer.param_groups) / len(optimizer.param_groups))
        with torch.no_grad():
            x, y = pictures(24).tensors
            metric = (model_ema.module(x).argmax(1) == y).float().mean().item()
        if saver["best_metric"] is None or metric > saver["best_metric"]:
            saver["best_metric"], saver["best_epoch"] = metric, epoch
        print(f"*** Best metric: {saver['best_metric']} (epoch {saver['best_epoch']})")


def has_every_schedule(run: Run) -> None:
    """Step a schedule of each kind, each of its own optimizer: by batches, by epochs, and by a metric."""
    torch.manual_seed(6)
    models = nn.ModuleList(nn.Linear(8, 1) for _ in range(6))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in models]
    one, two, three, four, five, six = optimizers
    by_batch = [
        lr_scheduler.OneCycleLR(one, max_lr=0.05, epochs=5, steps_per_epoch=STEPS),
        lr_scheduler.CosineAnnealingWarmRestarts(two, T_0=5, T_mult=2),
        lr_scheduler.SequentialLR(three, [
            lr_scheduler.LinearLR(three, 0.1, total_iters=7), lr_scheduler.CosineAnnealingLR(three, 15),
            lr_scheduler.ConstantLR(three, 0.5, 100),
        ], milestones=[7, 22]),
        lr_scheduler.CyclicLR(four, 0.001, 0.05, step_size_up=7, mode="exp_range", gamma=0.99),
    ]  # fmt: skip
    plateau = lr_scheduler.ReduceLROnPlateau(five, patience=0, factor=0.5, cooldown=1, threshold=0.5)
    multiplicative = lr_scheduler.MultiplicativeLR(six, lr_lambda=lambda epoch: 0.95 if epoch % 2 else 0.8)
    run.keep(models=models, optimizers=optimizers, by_batch=by_batch, plateau=plateau, multiplicative=multiplicative)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            losses = [F.mse_loss(model(x), y) for model in models]
            for optimizer, loss in zip(optimizers, losses):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for schedule in by_batch:
                schedule.step()
            run.log(loss=sum(losses))
        plateau.step(losses[4])
        multiplicative.step()
        print(epoch, [f"{optimizer.param_groups[0]['lr']:.5f}" for optimizer in optimizers])


class Phase(enum.Enum):
    """The phases of a training."""

    WARM = "warm"
    MAIN = "main"
    COOL = "cool"


def keeps_every_kind_of_value(run: Run) -> None:
    """Keep counts, deques, an enum, NumPy's numbers, tuples and None in one dict, on which steps depend."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {
        "phase": Phase.WARM, "counts": Counter(), "seen": defaultdict(int), "last": deque(maxlen=5), "best": None,
        "mean": np.float64(0.0), "sums": np.zeros(3, dtype=np.int64), "shape": (8, 1), "names": ["a"], "on": True,
        "nested": OrderedDict(a={"b": [1, 2]}), "weights": torch.ones(3, dtype=torch.float64), "text": "", "big": 2**70,
        "bytes": b"\x00",
    }  # fmt: skip
    run.keep(model=model, optimizer=optimizer, state=state)
    for epoch in run.epochs(load(labelled())):
        for x, y in run.batches():
            target = y[:, None].float()
            loss = F.mse_loss(model(x), target) * float(state["weights"].mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["last"].append(loss.item())
            state["counts"].update(y.tolist())
            state["seen"][f"{len(state['last'])}"] += 1
            state["mean"] = np.mean(state["last"])
            state["sums"][epoch % 3] += len(x)
            state["nested"]["a"]["b"].append(int(y[0]))
            state["weights"] = torch.roll(state["weights"], 1) * (1 + 0.01 * float(state["mean"]))
            state["big"] += state["counts"][0]
            state["text"] = f"{state['text']}{int(y[0])}"[-7:]
            state["bytes"] = (state["bytes"] + bytes([int(y[1])]))[-4:]
            if state["best"] is None or loss.item() < state["best"][0]:
                state["best"] = (loss.item(), epoch, np.int64(len(state["names"])))
            if state["phase"] is Phase.MAIN:
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + state["counts"][1] % 3 + len(state["text"]))
            run.log(loss=loss)
        state["phase"] = {Phase.WARM: Phase.MAIN, Phase.MAIN: Phase.COOL}.get(state["phase"], Phase.WARM)
        state["names"].append(state["phase"].value)
        state["on"] = not state["on"]
        print(epoch, state["best"], state["phase"], dict(state["counts"]), state["big"] - 2**70)


class Metrics:
    """Running metrics with reset and compute, which an epoch's end prints and the next epoch's rate reads."""

    def __init__(self) -> None:
        self.best = 0.0
        self.reset()

    def reset(self) -> None:
        self.confusion, self.total = torch.zeros(CLASSES, CLASSES, dtype=torch.long), 0

    def update(self, predicted, wanted) -> None:
        for p, w in zip(predicted.tolist(), wanted.tolist()):
            self.confusion[w, p] += 1
        self.total += len(wanted)

    def compute(self):
        right = self.confusion.diag().sum().item()
        recall = self.confusion.diag() / self.confusion.sum(1).clamp(min=1)
        return {"accuracy": right / max(self.total, 1), "recall": recall.mean().item()}

    def state_dict(self):
        return {"confusion": self.confusion, "total": self.total, "best": self.best}

    def load_state_dict(self, state) -> None:
        self.confusion, self.total, self.best = state["confusion"], state["total"], state["best"]


def measures_while_training(run: Run) -> None:
    """Update a metric in each step; its value at the epoch's end scales the rate, and it is reset there."""
    model, metrics = net(CLASSES), Metrics()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer, metrics=metrics)
    for epoch in run.epochs(load(labelled(), batch_size=BATCH)):
        for x, y in run.batches():
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics.update(logits.argmax(1), y)
            run.log(loss=loss)
        found = metrics.compute()
        run.log(**found)
        if found["accuracy"] <= metrics.best:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        metrics.best = max(metrics.best, found["accuracy"])
        metrics.reset()
        print(epoch, found)


def saves_its_best_files(run: Run) -> None:
    """Write the best and the last model by torch.save, as the script did before, and prune old files."""
    out = Path(os.environ.get("OUTPUT", "/tmp/saves_its_best_files")) / "checkpoints"
    out.mkdir(parents=True, exist_ok=True)
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
    state = {"best": math.inf}
    run.keep(model=model, optimizer=optimizer, state=state)
    for epoch in run.epochs(load(rows())):
        epoch_loss = 0.0
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.3)
            optimizer.step()
            epoch_loss += loss.item() * len(x)
            run.log(loss=loss)
        checkpoint = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, out / f"epoch_{epoch}.pt")
        for old in sorted(out.glob("epoch_*.pt"))[:-2]:
            old.unlink(missing_ok=True)
        val = F.mse_loss(model(torch.ones(4, 8)), torch.full((4, 1), 8.0)).item()
        if val < state["best"]:
            state["best"] = val
            torch.save(model.state_dict(), out / "best.pt")
        print(f"epoch {epoch}: train {epoch_loss / 80:.4f} val {val:.4f} best {state['best']:.4f}")


def logs_by_steps() -> Recipe:
    """Count steps by a hook in a recipe, whose after_step anneals dropout and a temperature by buffers."""

    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 12), nn.Linear(12, CLASSES)
            self.register_buffer("p", torch.tensor(0.5))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("temperature", torch.tensor(2.0))

        def forward(self, x):
            return self.head(F.dropout(self.body(x).relu(), self.p.item(), self.training)) / self.temperature

    torch.manual_seed(2)
    model = Annealed()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)

    def after_step() -> None:
        model.steps += 1
        model.temperature.mul_(0.98)
        model.p.fill_(max(0.1, 0.5 - 0.01 * model.steps.item()))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05)

    return Recipe(
        model=model, data=labelled(), optimizer=optimizer, loss=loss, batch_size=BATCH, after_step=after_step,
        schedule=[lr_scheduler.PolynomialLR(optimizer, 50, 2.0)], clip_norm=0.5,
        evaluate=lambda model: {"loss": loss(model, labelled().tensors)},
    )  # fmt: skip

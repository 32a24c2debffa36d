"""Habits of training code: meters, logs, plots, timers, early stopping, averages, hooks, samplers."""

import collections
import copy
import dataclasses
import io
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

from holdfast import Recipe, Run
from tests.programs.network import BATCH_SIZE, LONG_EPOCH, Batch, begin, draw, fit, learn, long_points, make_long, net

logger = logging.getLogger(__name__)
losses_for_a_plot: list[float] = []


class AverageMeter:
    """The meter of the ImageNet example."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n
        self.avg = self.sum / self.count


def has_meters(run: Run) -> None:
    """Meters of losses and times, which only prints read; one of them is never reset."""
    model, optimizer = begin(run)
    losses, times, everything = AverageMeter("loss"), AverageMeter("time"), AverageMeter("all")
    end = time.time()
    for step in run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        loss = learn(fit(model, step.batch), optimizer)
        losses.update(loss.item(), BATCH_SIZE)
        everything.update(loss.item())
        times.update(time.time() - end)
        end = time.time()
        if step.number % LONG_EPOCH == LONG_EPOCH - 1:
            print(f"{losses.avg:.4f} {times.avg:.3f} {everything.avg:.4f}")
            losses.reset()
        step.log(loss=loss)


def plots(run: Run) -> None:
    """Lists for plots: a local one, one of the module, and a deque."""
    model, optimizer = begin(run)
    train_losses: list[float] = []
    window: collections.deque[float] = collections.deque(maxlen=5)
    for step in run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        loss = learn(fit(model, step.batch), optimizer)
        train_losses.append(loss.item())
        losses_for_a_plot.append(loss.item())
        window.append(loss.item())
        step.log(loss=loss, smooth=loss)
    print(len(train_losses), sum(window))


def logs() -> Recipe:
    """A logger of the module with handlers, which counts its lines."""
    stream = io.StringIO()
    logger.addHandler(logging.StreamHandler(stream))
    logger.setLevel(logging.INFO)
    lines = 0

    def say() -> None:
        nonlocal lines
        lines += 1
        logger.info("step %d", lines)

    return make_long(after_step=say)


class Bar:
    """A progress bar."""

    def __init__(self, total: int) -> None:
        self.total, self.n, self.started = total, 0, time.perf_counter()
        self.shown: dict[str, str] = {}

    def update(self, count: int = 1) -> None:
        self.n += count

    def set_postfix(self, **shown: str) -> None:
        self.shown = shown

    def __str__(self) -> str:
        return f"{self.n}/{self.total} {self.n / (time.perf_counter() - self.started):.1f}/s {self.shown}"


def shows_progress(run: Run) -> None:
    model, optimizer = begin(run)
    bar, global_step, started = Bar(50), 0, time.time()
    for step in run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        loss, global_step = learn(fit(model, step.batch), optimizer), global_step + 1
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if global_step % 8 == 0:
            print(bar, global_step / (time.time() - started))
        step.log(loss=loss)


class EarlyStopping:
    def __init__(self, patience: int = 3) -> None:
        self.patience, self.counter, self.best = patience, 0, math.inf

    def __call__(self, loss: float) -> bool:
        is_better = loss < self.best
        self.best, self.counter = (loss, 0) if is_better else (self.best, self.counter + 1)
        return self.counter >= self.patience


def stops_lowering(run: Run) -> None:
    """Early stopping whose attributes are kept; it lowers the rate in place of an end."""
    stopping = EarlyStopping(2)
    model, optimizer = begin(run, stopping=vars(stopping))
    for step in run.steps(per_epoch=LONG_EPOCH):
        loss = learn(fit(model, draw()), optimizer)
        if stopping(loss.item()):
            optimizer.param_groups[0]["lr"] *= 0.9
            stopping.counter = 0
        step.log(loss=loss)


def keeps_its_best_score(run: Run) -> None:
    """Evaluate at an epoch's end, and keep the best score and its weights."""
    model, optimizer = begin(run)
    best: dict[str, Any] = {"score": math.inf, "epoch": -1, "weights": copy.deepcopy(model.state_dict())}
    run.keep(best=best)
    held_out = long_points(16).tensors
    for epoch in run.epochs(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        model.train()
        running = 0.0
        for batch in run.batches():
            loss = learn(fit(model, batch), optimizer)
            running += loss.item()
            run.log(loss=loss)
        model.eval()
        with torch.no_grad():
            score = fit(model, held_out).item()
        if score < best["score"]:
            best |= {"score": score, "epoch": epoch, "weights": copy.deepcopy(model.state_dict())}
        print(f"{epoch}: {running / LONG_EPOCH:.3f} {score:.3f}")


def accumulates_by_step(run: Run) -> None:
    """Gradients of four batches for one step, by the number of the step."""
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        loss = fit(model, step.batch) / 4
        loss.backward()
        if step.number % 4 == 3:
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        step.log(loss=loss)


def averages_exponentially(run: Run) -> None:
    """An exponential average that is kept, and evaluated in place of the model."""
    model, optimizer = begin(run)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.keep(average=average)
    run.observe(evaluate=lambda models: {"held_out": fit(models["average"], long_points(16).tensors)})
    for step in run.steps(per_epoch=LONG_EPOCH):
        step.log(loss=learn(fit(model, draw()), optimizer))
        average.update_parameters(model)


class Shadow:
    """An average that is swapped in for evaluation, and out again."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, each in model.named_parameters():
            self.shadow[name].lerp_(each.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, each in state.items():
            self.shadow[name].copy_(each)


def swaps_weights() -> Recipe:
    model = net()
    shadow = Shadow(model)

    def evaluate(model: nn.Module) -> dict[str, Tensor]:
        own = {name: each.detach().clone() for name, each in model.named_parameters()}
        with torch.no_grad():
            for name, each in model.named_parameters():
                each.copy_(shadow.shadow[name])
            found = fit(model, long_points(16).tensors)
            for name, each in model.named_parameters():
                each.copy_(own[name])
        return {"held_out": found}

    return make_long(model=model, after_step=lambda: shadow.update(model), extras={"shadow": shadow}, evaluate=evaluate)


def groups_weight_decay() -> Recipe:
    """Groups with and without weight decay, and a lower rate for earlier layers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
    groups = [
        {"params": [each], "weight_decay": 0.1 * (each.ndim > 1), "lr": 0.01 * 0.9 ** int(name[0]), "name": name}
        for name, each in model.named_parameters()
    ]
    return make_long(model=model, optimizer=torch.optim.AdamW(groups), clip_norm=1.0)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (x,) = context.saved_tensors
        return 2 * x * gradient


def has_a_function_of_its_own(run: Run) -> None:
    model, optimizer = begin(run)
    for step in run.steps(per_epoch=LONG_EPOCH):
        x, y = draw()
        step.log(loss=learn(Square.apply(model(x) - y).mean(), optimizer))  # type: ignore[no-untyped-call]


def collects_features(run: Run) -> None:
    """A hook that notes what a layer gives, anew in each pass, and one that notes norms for a log."""
    model, optimizer = begin(run)
    features: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    model[1].register_forward_hook(lambda module, given, out: features.update(hidden=out))
    model[0].weight.register_hook(lambda gradient: norms.update(first=float(gradient.norm())))
    for step in run.steps(per_epoch=LONG_EPOCH):
        x, y = draw()
        loss = F.mse_loss(model(x), y) + 0.01 * features["hidden"].square().mean()
        step.log(loss=learn(loss, optimizer), **norms)


class Curriculum(Dataset[Batch]):
    def __init__(self) -> None:
        self.x, self.y = long_points().tensors
        self.level = {"now": 0.0}

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        return self.x[index] * (1 + self.level["now"]), self.y[index]


def follows_a_curriculum(run: Run) -> None:
    """A level that the dataset reads from a kept dict."""
    dataset = Curriculum()
    model, optimizer = begin(run, level=dataset.level)
    for step in run.steps(DataLoader(dataset, BATCH_SIZE, shuffle=True)):
        loss = learn(fit(model, step.batch), optimizer)
        if loss.item() < 20:
            dataset.level["now"] += 0.05
        step.log(loss=loss)


def weighs_its_samples(run: Run) -> None:
    """Draw rare classes more often, by a WeightedRandomSampler."""
    x, y = long_points().tensors
    weights = torch.where(y[:, 0] > 0, 1.0, 3.0)
    sampler = WeightedRandomSampler(weights.tolist(), len(x))
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(TensorDataset(x, y), BATCH_SIZE, sampler=sampler)):
        step.log(loss=learn(fit(model, step.batch), optimizer))


class Jitter:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + float(self.generator.normal()) * 0.1, y


def keeps_the_collators_generator(run: Run) -> None:
    jitter = Jitter()
    model, optimizer = begin(run, jitter=jitter.generator)
    for step in run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True, collate_fn=jitter)):
        step.log(loss=learn(fit(model, step.batch), optimizer))


class Stream:
    """An endless stream of batches that knows its position."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.given += 1
            x = torch.randn(BATCH_SIZE, 8, generator=torch.Generator().manual_seed(self.given))
            yield x, x.sum(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def reads_a_stream(run: Run) -> None:
    model, optimizer = begin(run)
    for step in run.steps(Stream(), per_epoch=LONG_EPOCH):
        step.log(loss=learn(fit(model, step.batch), optimizer))


def recomputes() -> Recipe:
    """Checkpoint activations, with dropout."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def loss(model: Any, batch: Batch) -> Tensor:
        return F.mse_loss(checkpoint_sequential(model, 2, batch[0], use_reentrant=False), batch[1])

    return make_long(loss, model)


@dataclasses.dataclass
class Config:
    """Settings that nobody changes."""

    lr: float = 0.01
    width: int = 12
    betas: tuple[float, float] = (0.9, 0.99)
    names: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])


class Experiment:
    """A trainer in a class, whose methods the loop calls; its counts are for logs alone."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run, self.config, self.model = run, config, net(config.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), config.lr, betas=config.betas)
        self.step_count, self.last_loss = 0, torch.zeros(())
        self.log: list[dict[str, float]] = []
        run.keep(model=self.model, optimizer=self.optimizer)

    def train(self) -> None:
        for step in self.run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
            self.last_loss = self.train_step(step.batch)
            step.log(loss=self.last_loss)
            self.log.append({"step": self.step_count, "loss": self.last_loss.item()})

    def train_step(self, batch: Batch) -> Tensor:
        self.step_count += 1
        return learn(fit(self.model, batch), self.optimizer)


def is_an_experiment(run: Run) -> None:
    Experiment(run, Config()).train()


class Lookahead:
    """Slow weights that follow every five steps, with a state of their own."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.count = model, 0
        self.slow = [each.detach().clone() for each in model.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        if self.count % 5 == 0:
            for slow, fast in zip(self.slow, self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow, self.count = [each.clone() for each in state["slow"]], state["count"]


def looks_ahead() -> Recipe:
    model = net()
    lookahead = Lookahead(model)
    return make_long(model=model, after_step=lookahead.step, extras={"lookahead": lookahead})


def remembers_neighbours(run: Run) -> None:
    """A memory of features in a kept dict, whose nearest neighbours weight the loss."""
    memory = {"features": torch.zeros(0, 8), "values": torch.zeros(0, 1)}
    model, optimizer = begin(run, memory=memory)
    for step in run.steps(per_epoch=LONG_EPOCH):
        x, y = draw()
        loss = F.mse_loss(model(x), y)
        if len(memory["features"]) >= 8:
            near = torch.cdist(x, memory["features"]).argmin(1)
            loss = loss + 0.1 * F.mse_loss(model(x), memory["values"][near])
        memory["features"] = torch.cat([memory["features"], x])[-20:]
        memory["values"] = torch.cat([memory["values"], y])[-20:]
        step.log(loss=learn(loss, optimizer))


def registers_for_checkpointing(run: Run) -> None:
    """An object that accelerate is told to save."""
    model, optimizer = begin(run)
    shadow = Shadow(model)
    run.accelerator.register_for_checkpointing(shadow)
    for step in run.steps(per_epoch=LONG_EPOCH):
        loss = fit(model, draw())
        pull = sum((each - shadow.shadow[name]).square().sum() for name, each in model.named_parameters())
        step.log(loss=learn(loss + 0.01 * pull, optimizer))
        shadow.update(model)


def times_its_steps(run: Run) -> None:
    """Measure how long steps take, and print the throughput."""
    model, optimizer = begin(run)
    started, tokens, speeds = time.perf_counter(), 0, []
    for step in run.steps(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        loss = learn(fit(model, step.batch), optimizer)
        tokens += step.batch[0].numel()
        speeds.append(tokens / (time.perf_counter() - started))
        step.log(loss=loss)


def logs_after_the_epoch(run: Run) -> None:
    """Log a mean at the end of each epoch, after the inner loop."""
    model, optimizer = begin(run)
    for _ in run.epochs(DataLoader(long_points(), BATCH_SIZE, shuffle=True)):
        total = 0.0
        for batch in run.batches():
            loss = learn(fit(model, batch), optimizer)
            total += loss.item()
            run.log(loss=loss)
        run.log(epoch_loss=total / LONG_EPOCH)

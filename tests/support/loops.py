"""Loops of a user's own, as their authors write them, and some that are wrong."""

import random
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.nodes import Batcher, IterableWrapper
from torchdata.nodes import Loader as NodesLoader

from holdfast import Anneal, Run

PER_EPOCH, SAMPLES = 6, 22


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 1))


def draw(generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    x = torch.randn(5, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def samples(count: int = SAMPLES) -> TensorDataset:
    x = torch.linspace(-1, 1, count * 4).view(count, 4)
    return TensorDataset(x, x.sum(1, keepdim=True))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def plain(run: Run, lr: float = 0.01) -> None:
    """Draw batches from the global generator of torch, NumPy and Python."""
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        loss = learn(model, optimizer, x * random.random(), y + float(np.random.random()))
        scheduler.step()
        step.log(loss=loss, doubled=2 * loss.item())


class Env:
    """An environment without a state_dict, as many have it."""

    def __init__(self) -> None:
        self.np_random = np.random.default_rng(5)
        self.place = {"x": np.zeros(4), "visited": [0.0]}

    def step(self) -> Tensor:
        self.place["x"] = self.place["x"] * 0.5 + self.np_random.random(4)
        self.place["visited"].append(float(self.place["x"].sum()))
        self.place.setdefault("later", {"deep": [len(self.place["visited"])]})
        return torch.tensor(self.place["x"], dtype=torch.float32)[None]


def acts(run: Run) -> None:
    """On-policy data from an environment, whose attributes are kept."""
    model, env = net(), Env()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, env=vars(env))
    for step in run.steps(per_epoch=PER_EPOCH):
        x = env.step()
        step.log(loss=learn(model, optimizer, x, x[:, :1]), visited=sum(env.place["visited"]))


def two_optimizers(run: Run) -> None:
    """A generator and a critic, an average of weights, a queue, counters and side streams of every kind."""
    generator, critic = net(), net(4)
    average = torch.optim.swa_utils.AveragedModel(generator)
    ours = torch.optim.Adam(generator.parameters(), lr=0.01)
    theirs = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    queue, counters, last = torch.zeros(3, 4), {"best": float("inf"), "steps": 0}, deque([0.0], maxlen=3)
    array, numbers, python = np.zeros(2), np.random.default_rng(3), random.Random(3)
    stream = run.generator("noise")
    heat = run.anneal("heat", Anneal(1.0, 0.0, epochs=2))
    run.keep(generator=generator, critic=critic, average=average, ours=ours, theirs=theirs)
    run.keep(queue=queue, counters=counters, last=last, array=array, numbers=numbers, python=python)
    run.observe(evaluate=lambda models: {"size": models["generator"](torch.ones(1, 4)).item()})
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw(stream)
        loss = learn(critic, theirs, x + queue.mean(), y * heat.value + python.random())
        if step.number % 3 == 1:
            step.log(loss=loss, critic_only=1)
            continue
        loss = learn(generator, ours, x, critic(x).detach() + float(numbers.random()) - sum(last) / 9)
        average.update_parameters(generator)
        with torch.no_grad():
            queue[step.number % 3] = x[0]
        counters["best"] = min(counters["best"], loss.item())
        counters["steps"] += 1
        last.append(loss.item())
        array += loss.item()
        run.log(loss=loss, best=counters["best"])


def accumulates(run: Run) -> None:
    """Every second step leaves its gradient for the next one, as accelerate accumulates."""
    accelerator = run.accelerator
    accelerator.gradient_accumulation_steps = 2
    model = net()
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(loader):
        model.train()
        for x, y in run.batches():
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log(loss=loss, epoch=epoch)
        model.eval()
        with torch.no_grad():
            torch.rand(1)  # code at an epoch's end draws, too
            model(torch.ones(2, 4))


def resets(run: Run, how: str = "") -> None:
    """Code at an epoch's beginning, which must not run twice."""
    model, meter = net(), {"sum": 0.0, "epochs": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(samples(), batch_size=4, shuffle=True)
    run.keep(model=model, optimizer=optimizer, meter=meter)
    for epoch in run.epochs(loader):
        meter["sum"] = torch.rand(()).item()
        meter["epochs"] += 1
        optimizer.param_groups[0]["lr"] *= 0.5 + epoch / 10
        if how == "changes weights":
            torch.nn.init.normal_(next(model.parameters()))
        for x, y in run.batches():
            if how == "breaks":
                break
            meter["sum"] += learn(model, optimizer, x, y).item()
            run.log(loss=meter["sum"])


class Shuffled(Dataset[tuple[Tensor, Tensor]]):
    """A dataset whose samples draw."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), index / SAMPLES) + torch.randn(4)
        return x, x.sum(0, keepdim=True)


def own_loader(run: Run, drop_last: bool = False) -> None:
    """A loader with a generator of its own, and a last batch that is smaller."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Shuffled(), 4, shuffle=True, drop_last=drop_last, generator=torch.Generator().manual_seed(7))
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(loader):
        step.log(loss=learn(model, optimizer, *step.batch))


def told_epochs(run: Run) -> None:
    """A sampler whose order depends on the epoch that the loop tells it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(samples(), num_replicas=1, rank=0, seed=3)
    loader = DataLoader(samples(), batch_size=4, sampler=sampler)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for x, y in run.batches():
            run.log(loss=learn(model, optimizer, x, y))


def dataset(run: Run) -> None:
    """Batches that Holdfast makes, two a step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    batches = run.batches(Shuffled(), batch_size=4, grad_accum=2)
    for step in run.steps(per_epoch=PER_EPOCH):
        for _ in range(2):
            loss = learn(model, optimizer, *next(batches))
        step.log(loss=loss)


def nodes(run: Run) -> None:
    """torchdata's nodes, which keep their own position."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = NodesLoader(Batcher(IterableWrapper(range(SAMPLES)), 4), restart_on_stop_iteration=True)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(stream, per_epoch=PER_EPOCH):
        x = torch.tensor(step.batch).float().view(-1, 1).expand(-1, 4)
        step.log(loss=learn(model, optimizer, x / SAMPLES, x[:, :1]))


LOOPS = {
    each.__name__: each
    for each in (plain, acts, two_optimizers, accumulates, resets, own_loader, told_epochs, dataset, nodes)
}


# ---- loops with a mistake


def forgets(run: Run) -> None:
    """An average, a side stream and two variables are not kept."""
    model, average = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream, best, x = torch.Generator().manual_seed(1), 9.0, torch.ones(5, 4)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = learn(model, optimizer, x, x[:, :1])
        best = min(best, loss.item())
        x, _ = draw(stream)
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.1)
        step.log(loss=loss, best=best)


def reads_constants(run: Run, level: float = 0.1) -> None:
    """A bound, a warm-up and a switch that are computed before the loop, and values of this process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip, warmup, kind, began, folder = 0.5 * level, int(100 * level), "cosine", time.perf_counter(), "runs/one"
    best, changed = 0.0, 1
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = learn(model, optimizer, *draw())
        changed += warmup
        step.log(loss=loss, clip=clip, changed=changed, s=time.perf_counter() - began, kind=len(kind + folder), b=best)


def ends(run: Run, after: int) -> None:
    """A loop that can't train more steps than these, as a trainer of a library that counts them itself.

    The main rank, which reports steps, is the last one to end each.
    """
    model = run.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            raise RuntimeError("the loop has ended")
        learn(model, optimizer, *draw())
        time.sleep(0.3 if run.accelerator.is_main_process else 0)


def replaces(run: Run, first: int = 1) -> None:
    """A queue is kept, and each step from the first puts a new tensor in its place."""
    model, queue = net(), torch.zeros(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, queue=queue)
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        step.log(loss=learn(model, optimizer, x + queue[:5], y))
        if step.number + 1 < first:
            queue[:] = torch.cat([queue[5:], x])
        else:
            queue = torch.cat([queue[5:], x])


class Forgetful:
    """A trainer whose loop carries an attribute of its own, and one of an object all of whose attributes are kept."""

    def __init__(self, run: Run) -> None:
        self.run, self.model, self.hidden, self.env = run, net(), torch.zeros(5, 4), Env()

    def fit(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run.keep(model=self.model, optimizer=optimizer, env=vars(env := self.env))
        for step in self.run.steps(per_epoch=PER_EPOCH):
            x, y = draw()
            loss = learn(self.model, optimizer, x + self.hidden, y)
            self.hidden = x / 2
            env.place = {**env.place, "visited": [loss.item()]}
            step.log(loss=loss)


def forgets_attributes(run: Run) -> None:
    Forgetful(run).fit()


class Counting:
    """A trainer whose rate follows a count."""

    def __init__(self) -> None:
        self.model, self.count = net(), 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, run: Run, keeps_self: bool) -> None:
        run.keep(model=self.model, optimizer=self.optimizer)
        if keeps_self:
            run.keep(self=vars(self))
        for step in run.steps(per_epoch=PER_EPOCH):
            self.count += 1
            self.optimizer.param_groups[0]["lr"] = 0.1 / self.count
            step.log(loss=learn(self.model, self.optimizer, *draw()))


class Attaching(Counting):
    """A trainer that each step gives another attribute, an object with a rate for the next step."""

    def fit(self, run: Run, keeps_self: bool) -> None:
        run.keep(model=self.model, optimizer=self.optimizer)
        for step in run.steps(per_epoch=PER_EPOCH):
            if hasattr(self, "plan"):
                self.optimizer.param_groups[0]["lr"] = self.plan.rate
            step.log(loss=learn(self.model, self.optimizer, *draw()))
            self.plan = SimpleNamespace(rate=0.1 / (1 + step.number))


def attaches_an_attribute(run: Run) -> None:
    Attaching().fit(run, keeps_self=False)


KEEPS_SELF = "run.keep(self=vars(self))"  # the line that the search advises for `Counting`


def counts_in_a_class(run: Run, keeps_self: bool = False) -> None:
    Counting().fit(run, keeps_self)


def wrong(run: Run, how: str) -> None:
    """Make one mistake."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects: dict[str, Any] = {
        "number": {"best": 1.0}, "none": {"generator": None}, "object": {"thing": object()},
        "shared": {"other": torch.optim.SGD(model.parameters())},
    }  # fmt: skip
    if how == "nothing":
        return
    if how != "keeps nothing":
        run.keep(model=model, optimizer=optimizer, **objects.get(how, {}))
    if how == "twice kept":
        run.keep(model=model)
    if how == "plain iterator":
        run.steps([draw()])
    if how == "no batch":
        run.steps(DataLoader(samples()[:3], batch_size=4, drop_last=True))
    if how == "logs early":
        run.log(loss=1.0)
    if how == "shuffles":
        run.batches(samples(), batch_size=4, shuffle=True)
    if how == "other data":
        for _ in run.epochs(DataLoader(samples(), batch_size=4)):
            for x, y in run.batches(DataLoader(samples(), batch_size=2)):
                run.log(loss=learn(model, optimizer, x, y))
    batches = run.batches(samples(), batch_size=4) if how == "too many batches" else None
    for step in run.steps(per_epoch=None if how == "no length" else PER_EPOCH):
        if how == "breaks" and step.number == 2:
            break
        if how == "keeps late":
            run.keep(late={})
        if how == "logs a vector":
            run.log(loss=torch.ones(2))
        if how == "raises" and step.number == 2:
            raise ValueError("a mistake")
        if how == "no data":
            print(step.batch)
        if batches is not None:
            next(batches), next(batches)
        step.log(loss=learn(model, optimizer, *draw()))
    if how == "second loop":
        for _ in run.steps(per_epoch=PER_EPOCH):
            pass


class Block(nn.Module):
    """A block of a larger network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(nn.functional.gelu(self.inner(self.norm(x))))  # type: ignore[no-any-return]


def tuned(run: Run, compiles: bool = False, recomputes: bool = False) -> None:
    """Train with autocast and a fused optimizer; each block may be compiled, and activations recomputed."""
    torch.manual_seed(4)
    blocks = [Block(16) for _ in range(2)]
    for block in blocks if compiles else ():
        block.compile()
    model: Any = nn.Sequential(nn.Linear(4, 16), *blocks, nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        with run.accelerator.autocast():
            if recomputes:
                predicted = checkpoint_sequential(model, 2, x.requires_grad_(), use_reentrant=False)
            else:
                predicted = model(x)
            loss = nn.functional.mse_loss(predicted.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)

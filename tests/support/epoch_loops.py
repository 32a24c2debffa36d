"""Loops of epochs as tutorials write them, with code of their own at each epoch's end."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast import Anneal, Run
from tests.support.loops import draw, learn, net, samples

Optimizer = torch.optim.Optimizer


def make() -> tuple[nn.Module, Optimizer, "DataLoader[Any]"]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=4, shuffle=True)


def average(run: Run) -> None:
    """Print the mean loss of each epoch, and the last loss; both are variables of the inner loop."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(loader):
        running, seen = 0.0, 0
        for x, y in run.batches():
            loss = learn(model, optimizer, x, y)
            running, seen = running + loss.item() * len(x), seen + len(x)
            run.log(loss=loss)
        scheduler.step()
        print(f"epoch {epoch}: {running / seen:.4f}, last {loss.item():.4f}")
        run.log(loss=running / seen, mean=running / seen)


def only_at_the_end(run: Run) -> None:
    """Log a loss at each epoch's end only."""
    model, optimizer, loader = make()
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(loader):
        losses = [learn(model, optimizer, x, y).item() for x, y in run.batches()]
        run.log(loss=sum(losses) / len(losses))


def train_one_epoch(model: nn.Module, optimizer: Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    losses = []
    for x, y in batches:
        losses.append(learn(model, optimizer, x, y).item())
    return sum(losses) / len(losses)


def keeps_best(run: Run) -> None:
    """Validate at each epoch's end, keep the best weights, and average the weights of the epochs."""
    model, optimizer, loader = make()
    best: dict[str, Any] = {"score": -math.inf, "epoch": -1, "weights": None}
    mean = torch.optim.swa_utils.AveragedModel(model)
    run.keep(model=model, optimizer=optimizer, best=best, mean=mean)
    for epoch in run.epochs(loader):
        model.train()
        train_one_epoch(model, optimizer, run.batches())
        model.eval()
        with torch.no_grad():
            score = -(model(torch.eye(4)) - torch.rand(4, 1)).square().mean().item()
        mean.update_parameters(model)
        if score > best["score"]:
            best.update(
                score=score, epoch=epoch, weights={name: each.clone() for name, each in model.state_dict().items()}
            )
        run.log(score=score)


def plateaus(run: Run) -> None:
    """Step a scheduler on a kept sum of the epoch's losses, and reset the sum at the epoch's beginning."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    heat, kept = run.anneal("heat", Anneal(1.0, 0.0, epochs=3)), {"sum": 0.0, "heat": 0.0}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, kept=kept)
    run.observe(evaluate=lambda model: {"size": sum(each.square().sum().item() for each in model.parameters())})
    for _ in run.epochs(loader):
        kept["sum"] = 0.0
        for step in run.steps():
            x, y = step.batch
            loss = learn(model, optimizer, x, y * heat.value)
            kept["sum"] += loss.item()
            step.log(loss=loss)
            if step.is_last_of_epoch and step.epoch % 2:
                x.mul_(2)
        kept["heat"] += heat.value
        scheduler.step(kept["sum"])


def flushes(run: Run) -> None:
    """Accumulate over four batches, step on the rest at the epoch's end, and draw batches without a loader."""
    model, optimizer, _ = make()
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(per_epoch=6):
        for step in run.steps():
            x, y = draw()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            if step.number % 6 == 3:
                optimizer.step()
                optimizer.zero_grad()
            run.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def numbers(run: Run) -> None:
    """Let an index decide when the optimizer steps, and which rate it has. Leave the inner loop in its last step."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(loader):
        for i, (x, y) in enumerate(run.batches(), run.batch_number):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step(epoch + i / len(loader))
            run.log(loss=loss, index=i)
            if epoch and i == len(loader) - 1:
                break
        run.log(last=i)


EPOCH_LOOPS = [each.__name__ for each in (average, only_at_the_end, keeps_best, plateaus, flushes, numbers)]

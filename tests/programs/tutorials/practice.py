"""Tutorials of practice: optimizers, schedules, averages, folds, curricula, early stops, quantisation."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from holdfast import Run
from tests.programs.tutorials.data import BATCH, STEPS, Windows, load, rows


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs))


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


def seeks_flat_minima(run: Run) -> None:
    """Take two steps in one: up to the worst weights nearby, and down from there."""
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.005, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            F.mse_loss(model(x), y).backward()
            optimizer.first_step()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.second_step()
            run.log(loss=loss)
        print(epoch, loss.item())


class Muon(torch.optim.Optimizer):
    """Orthogonalises the momentum of matrices by a Newton-Schulz iteration."""

    def __init__(self, params, lr=0.02, momentum=0.95, ns_steps=3) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buf = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buf, group["momentum"])
                x = x / (x.norm() + 1e-7)
                for _ in range(group["ns_steps"]):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                p.add_(x, alpha=-group["lr"])


def orthogonalises(run: Run) -> None:
    """Train matrices by Muon and the other parameters by AdamW."""
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizers = [Muon(matrices), torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=3e-3)]
    run.keep(model=model, optimizers=optimizers)
    for step in run.steps(load(rows())):
        inputs, targets = step.batch
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        frac = min(step.number / 20, 1)
        optimizers[0].param_groups[0]["momentum"] = (1 - frac) * 0.85 + frac * 0.95
        for each in optimizers:
            each.step()
        model.zero_grad(set_to_none=True)
        step.log(loss=loss)


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: gradients at an interpolation, and an average for evaluation."""

    def __init__(self, params, lr=0.1, beta=0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _move(self, is_training: bool, weight) -> None:
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=weight(group["beta"]))
                group["train_mode"] = is_training

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            ckp1 = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(end=z, weight=ckp1)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - ckp1) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def needs_no_schedule(run: Run) -> None:
    """Switch a schedule-free optimizer to its average at each epoch's end, validate, and switch back."""
    model = net()
    optimizer = ScheduleFree(model.parameters())
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        model.train()
        for x, y in run.batches():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            x, y = rows(16).tensors
            print(f"Test set {epoch}: {F.mse_loss(model(x), y).item():.4f}")
        optimizer.train()


def factors_moments(run: Run) -> None:
    """Train by Adafactor, with a rate that decays by the inverse root of the step."""
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, (it + 1) / 5, math.sqrt(5 / (it + 1))))
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(load(rows())):
        for i, (x, y) in enumerate(run.batches()):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (i + 1) % 5 == 0:
                print(f"epoch {epoch} step {i + 1} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
            run.log(loss=loss)


def fits_by_lbfgs(run: Run) -> None:
    """Fit sine waves by LBFGS with a closure, and predict at each epoch's end."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"lstm": nn.LSTM(1, 6, batch_first=True), "out": nn.Linear(6, 1)}).double()
    data = torch.sin(torch.arange(20, dtype=torch.float64)[None] / 3 + torch.arange(4)[:, None])[..., None]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(per_epoch=4):
        for step in run.steps():

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model["out"](model["lstm"](data[:, :-1])[0]), data[:, 1:])
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            step.log(loss=loss)
        with torch.no_grad():
            print(
                epoch, "test loss:", F.mse_loss(model["out"](model["lstm"](data[:1])[0])[:, :-1], data[:1, 1:]).item()
            )


def finds_its_rate(run: Run) -> None:
    """Find a rate on a copy before the loop, and train with it."""
    model = net()
    probe, losses = copy.deepcopy(model), []
    x, y = rows(32).tensors
    for lr in (0.001, 0.01, 0.1):
        trial = torch.optim.SGD(probe.parameters(), lr=lr)
        for _ in range(2):
            trial.zero_grad()
            F.mse_loss(probe(x), y).backward()
            trial.step()
        losses.append((F.mse_loss(probe(x), y).item(), lr))
    optimizer = torch.optim.SGD(model.parameters(), lr=min(losses)[1] / 2, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for batch, (x, y) in enumerate(run.batches()):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch % 4 == 0:
                print(f"loss: {loss.item():>7f}  [{batch * BATCH + len(x):>5d}/{STEPS * BATCH:>5d}]")
            run.log(loss=loss)
        print(f"Epoch {epoch + 1}\n-------------------------------")


def embeds_words(run: Run) -> None:
    """word2vec: sparse embeddings by SparseAdam, a bias by Adam, negative samples by their frequency."""
    torch.manual_seed(1)
    ours, theirs, bias = (
        nn.Embedding(12, 6, sparse=True),
        nn.Embedding(12, 6, sparse=True),
        nn.Parameter(torch.zeros(12)),
    )
    sparse = torch.optim.SparseAdam([*ours.parameters(), *theirs.parameters()], lr=0.02)
    dense, frequency = torch.optim.Adam([bias], lr=0.02), torch.arange(1.0, 13.0) ** 0.75
    run.keep(ours=ours, theirs=theirs, bias=bias, sparse=sparse, dense=dense)
    for epoch in run.epochs(load(Windows())):
        total = 0.0
        for context, _ in run.batches():
            center, near = context[:, 2], context[:, 3]
            noise = torch.multinomial(frequency, len(center) * 3, replacement=True).view(-1, 3)
            right = (ours(center) * theirs(near)).sum(1) + bias[near]
            wrong = (theirs(noise) @ ours(center)[..., None])[..., 0] + bias[noise]
            loss = -(F.logsigmoid(right).mean() + F.logsigmoid(-wrong).mean())
            for each in (sparse, dense):
                each.zero_grad()
            loss.backward()
            for each in (sparse, dense):
                each.step()
            total += loss.item()
            run.log(loss=loss)
        print(f"epoch {epoch}: {total / STEPS:.4f}")


def accumulates_in_half_precision(run: Run, iters_to_accumulate: int = 4) -> None:
    """Accumulate by the number of the step, under autocast, with a gradient scaler that is off on a CPU."""
    model, loader = net(), load(rows())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(loader):
        for step in run.steps():
            i, (x, y) = step.number % len(loader), step.batch
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y) / iters_to_accumulate
            scaler.scale(loss).backward()
            if (i + 1) % iters_to_accumulate == 0 or i + 1 == len(loader):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            step.log(loss=loss * iters_to_accumulate)


def averages_late(run: Run, swa_start: int = 1) -> None:
    """Average weights from an epoch on, with a rate of their own; update batch norm at the end."""
    torch.manual_seed(1)
    model, loader = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1)), load(rows())
    swa_model, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02)
    run.keep(model=model, swa_model=swa_model, optimizer=optimizer, scheduler=scheduler, swa_scheduler=swa_scheduler)
    for epoch in run.epochs(loader):
        for input_, target in run.batches():
            optimizer.zero_grad()
            loss = F.mse_loss(model(input_), target)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        if epoch > swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model)


def learns_to_adapt(run: Run, inner_steps: int = 3, outer: float = 0.3) -> None:
    """Reptile: adapt a copy to a random task, and move towards it by a rate that decays with the step."""
    model, total = net(), STEPS * run.config.epochs
    run.keep(model=model)
    for iteration in run.steps(per_epoch=STEPS):
        weights_before = copy.deepcopy(model.state_dict())
        scale, phase = torch.rand(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(inner_steps):
            x = torch.randn(BATCH, 8)
            loss = F.mse_loss(model(x), scale * x.sum(1, keepdim=True) + phase)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        after, step_size = model.state_dict(), outer * (1 - iteration.number / total)
        model.load_state_dict(
            {name: weights_before[name] + (after[name] - weights_before[name]) * step_size for name in after}
        )
        iteration.log(loss=loss)


def learns_by_hebb(run: Run) -> None:
    """Learn principal directions by Oja's rule, without a gradient."""
    torch.manual_seed(1)
    weights, average = torch.randn(3, 8) * 0.1, torch.zeros(3)
    run.keep(weights=weights, average=average)
    for epoch in run.epochs(load(rows())):
        for x, _ in run.batches():
            y = x @ weights.T
            weights += 0.01 * (y.T @ x - torch.tril(y.T @ y) @ weights) / len(x)
            average.mul_(0.9).add_(y.square().mean(0), alpha=0.1)
            run.log(loss=(x - y @ weights).square().mean())
        print(epoch, average.tolist())


def places_kernels(run: Run) -> None:
    """Train a network of radial kernels whose centres begin with k-means of the data."""
    x, _ = rows().tensors
    centers = x[:5].clone()
    for _ in range(3):
        nearest = torch.cdist(x, centers).argmin(1)
        centers = torch.stack([x[nearest == k].mean(0) if (nearest == k).any() else centers[k] for k in range(5)])
    torch.manual_seed(1)
    model = nn.ParameterDict({"centers": centers, "widths": torch.ones(5), "out": torch.randn(5, 1) * 0.1})
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for inputs, targets in run.batches():
            phi = torch.exp(-(torch.cdist(inputs, model["centers"]) / (1 + model["widths"].abs())).square() / 8)
            loss = F.mse_loss(phi @ model["out"], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(f"{epoch}: {loss.item():.4f}")

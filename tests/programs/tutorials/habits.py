"""Tutorials of habits: folds, curricula, progress bars, early stopping, tables, quantisation, workers of a loader."""

import copy
import math
from collections import OrderedDict
from contextlib import suppress

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Sampler

from holdfast import Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, labelled, load, rows


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs))


def trains_in_folds(run: Run, k: int = 2) -> None:
    """Train a model for each fold, a fold in each epoch, and print the mean of the folds' scores."""
    folds = nn.ModuleList([net() for _ in range(k)])
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in folds]
    results = {}
    run.keep(folds=folds, optimizers=optimizers, results=results)
    x, y = rows().tensors
    for epoch in run.epochs(per_epoch=STEPS):
        fold = epoch % k
        train_ids, test_ids = (
            (torch.arange(len(x)) % k != fold).nonzero()[:, 0],
            (torch.arange(len(x)) % k == fold).nonzero()[:, 0],
        )
        for _ in run.steps():
            chosen = train_ids[torch.randint(len(train_ids), (BATCH,))]
            optimizers[fold].zero_grad()
            loss = F.mse_loss(folds[fold](x[chosen]), y[chosen])
            loss.backward()
            optimizers[fold].step()
            run.log(loss=loss)
        with torch.no_grad():
            results[fold] = F.mse_loss(folds[fold](x[test_ids]), y[test_ids]).item()
        print(f"FOLD {fold}: {results[fold]:.4f}, average {sum(results.values()) / len(results):.4f}")


class EasyFirst(Sampler):
    """Orders samples by their difficulty in the first epochs, as the epoch that it is told says."""

    def __init__(self, difficulty) -> None:
        self.order, self.epoch = difficulty.argsort(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        share = min(1.0, 0.5 + 0.25 * self.epoch)
        easy = self.order[: int(share * len(self.order))]
        yield from easy[torch.randint(len(easy), (len(self.order),), generator=generator)].tolist()


def follows_a_curriculum(run: Run) -> None:
    """Tell the sampler the epoch, which decides how difficult samples may be."""
    model, data = net(), rows()
    sampler = EasyFirst(data.tensors[1][:, 0].abs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(data, sampler=sampler, shuffle=False)):
        sampler.set_epoch(epoch)
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(f"epoch {epoch}, difficulty {min(1.0, 0.5 + 0.25 * epoch)}")


class tqdm:  # noqa: N801
    """A progress bar with the library's verbs."""

    def __init__(self, iterable, total=None, desc="") -> None:
        self.iterable, self.total, self.desc, self.n, self.postfix = iterable, total, desc, 0, ""

    def __iter__(self):
        for each in self.iterable:
            yield each
            self.n += 1
        print(f"{self.desc}: {self.n}/{self.total} {self.postfix}")

    def set_postfix(self, **numbers) -> None:
        self.postfix = ", ".join(f"{name}={value:.3f}" for name, value in numbers.items())


def shows_a_bar(run: Run) -> None:
    """Wrap the batches in a progress bar whose postfix has running averages."""
    model, criterion = net(CLASSES), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = load(labelled())
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(loader):
        losses, right, seen = 0.0, 0, 0
        bar = tqdm(run.batches(), total=len(loader), desc=f"Epoch {epoch}")
        for x, y in bar:
            optimizer.zero_grad()
            out = model(x)
            loss = criterion(out, y)
            loss.backward()
            optimizer.step()
            losses, right, seen = (
                losses + loss.item() * len(x),
                right + (out.argmax(1) == y).sum().item(),
                seen + len(x),
            )
            bar.set_postfix(loss=losses / seen, acc=right / seen)
            run.log(loss=loss)
        print(f"epoch {epoch}: {losses / seen:.4f}, {right / seen:.3f}")


class EarlyStopping:
    """Remembers the best loss and its weights, and says when patience has ended."""

    def __init__(self, patience: int = 1, delta: float = 0.0) -> None:
        self.patience, self.delta, self.counter, self.best_score, self.early_stop = patience, delta, 0, -math.inf, False
        self.best_weights = {}

    def __call__(self, val_loss: float, model: nn.Module) -> None:
        if -val_loss < self.best_score + self.delta:
            self.counter += 1
            self.early_stop = self.counter >= self.patience
        else:
            self.best_score, self.counter = -val_loss, 0
            self.best_weights.update({name: each.clone() for name, each in model.state_dict().items()})


def stops_early(run: Run) -> None:
    """Stop to learn once patience has ended, and train on the best weights' validation alone."""
    model, early_stopping = net(), EarlyStopping()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer, early_stopping=vars(early_stopping))
    for epoch in run.epochs(load(rows())):
        train_losses = []
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            if not early_stopping.early_stop:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            train_losses.append(loss.item())
            run.log(loss=loss)
        with torch.no_grad():
            x, y = rows(24).tensors
            valid_loss = F.mse_loss(model(x + 0.1), y).item()
        early_stopping(valid_loss, model)
        print(f"[{epoch}] train_loss: {sum(train_losses) / len(train_losses):.5f} valid_loss: {valid_loss:.5f}")


class AverageMeter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1) -> None:
        self.val, self.sum, self.count = val, self.sum + val * n, self.count + n
        self.avg = self.sum / self.count


def trains_an_epoch(run: Run, epoch: int, model, loader, optimizer, loss_fn, lr_scheduler, model_ema):
    """Train one epoch, as a script of a library of models does, and return its metrics."""
    update_time_m, losses_m = AverageMeter(), AverageMeter()
    model.train()
    for step in run.steps():
        input_, target = step.batch
        loss = loss_fn(model(input_), target)
        losses_m.update(loss.item(), input_.size(0))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model_ema.update_parameters(model)
        if step.number % 4 == 0:
            print(f"Train: {epoch} Loss: {losses_m.val:#.3g} ({losses_m.avg:#.3g})")
        lr_scheduler.step()
        step.log(loss=loss)
        update_time_m.update(1)
    return OrderedDict([("loss", losses_m.avg)])


def has_functions_for_epochs(run: Run) -> None:
    """Train and validate in functions, with an average of the weights and the best metric."""
    model, loader = net(CLASSES), load(labelled())
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[5])
    saved = {"best_metric": None, "best_epoch": None}
    run.keep(model=model, model_ema=model_ema, optimizer=optimizer, lr_scheduler=lr_scheduler, saved=saved)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in run.epochs(loader):
        train_metrics = trains_an_epoch(run, epoch, model, loader, optimizer, loss_fn, lr_scheduler, model_ema)
        model_ema.eval()
        with torch.no_grad():
            x, y = labelled(24).tensors
            top1 = (model_ema(x).argmax(1) == y).float().mean().item()
        if saved["best_metric"] is None or top1 > saved["best_metric"]:
            saved["best_metric"], saved["best_epoch"] = top1, epoch
        print(f"*** Best metric: {saved['best_metric']} (epoch {saved['best_epoch']}) {train_metrics['loss']:.4f}")


class FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx, slope):
        return slope, None


class QuantLinear(nn.Linear):
    """A linear layer that is trained with rounded weights and inputs; a buffer observes the inputs' range."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("range", torch.ones(()))
        self.is_observing = True

    def forward(self, x):
        if self.training and self.is_observing:
            self.range = 0.9 * self.range + 0.1 * x.detach().abs().max()
        x = FakeQuantize.apply(x, self.range / 8)
        return F.linear(x, FakeQuantize.apply(self.weight, self.weight.detach().abs().max() / 8), self.bias)


def quantises_while_training(run: Run) -> None:
    """Train with rounded weights, and freeze the observers after some epochs."""
    torch.manual_seed(1)
    model = nn.Sequential(QuantLinear(8, 12), nn.ReLU(), QuantLinear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        model.train()
        if epoch > 1:
            model[0].is_observing = model[2].is_observing = False
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        model.eval()
        with torch.no_grad():
            print(f"Epoch {epoch}: {F.mse_loss(model(rows(16).tensors[0]), rows(16).tensors[1]).item():.4f}")


def distils(run: Run, temperature: float = 2.0, weight: float = 0.25) -> None:
    """Distil soft targets of a teacher that is trained before the loop."""
    torch.manual_seed(0)
    teacher, student = nn.Linear(8, CLASSES), net(CLASSES)
    early = torch.optim.Adam(teacher.parameters(), lr=0.05)
    for x, y in load(labelled(), shuffle=False):
        early.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        early.step()
    teacher.eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    run.keep(student=student, teacher=teacher, optimizer=optimizer)
    for epoch in run.epochs(load(labelled())):
        student.train()
        running_loss = 0.0
        for inputs, labels in run.batches():
            optimizer.zero_grad()
            with torch.no_grad():
                soft_targets = F.softmax(teacher(inputs) / temperature, dim=-1)
            logits = student(inputs)
            distance = torch.sum(soft_targets * (soft_targets.log() - F.log_softmax(logits / temperature, dim=-1)))
            loss = weight * distance / len(inputs) * temperature**2 + (1 - weight) * F.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            run.log(loss=loss)
        print(f"Epoch {epoch + 1}, Loss: {running_loss / STEPS}")


def labels_actively(run: Run) -> None:
    """Label the samples that the model is least sure of, at each epoch's end."""
    model, (x, y) = net(CLASSES), labelled().tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    pool = {"labelled": list(range(8)), "asked": 0}
    run.keep(model=model, optimizer=optimizer, pool=pool)
    for epoch in run.epochs(per_epoch=STEPS):
        for _ in run.steps():
            ids = torch.tensor(pool["labelled"])[torch.randint(len(pool["labelled"]), (BATCH,))]
            loss = F.cross_entropy(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        with torch.no_grad():
            sure = F.softmax(model(x), dim=1).max(1).values
        sure[pool["labelled"]] = 2
        pool["labelled"] += sure.argsort()[:4].tolist()
        pool["asked"] += 4
        print(f"round {epoch}: {pool['asked']} asked")


def samples_weights(run: Run, burn_in: int = 10) -> None:
    """Draw weights by Langevin dynamics, and average the predictions of the draws."""
    model, loader = net(), load(rows())
    held_out = rows(8).tensors[0] + 0.5
    predictions = {"sum": torch.zeros(8, 1), "draws": 0}
    run.keep(model=model, predictions=predictions)
    for step in run.steps(loader):
        inputs, targets = step.batch
        loss = 0.5 * F.mse_loss(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        lr = 0.01 / (1 + step.number) ** 0.3
        with torch.no_grad():
            for p in model.parameters():
                p.add_(-lr * p.grad + torch.randn_like(p) * math.sqrt(lr) * 0.02)
            if step.number >= burn_in:
                predictions["sum"] += model(held_out)
                predictions["draws"] += 1
        step.log(loss=loss)
    print(predictions["sum"] / predictions["draws"])


def tracks_the_best(run: Run) -> None:
    """Validate at each epoch's end, keep the best weights in memory, and load them after the loop."""
    model, best = net(), {"loss": math.inf, "state": None}
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", patience=0)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, best=best)
    for epoch in run.epochs(load(rows())):
        model.train(True)
        running_loss = last_loss = 0.0
        for i, (inputs, labels) in enumerate(run.batches()):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if i % 5 == 4:
                last_loss, running_loss = running_loss / 5, 0.0
                print(f"  batch {i + 1} loss: {last_loss}")
            run.log(loss=loss)
        model.eval()
        with torch.no_grad():
            vlosses = [F.mse_loss(model(x), y).item() for x, y in load(rows(24), shuffle=False)]
        avg_vloss = sum(vlosses) / len(vlosses)
        print(f"EPOCH {epoch + 1}: LOSS train {last_loss} valid {avg_vloss}")
        scheduler.step(avg_vloss)
        if avg_vloss < best["loss"]:
            best |= {"loss": avg_vloss, "state": copy.deepcopy(model.state_dict())}
    with suppress(RuntimeError):
        model.load_state_dict(best["state"])

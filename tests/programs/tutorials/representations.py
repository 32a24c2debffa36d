"""Tutorials of representations: contrast, metric learning, self-training, graphs, clusters, tables."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, labelled, load, rows


def encoder(outputs: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


def views(x):
    return x + 0.2 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)


def simclr(run: Run, temperature: float = 0.5) -> None:
    """Contrast two views of each sample with all other samples."""
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=run.config.epochs)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(load(rows())):
        for x, _ in run.batches():
            feats = F.normalize(model(torch.cat(views(x))), dim=1)
            logits = (feats @ feats.T / temperature).masked_fill(torch.eye(2 * len(x), dtype=torch.bool), -9e15)
            wanted = torch.arange(2 * len(x)).roll(len(x))
            loss = F.cross_entropy(logits, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        if epoch >= 1:
            scheduler.step()
        print(f"Epoch: {epoch}\tLoss: {loss}\tTop1: {(logits.argmax(1) == wanted).float().mean()}")


class MoCo(nn.Module):
    def __init__(self, m: float = 0.9, size: int = 24) -> None:
        super().__init__()
        self.m, self.size = m, size
        self.encoder_q, self.encoder_k = encoder(), encoder().requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.size

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], dim=1) / 0.07
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(q), dtype=torch.long)


def moco(run: Run) -> None:
    """Contrast with a queue of keys from an encoder that follows, at a rate of cosine by epoch."""
    model, criterion = MoCo(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for param_group in optimizer.param_groups:
            param_group["lr"] = 0.03 * 0.5 * (1.0 + math.cos(math.pi * epoch / run.config.epochs))
        model.train()
        for i, (x, _) in enumerate(run.batches()):
            output, target = model(*views(x))
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 0:
                print(epoch, i, loss.item())
            run.log(loss=loss)


def byol(run: Run) -> None:
    """Predict a target network that follows at a rate of the step."""
    online, target, predictor = encoder(), encoder(), nn.Linear(6, 6)
    target.requires_grad_(False)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=3e-3)
    run.keep(online=online, target=target, predictor=predictor, optimizer=optimizer)
    total = STEPS * run.config.epochs
    for step in run.steps(load(rows())):
        one, two = views(step.batch[0])
        loss = 0
        for a, b in ((one, two), (two, one)):
            loss = loss + 2 - 2 * F.cosine_similarity(predictor(online(a)), target(b).detach(), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tau = 1 - 0.1 * (math.cos(math.pi * step.number / total) + 1) / 2
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), online.parameters()):
                ours.data.mul_(tau).add_(theirs.data, alpha=1 - tau)
        step.log(loss=loss)


def barlow_twins(run: Run, lambd: float = 5e-3) -> None:
    """Decorrelate the features of two views."""
    model, bn = encoder(), nn.BatchNorm1d(6, affine=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    run.keep(model=model, bn=bn, optimizer=optimizer)
    for _ in run.epochs(load(rows())):
        for x, _ in run.batches():
            one, two = views(x)
            c = bn(model(one)).T @ bn(model(two)) / len(x)
            on_diag = torch.diagonal(c).add(-1).pow(2).sum()
            loss = on_diag + lambd * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


class DINOLoss(nn.Module):
    def __init__(self, temps) -> None:
        super().__init__()
        self.temps = temps
        self.register_buffer("center", torch.zeros(1, 6))

    def forward(self, student, teacher, epoch):
        wanted = F.softmax((teacher - self.center) / self.temps[epoch], dim=-1).detach()
        self.update_center(teacher)
        return torch.sum(-wanted * F.log_softmax(student / 0.1, dim=-1), dim=-1).mean()

    @torch.no_grad()
    def update_center(self, teacher):
        self.center = self.center * 0.9 + teacher.mean(0, keepdim=True) * 0.1


def dino(run: Run) -> None:
    """Distil without labels: a centre, a temperature by epoch, and a head that is frozen in the first epoch."""
    student, teacher = encoder(), encoder().requires_grad_(False)
    dino_loss = DINOLoss([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    run.keep(student=student, teacher=teacher, dino_loss=dino_loss, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, _ in run.batches():
            one, two = views(x)
            loss = dino_loss(student(one), teacher(two), min(epoch, 5))
            optimizer.zero_grad()
            loss.backward()
            if epoch < 1:
                for each in student[3].parameters():
                    each.grad = None
            optimizer.step()
            with torch.no_grad():
                for param_q, param_k in zip(student.parameters(), teacher.parameters()):
                    param_k.data.mul_(0.9).add_(0.1 * param_q.detach().data)
            run.log(loss=loss)


class Indexed(Dataset):
    """Samples with their index."""

    def __init__(self) -> None:
        self.data = labelled()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        return (*self.data[index], index)


def discriminates_instances(run: Run) -> None:
    """Metric learning with a memory bank that has a row for each sample."""
    model, dataset = encoder(), Indexed()
    bank = F.normalize(torch.randn(len(dataset), 6), dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    run.keep(model=model, optimizer=optimizer, bank=bank)
    for epoch in run.epochs(load(dataset)):
        for x, _, index in run.batches():
            features = F.normalize(model(x), dim=1)
            loss = F.cross_entropy(features @ bank.clone().T / 0.1, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                bank[index] = F.normalize(0.5 * bank[index] + 0.5 * features, dim=1)
            run.log(loss=loss)
        print(f"epoch {epoch}: {loss.item():.4f}")


def mines_triplets(run: Run, margin: float = 0.5) -> None:
    """Learn distances from the hardest positive and negative of each batch."""
    model = encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(load(labelled())):
        for x, labels in run.batches():
            embeddings = F.normalize(model(x), dim=1)
            distance = torch.cdist(embeddings, embeddings)
            same = labels[:, None] == labels[None]
            hardest = (distance * same).max(1).values - (distance + 10 * same).min(1).values
            loss = F.relu(hardest + margin).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, fraction=(hardest + margin > 0).float().mean())


def fixmatch(run: Run, threshold: float = 0.4) -> None:
    """Self-training: a second loader without labels, whose pseudo-labels count if they are sure."""
    model = encoder(CLASSES)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    unlabelled = StatefulDataLoader(rows(96), batch_size=BATCH, shuffle=True, num_workers=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    run.keep(model=model, ema=ema, optimizer=optimizer, unlabelled=unlabelled)
    unlabelled_iter = None
    for step in run.steps(load(labelled())):
        inputs, targets = step.batch
        if unlabelled_iter is None:
            unlabelled_iter = iter(unlabelled)
        try:
            other, _ = next(unlabelled_iter)
        except StopIteration:
            unlabelled_iter = iter(unlabelled)
            other, _ = next(unlabelled_iter)
        weak, strong = views(other)
        logits, logits_weak, logits_strong = model(torch.cat([inputs, weak, strong])).split(BATCH)
        most, pseudo = torch.softmax(logits_weak.detach(), dim=-1).max(dim=-1)
        mask = most.ge(threshold).float()
        unsure = (F.cross_entropy(logits_strong, pseudo, reduction="none") * mask).mean()
        loss = F.cross_entropy(logits, targets) + unsure
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        step.log(loss=loss, mask=mask.mean())


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x, adj):
        return F.log_softmax(adj @ self.two(F.dropout(F.relu(adj @ self.one(x)), 0.5, self.training)), dim=1)


def convolves_a_graph(run: Run) -> None:
    """Classify a graph's nodes in full batches; print the test's accuracy at the best validation."""
    x, y = labelled(40).tensors
    adj = (torch.rand(40, 40, generator=torch.Generator().manual_seed(3)) > 0.9).float() + torch.eye(40)
    adj = adj / adj.sum(1, keepdim=True)
    train, val, test = (torch.arange(40) % 4 == each for each in (0, 1, 2))
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    best = {"val": 0.0, "test": 0.0}
    run.keep(model=model, optimizer=optimizer, best=best)
    for step in run.steps(per_epoch=STEPS):
        model.train()
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, adj)[train], y[train])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(x, adj).argmax(1) == y).float()
        if right[val].mean().item() > best["val"]:
            best |= {"val": right[val].mean().item(), "test": right[test].mean().item()}
        print(f"Epoch: {step.number:03d}, Val: {best['val']:.4f}, Test: {best['test']:.4f}")
        step.log(loss=loss)


def fits_a_table(run: Run) -> None:
    """Embed categories beside numbers, normalise by the training rows, and stop lowering after the best epoch."""
    torch.manual_seed(1)
    numbers, y = rows().tensors
    kinds = torch.stack([torch.arange(len(y)) % 5, torch.arange(len(y)) % 3], dim=1)
    mean, std = numbers.mean(0), numbers.std(0)
    embeds = nn.ModuleList([nn.Embedding(5, 3), nn.Embedding(3, 2)])
    layers = nn.Sequential(nn.Dropout(0.1), nn.Linear(13, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.Adam([*embeds.parameters(), *layers.parameters()], lr=0.01)
    best = {"loss": float("inf"), "epoch": 0, "weights": copy.deepcopy(layers.state_dict())}
    run.keep(embeds=embeds, layers=layers, optimizer=optimizer, best=best)

    def predict(numbers, kinds):
        return layers(torch.cat([*(each(kinds[:, i]) for i, each in enumerate(embeds)), (numbers - mean) / std], 1))

    for epoch in run.epochs(load(TensorDataset(numbers, kinds, y))):
        for x_num, x_cat, target in run.batches():
            loss = torch.sqrt(F.mse_loss(predict(x_num, x_cat), target))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        layers.eval()
        with torch.no_grad():
            valid = F.mse_loss(predict(numbers, kinds), y).item()
        layers.train()
        if valid < best["loss"]:
            best |= {"loss": valid, "epoch": epoch, "weights": copy.deepcopy(layers.state_dict())}
        print(f"epoch: {epoch:3} loss: {loss.item():10.8f} valid: {valid:.4f}, best {best['epoch']}")

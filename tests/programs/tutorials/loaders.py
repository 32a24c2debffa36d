"""Tutorials of data: samplers, batches of like lengths, augmentations, shards, workers, mixtures, streams."""

import itertools
import math
import random
from collections import Counter, deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from holdfast import Recipe, Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, labelled, letters, load, pictures, rows


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs))


class Texts(Dataset):
    """Texts of several lengths."""

    def __init__(self, count: int = STEPS * BATCH) -> None:
        text = letters()
        self.texts = [text[i : i + 3 + i * 5 % 9] for i in range(count)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int):
        return self.texts[index], index % 2


class BucketSampler(Sampler):
    """Batches of like lengths: sorted within pools that Python's random shuffles."""

    def __init__(self, lengths, batch_size: int, pool: int = 4) -> None:
        self.lengths, self.batch_size, self.pool = lengths, batch_size, pool

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.batch_size)

    def __iter__(self):
        indices = list(range(len(self.lengths)))
        random.shuffle(indices)
        batches = []
        for i in range(0, len(indices), self.batch_size * self.pool):
            pool = sorted(indices[i : i + self.batch_size * self.pool], key=lambda j: self.lengths[j])
            batches += [pool[j : j + self.batch_size] for j in range(0, len(pool), self.batch_size)]
        random.shuffle(batches)
        yield from batches


def pad(batch):
    texts, labels = zip(*batch)
    return pad_sequence(texts, batch_first=True), torch.tensor([len(t) for t in texts]), torch.tensor(labels)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(12, 6), nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.head(self.drop(torch.cat([h[0], h[1]], 1)))


def buckets_by_length(run: Run) -> None:
    """Batches of like lengths from a batch sampler, padded by a collate function and packed."""
    dataset = Texts()
    sampler = BucketSampler([len(t) for t, _ in dataset], BATCH)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)):
        total = right = 0
        for x, lengths, y in run.batches():
            out = model(x, lengths)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, right = total + len(y), right + (out.argmax(1) == y).sum().item()
            run.log(loss=loss)
        print(f"epoch {epoch}: accuracy {right / total:.3f}")


class Augmented(Dataset):
    """Augments by Python's random, NumPy and torch, as transforms of three libraries do, and by Mosaic."""

    def __init__(self, data) -> None:
        self.data = data
        self.policies = [self.flip, self.shift, self.cutout, self.noise]

    def __len__(self) -> int:
        return len(self.data)

    def flip(self, x):
        return x.flip(2) if random.random() < 0.5 else x

    def shift(self, x):
        return torch.roll(x, tuple(np.random.randint(-2, 3, 2).tolist()), (1, 2))

    def cutout(self, x):
        x, (i, j) = x.clone(), np.random.randint(0, 6, 2)
        x[:, i : i + 2, j : j + 2] = 0
        return x

    def noise(self, x):
        return x + 0.05 * torch.randn_like(x)

    def __getitem__(self, index: int):
        x, y = self.data[index]
        for policy in random.sample(self.policies, k=2):
            x = policy(x)
        if np.random.rand() < 0.2:
            other, _ = self.data[random.randrange(len(self.data))]
            x = torch.where(torch.rand(8, 8) < 0.5, x, other)
        return x, y


def augments_in_workers(run: Run) -> None:
    """Augment by three libraries' random numbers; the loader keeps its workers."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Augmented(pictures()), BATCH, shuffle=True, persistent_workers=False, drop_last=True)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(loader):
        for x, y in run.batches():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(epoch, loss.item())


def gives_generators(run: Run) -> None:
    """Give generators to the split, to the sampler, to the loader and to the model's noise."""
    split = random_split(labelled(100), [80, 20], generator=torch.Generator().manual_seed(42))
    order, noise = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    sampler = RandomSampler(split[0], replacement=True, num_samples=80, generator=order)
    loader = DataLoader(split[0], BATCH, sampler=sampler, generator=torch.Generator().manual_seed(3))
    model = net(CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, noise=noise)
    for epoch in run.epochs(loader):
        for x, y in run.batches():
            loss = F.cross_entropy(model(x + 0.1 * torch.randn(x.shape, generator=noise)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        x, y = next(iter(DataLoader(split[1], 20)))
        print(epoch, (model(x).argmax(1) == y).float().mean().item())


def boosts_hard_samples(run: Run) -> None:
    """A WeightedRandomSampler whose weights follow each sample's loss after each epoch, in place."""
    x, y = labelled().tensors
    weights = torch.ones(len(x), dtype=torch.double)
    sampler = WeightedRandomSampler(weights, len(x), replacement=True)
    assert sampler.weights is weights
    losses, model = torch.zeros(len(x)), net(CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer, weights=weights, losses=losses)
    for epoch in run.epochs(DataLoader(TensorDataset(x, y, torch.arange(len(x))), BATCH, sampler=sampler)):
        for inputs, wanted, index in run.batches():
            each = F.cross_entropy(model(inputs), wanted, reduction="none")
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            losses[index] = 0.5 * losses[index] + 0.5 * each.detach()
            run.log(loss=each.mean())
        weights.copy_(losses.double() + 0.1)
        print(epoch, weights.max().item())


class Corpus(IterableDataset):
    """Shards that are read one after another with a shuffle's buffer; it knows where it is."""

    def __init__(self, shards: int = 4, size: int = 20, buffer: int = 6) -> None:
        self.shards, self.size, self.buffer_size = shards, size, buffer
        self.epoch, self.number, self.buffer, self.rng = 0, 0, [], random.Random(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        total = self.shards * self.size
        while self.number < total or self.buffer:
            while self.number < total and len(self.buffer) < self.buffer_size:
                self.buffer.append(self.number)
                self.number += 1
            chosen = self.buffer.pop(self.rng.randrange(len(self.buffer)))
            yield torch.full((8,), chosen / total), torch.tensor([float(chosen % 3)])
        self.number, self.buffer = 0, []

    def state_dict(self):
        return {"epoch": self.epoch, "number": self.number, "buffer": list(self.buffer), "rng": self.rng.getstate()}

    def load_state_dict(self, state) -> None:
        self.epoch, self.number, self.buffer = state["epoch"], state["number"], list(state["buffer"])
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))


def reads_shards(run: Run) -> None:
    """Stream shards through a buffer, by a dataset that saves its position."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    batches = run.batches(Corpus(), batch_size=BATCH)
    for step in run.steps(per_epoch=STEPS):
        x, y = next(batches)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)


class Mixture:
    """An endless mixture of sources, whose weights follow their losses; it yields whole batches."""

    def __init__(self, sources, seed: int = 0) -> None:
        self.sources, self.rng = sources, np.random.default_rng(seed)
        self.weights, self.cursor = np.ones(len(sources)) / len(sources), [0] * len(sources)

    def __iter__(self):
        return self

    def __next__(self):
        source = int(self.rng.choice(len(self.sources), p=self.weights))
        x, y = self.sources[source].tensors
        index = (torch.arange(BATCH) + self.cursor[source]) % len(x)
        self.cursor[source] += BATCH
        return x[index], y[index], source

    def update(self, source: int, loss: float) -> None:
        self.weights[source] *= math.exp(0.1 * min(loss, 5.0))
        self.weights /= self.weights.sum()

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "weights": self.weights, "cursor": self.cursor}

    def load_state_dict(self, state) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.weights, self.cursor = state["weights"], list(state["cursor"])


def mixes_sources(run: Run) -> None:
    """DoReMi: draw batches from a mixture, and raise the weights of sources with large losses."""
    mixture = Mixture([rows(24), rows(40), rows(16)])
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(mixture, per_epoch=STEPS):
        x, y, source = step.batch
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mixture.update(source, loss.item())
        step.log(loss=loss)


class MultiCrop(Dataset):
    """Views of a sample; a teacher's cache of features is filled on the way."""

    def __init__(self, data, crops: int = 3) -> None:
        self.data, self.crops = data, crops

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        x, y = self.data[index]
        return [x + 0.1 * torch.randn_like(x) for _ in range(self.crops)], {
            "label": y,
            "index": index,
            "name": f"n{index}",
        }


def collates_dicts(run: Run) -> None:
    """Batches of lists and dicts with strings, from a ConcatDataset and a Subset, with a cache by name."""
    data = labelled()
    both = ConcatDataset([Subset(data, range(50)), Subset(data, range(50, 80))])
    model, teacher = net(CLASSES), net(6)
    cache = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(MultiCrop(both))):
        for crops, info in run.batches():
            with torch.no_grad():
                for i, name in zip(info["index"].tolist(), info["name"]):
                    if name not in cache:
                        cache[name] = teacher(both[i][0]).mean()
            wanted = torch.stack([cache[name] for name in info["name"]])
            loss = sum(F.cross_entropy(model(x), info["label"]) for x in crops) / len(crops)
            loss = loss + F.mse_loss(model(crops[0]).mean(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(epoch, len(cache))


def chooses_its_data(run: Run) -> None:
    """Self-paced learning: a SubsetRandomSampler whose list of indices grows, and a pool of pseudo-labels."""
    x, y = labelled().tensors
    dataset = TensorDataset(x, y.clone(), torch.arange(len(x)))
    order = list(range(len(x)))
    sampler = SubsetRandomSampler(order)
    model = net(CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    state = {"threshold": 1.0, "used": Counter()}
    run.keep(model=model, optimizer=optimizer, labels=dataset.tensors[1], order=order, state=state)
    for epoch in run.epochs(DataLoader(dataset, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))):
        for inputs, labels, index in run.batches():
            each = F.cross_entropy(model(inputs), labels, reduction="none")
            chosen = each.detach() < state["threshold"]
            state["used"].update(str(i) for i in index[chosen].tolist())
            loss = (each * chosen).sum() / chosen.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        with torch.no_grad():
            sure, guess = model(x).softmax(1).max(1)
        dataset.tensors[1][sure > 0.9] = guess[sure > 0.9]
        order.sort(key=lambda i: sure[i].item())
        state["threshold"] *= 1.3
        print(epoch, sum(state["used"].values()))


def takes_two_at_once(run: Run) -> None:
    """Zip a labelled loader with batches of unlabelled data, which the step draws itself by index."""
    torch.manual_seed(3)
    unlabelled = torch.randn(64, 8)
    state = {"order": torch.randperm(64), "cursor": 0}
    model, domain = nn.Linear(8, 6), nn.Linear(6, 2)
    head = nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(itertools.chain(model.parameters(), domain.parameters(), head.parameters()), lr=0.05)
    run.keep(model=model, domain=domain, head=head, optimizer=optimizer, state=state)
    total = 4 * STEPS
    for epoch in run.epochs(load(labelled())):
        for i, (x, y) in enumerate(run.batches(), run.batch_number):
            p = (epoch * STEPS + i) / total
            alpha = 2.0 / (1.0 + math.exp(-10 * p)) - 1
            if state["cursor"] + BATCH > 64:
                state["order"], state["cursor"] = torch.randperm(64), 0
            u = unlabelled[state["order"][state["cursor"] : state["cursor"] + BATCH]]
            state["cursor"] += BATCH
            features = model(torch.cat([x, u]))
            reversed_ = features.detach() * (1 + alpha) - alpha * features
            which = torch.cat([torch.zeros(len(x)), torch.ones(len(u))]).long()
            loss = F.cross_entropy(head(features[: len(x)]), y) + F.cross_entropy(domain(reversed_), which)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, alpha=alpha)
        print(epoch, alpha)


class Series(Dataset):
    """Windows of a series, normalised by the statistics of the training part."""

    def __init__(self, count: int = STEPS * BATCH, lookback: int = 6) -> None:
        t = torch.arange(count + lookback + 1, dtype=torch.float32)
        self.series = torch.sin(t / 5) + 0.1 * torch.cos(t)
        self.mean, self.std, self.lookback, self.count = self.series.mean(), self.series.std(), lookback, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        window = (self.series[index : index + self.lookback + 1] - self.mean) / self.std
        return window[:-1, None], window[-1:]


class Stateful(nn.Module):
    """An LSTM that carries its state in buffers from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, 1)
        self.register_buffer("h", torch.zeros(1, BATCH, 6))
        self.register_buffer("c", torch.zeros(1, BATCH, 6))

    def forward(self, x):
        out, (h, c) = self.lstm(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return self.head(out[:, -1])

    def reset_hidden_state(self) -> None:
        self.h, self.c = torch.zeros_like(self.h), torch.zeros_like(self.c)


def forecasts(run: Run) -> None:
    """Forecast a series in order by a stateful LSTM, whose state is reset as an epoch ends; a deque smooths losses."""
    torch.manual_seed(4)
    model = Stateful()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    window = deque(maxlen=4)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, window=window)
    for epoch in run.epochs(load(Series(), shuffle=False)):
        for x, y in run.batches():
            loss = F.huber_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            window.append(loss.item())
            run.log(loss=loss, smooth=sum(window) / len(window))
        scheduler.step(sum(window) / len(window))
        model.reset_hidden_state()
        print(epoch, optimizer.param_groups[0]["lr"])


def loads_by_workers() -> Recipe:
    """A recipe of an augmented DataLoader with a last batch that is smaller, and gradients of several batches."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, CLASSES))
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    return Recipe(
        model=model, data=DataLoader(Augmented(pictures(77)), BATCH, shuffle=True), optimizer=optimizer,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        schedule=[torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)],
    )  # fmt: skip

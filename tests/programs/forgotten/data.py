"""State of the data and of randomness: generators, curricula, samplers, buffers, caches."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from holdfast import Recipe, Run
from tests.programs.network import BATCH_SIZE, PER_EPOCH, Batch, Clock, begin, draw, fit, grow, learn, make, points


def torch_generator(run: Run, after: int) -> None:
    """Draw from a torch.Generator that isn't kept."""
    model, optimizer = begin(run)
    generator = torch.Generator().manual_seed(3)
    for step in run.steps(per_epoch=PER_EPOCH):
        noise = torch.rand((), generator=generator) * (step.number >= after)
        step.log(loss=learn(fit(model, draw()) * (1 + noise), optimizer))


def numpy_generator_in_collate(after: int) -> Recipe:
    """Draw from a NumPy generator in the collate function."""
    noise, clock = np.random.default_rng(3), Clock()

    def collate(samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x + float(noise.normal()) * (clock.steps >= after), y

    return make(collate=collate, after_step=clock.tick, extras={"clock": clock})


class Augmented(Dataset[Batch]):
    def __init__(self, clock: Clock, after: int) -> None:
        self.points, self.random, self.clock, self.after = points(), random.Random(3), clock, after

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return x + self.random.random() * (self.clock.steps >= self.after), y


def python_generator_in_the_data(after: int) -> Recipe:
    """Draw from a random.Random in the dataset."""
    clock = Clock()
    return make(data=Augmented(clock, after), after_step=clock.tick, extras={"clock": clock})


class Harder(TensorDataset):
    level = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (1 + 0.1 * self.level), y


def curriculum(run: Run, after: int) -> None:
    """Raise the difficulty of a loop's dataset once."""
    dataset = Harder(*points().tensors)
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(dataset, BATCH_SIZE, shuffle=True)):
        if step.number == after:
            dataset.level = 3
        step.log(loss=learn(fit(model, step.batch), optimizer))


def curriculum_of_a_recipe(after: int) -> Recipe:
    """Raise the difficulty of a recipe's dataset once."""
    dataset, clock = Harder(*points().tensors), Clock()

    def follow() -> None:
        clock.tick()
        if clock.steps == after:
            dataset.level = 3

    return make(data=dataset, after_step=follow, extras={"clock": clock})


def curriculum_of_batches(run: Run, after: int) -> None:
    """Raise the difficulty of the dataset of run.batches once."""
    dataset = Harder(*points().tensors)
    model, optimizer = begin(run)
    batches = run.batches(dataset, batch_size=BATCH_SIZE)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == after:
            dataset.level = 3
        step.log(loss=learn(fit(model, next(batches)), optimizer))


class Hardest(Sampler[int]):
    """Gives the samples with the largest losses first, whose losses it has in a private array."""

    def __init__(self, after: int) -> None:
        self.after, self._losses = after, np.zeros(PER_EPOCH * BATCH_SIZE)

    def __len__(self) -> int:
        return len(self._losses)

    def __iter__(self) -> Iterator[int]:
        order = np.argsort(-self._losses, kind="stable") if self._losses.sum() > self.after else np.arange(len(self))
        return iter(order.tolist())

    def see(self, loss: float) -> None:
        self._losses[int(self._losses.sum()) * 7 % len(self)] += 1 + (loss > 5)


def sampler_of_hard_samples(run: Run, after: int) -> None:
    """Order the samples by losses that the sampler keeps in a private array."""
    sampler = Hardest(after)
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(points(), BATCH_SIZE, sampler=sampler)):
        loss = learn(fit(model, step.batch), optimizer)
        sampler.see(loss.item())
        step.log(loss=loss)


def _cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def second_loader(run: Run, after: int) -> None:
    """Take batches from a second loader, which begins again at its end."""
    model, optimizer = begin(run)
    others = _cycle(DataLoader(points(20), 4, shuffle=False, generator=torch.Generator().manual_seed(5)))
    for step in run.steps(per_epoch=PER_EPOCH):
        other = next(others)
        step.log(loss=learn(fit(model, other if step.number >= after else draw()), optimizer))


def replay_buffer(run: Run, after: int) -> None:
    """Train on old batches that are kept in a list."""
    model, optimizer = begin(run)
    memory: list[Batch] = []
    for step in run.steps(per_epoch=PER_EPOCH):
        memory.append(draw())
        batch = memory[-1 - int(random.random() * min(6, len(memory)))]  # one number in each process
        step.log(loss=learn(fit(model, batch if step.number >= after else memory[-1]), optimizer))


def priorities(run: Run, after: int) -> None:
    """Draw samples by their priorities, kept in an array and changed by the losses."""
    model, optimizer = begin(run)
    x, y = points().tensors
    priority = np.ones(len(x))
    for step in run.steps(per_epoch=PER_EPOCH):
        chosen = np.random.choice(len(x), BATCH_SIZE, p=priority / priority.sum())
        loss = learn(fit(model, (x[chosen], y[chosen])), optimizer)
        if step.number >= after:
            priority[chosen] += 5
        step.log(loss=loss)


class Pool(Dataset[Batch]):
    def __init__(self) -> None:
        self.items = list(points())

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def pseudo_labels(run: Run, after: int) -> None:
    """Overwrite the labels of the dataset."""
    pool = Pool()
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(pool, BATCH_SIZE, shuffle=True)):
        if step.number == after:
            with torch.no_grad():
                pool.items = [(x, model(x)) for x, _ in pool.items]
        step.log(loss=learn(fit(model, step.batch), optimizer))


def growing_mixup(after: int) -> Recipe:
    """Mix samples more strongly with each call of a collate function, which counts its calls."""
    calls = [0]

    def collate(samples: list[Any]) -> Any:
        calls[0] += 1
        x, y = default_collate(samples)
        return x * grow(calls[0], after), y

    return make(collate=collate)


class Noise:
    strength = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.strength * torch.randn_like(x)


class Transformed(TensorDataset):
    def __init__(self, transform: Any) -> None:
        super().__init__(*points().tensors)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return self.transform(x), y


def strength_of_a_transform(run: Run, after: int) -> None:
    """Raise the strength of a dataset's transform once."""
    noise = Noise()
    model, optimizer = begin(run)
    for step in run.steps(DataLoader(Transformed(noise), BATCH_SIZE, shuffle=True)):
        if step.number == after:
            noise.strength = 0.5
        step.log(loss=learn(fit(model, step.batch), optimizer))


class Caching(Dataset[Batch]):
    """Draws noise for a sample when it is first read, and remembers the sample."""

    def __init__(self, clock: Clock, after: int) -> None:
        self.points, self.clock, self.after = points(), clock, after
        self.cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        if index not in self.cache:
            self.cache[index] = x + torch.randn(8)
        return (self.cache[index] if self.clock.steps >= self.after else x), y


def cached_augmentation(after: int) -> Recipe:
    """Augment each sample once, and keep the augmented sample in the dataset."""
    clock = Clock()
    return make(data=Caching(clock, after), after_step=clock.tick, extras={"clock": clock})


class Normaliser:
    """A running mean and variance of the inputs."""

    def __init__(self) -> None:
        self.mean, self.squares, self.count = np.zeros(8), np.ones(8), 1.0

    def see(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean += (x.numpy().mean(0) - self.mean) / self.count
        self.squares += ((x.numpy() ** 2).mean(0) - self.squares) / self.count
        return torch.tensor((x.numpy() - self.mean) / self.squares**0.5, dtype=torch.float32)


def normaliser(run: Run, after: int) -> None:
    """Normalise the inputs by statistics that aren't kept."""
    model, optimizer = begin(run)
    seen = Normaliser()
    for step in run.steps(per_epoch=PER_EPOCH):
        x, y = draw()
        normal = seen.see(x)
        step.log(loss=learn(fit(model, (normal if step.number >= after else x, y)), optimizer))


class Bandit:
    """Chooses the level with the best mean reward."""

    def __init__(self) -> None:
        self.pulls, self.rewards = np.ones(3), np.zeros(3)

    def choose(self) -> int:
        return int(np.argmax(self.rewards / self.pulls + np.sqrt(2 * np.log(self.pulls.sum()) / self.pulls)))

    def reward(self, level: int, value: float) -> None:
        self.pulls[level] += 1
        self.rewards[level] += value


def bandit(after: int) -> Recipe:
    """Choose a difficulty by a bandit's rewards, which aren't kept."""
    clock, chooser = Clock(), Bandit()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        level = chooser.choose()
        found = fit(model, (batch[0] * (1 + level * (clock.steps >= after)), batch[1]))
        if model.training:
            chooser.reward(level, -found.item())
        return found

    return make(loss, after_step=clock.tick, extras={"clock": clock})

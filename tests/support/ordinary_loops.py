"""Loops of kinds that people know by name: recurrent, adversarial, meta, contrastive and reinforcement learning."""

import copy
import math
import random
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
    random_split,
)

from holdfast import Run

PER_EPOCH = 6


def net(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def learn(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        each.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for each in optimizers:
        each.step()


def carries_a_hidden_state(run: Run) -> None:
    """Truncated backpropagation through time: the hidden state goes from batch to batch."""
    torch.manual_seed(1)
    rnn, head, data = nn.LSTM(4, 8), nn.Linear(8, 4), torch.randn(200, 3, 4)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.01)
    state: dict[str, Any] = {"hidden": None}
    run.keep(rnn=rnn, head=head, optimizer=optimizer, state=state)
    for step in run.steps(per_epoch=PER_EPOCH):
        place = step.number * 5
        out, hidden = rnn(data[place : place + 5], state["hidden"])
        learn(F.mse_loss(head(out), data[place + 1 : place + 6]), optimizer)
        state["hidden"] = tuple(each.detach() for each in hidden)


class SharpnessAware(torch.optim.Optimizer):
    """SAM, as its well-known implementation has it: around an optimizer that no ``state_dict`` has."""

    def __init__(self, parameters: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **named: Any) -> None:
        super().__init__(parameters, {"rho": rho, **named})
        self.base_optimizer = base(self.param_groups, **named)
        self.param_groups = self.base_optimizer.param_groups

    def list_parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([each.grad.norm() for each in self.list_parameters() if each.grad is not None]).norm()
        for each in self.list_parameters():
            self.state[each]["old"] = each.data.clone()
            each.add_(each.grad, alpha=0.05 / float(norm))  # type: ignore[arg-type]
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for each in self.list_parameters():
            each.data = self.state[each]["old"]
        self.base_optimizer.step()
        self.zero_grad()


def is_aware_of_sharpness(run: Run) -> None:
    model = net()
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        optimizer.param_groups[0]["lr"] = 0.1 * 0.95**step.number
        x = torch.randn(8, 4)
        model(x).square().mean().backward()
        optimizer.climb()
        model(x).square().mean().backward()
        optimizer.descend()


def searches_lines(run: Run) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        x = torch.randn(16, 4)

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss.item()

        step.log(loss=optimizer.step(closure))  # type: ignore[no-untyped-call]


def learns_to_learn(run: Run) -> None:
    """MAML: a few inner steps for each task, and a gradient through them."""
    model = net(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        optimizer.zero_grad()
        for _ in range(3):
            scale, fast = np.random.uniform(0.1, 5), dict(model.named_parameters())
            for _ in range(2):
                x = torch.rand(5, 4)
                loss = F.mse_loss(torch.func.functional_call(model, fast, (x,)), x.sum(1, keepdim=True) * scale)
                slopes = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
                fast = {name: each - 0.01 * slope for (name, each), slope in zip(fast.items(), slopes, strict=True)}
            x = torch.rand(5, 4)
            loss = F.mse_loss(torch.func.functional_call(model, fast, (x,)), x.sum(1, keepdim=True) * scale)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Contrast(nn.Module):
    """MoCo: a queue of keys, and an encoder that follows the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = net(), net()
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(2, 12), dim=0))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query = F.normalize(self.query(one), dim=1)
        with torch.no_grad():
            for each, follower in zip(self.query.parameters(), self.key.parameters(), strict=True):
                follower.data = follower.data * 0.9 + each.data * 0.1
            key = F.normalize(self.key(other), dim=1)
        near = (query * key).sum(1, keepdim=True)
        logits = torch.cat([near, query @ self.queue.clone()], 1) / 0.1  # type: ignore[operator]
        place = int(self.place)  # type: ignore[arg-type]
        self.queue[:, place : place + 4] = key.T  # type: ignore[index]
        self.place.fill_((place + 4) % 12)  # type: ignore[operator]
        return F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))


def contrasts(run: Run) -> None:
    model = Contrast()
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=3 * PER_EPOCH)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.steps(per_epoch=PER_EPOCH):
        x = torch.randn(4, 4)
        learn(model(x + 0.1 * torch.randn_like(x), x), optimizer)
        scheduler.step()


class Transition(NamedTuple):
    state: Tensor
    action: Tensor
    reward: Tensor
    then: Tensor | None


class Pole:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.reset()

    def reset(self) -> np.ndarray[Any, Any]:
        self.state, self.time = self.random.normal(size=4).astype(np.float32), 0
        return self.state

    def step(self, action: int) -> tuple[float, bool]:
        self.time += 1
        self.state = (self.state * 0.9 + action * 0.1 + self.random.normal(size=4) * 0.1).astype(np.float32)
        return float(-abs(self.state).sum()), self.time >= 7


def plays(run: Run) -> None:
    """DQN: an environment, a memory of transitions, a target network that follows."""
    policy, target, env = net(), net(), Pole()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01, amsgrad=True)
    memory: deque[Transition] = deque(maxlen=20)
    run.keep(policy=policy, target=target, optimizer=optimizer, memory=memory, env=vars(env))
    for step in run.steps(per_epoch=PER_EPOCH):
        for _ in range(3):
            state = torch.tensor(env.state)[None]
            is_random = random.random() < 0.05 + 0.9 * math.exp(-step.number / 6)
            action = torch.tensor([random.randrange(2)]) if is_random else policy(state).argmax(1)
            reward, is_over = env.step(int(action))
            then = None if is_over else torch.tensor(env.state)[None]
            memory.append(Transition(state, action, torch.tensor([reward]), then))
            if is_over:
                env.reset()
        if len(memory) < 6:
            continue
        drawn = random.sample(memory, 6)
        value = policy(torch.cat([each.state for each in drawn])).gather(
            1, torch.stack([each.action for each in drawn])
        )
        with torch.no_grad():
            later = [torch.zeros(1) if each.then is None else target(each.then).amax(1) for each in drawn]
        wanted = torch.stack([each.reward + 0.9 * then for each, then in zip(drawn, later, strict=True)])
        learn(F.smooth_l1_loss(value, wanted), optimizer)
        mine = policy.state_dict()
        target.load_state_dict({name: mine[name] * 0.1 + each * 0.9 for name, each in target.state_dict().items()})


def averages_weights(run: Run) -> None:
    """SWA: an average with a schedule of its own, whose batch norm is updated from the loader."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    later = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    loader = DataLoader(TensorDataset(torch.randn(22, 4)), 4, shuffle=True)
    run.keep(model=model, average=average, optimizer=optimizer, scheduler=scheduler, later=later)
    for epoch in run.epochs(loader):
        for (x,) in run.batches():
            learn(model(x).square().mean(), optimizer)
        if epoch < 1:
            scheduler.step()
            continue
        average.update_parameters(model)
        later.step()
        update_bn(loader, average)


def stops_early(run: Run) -> None:
    """A plateau, a patience, and the best weights, which come back."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    state: dict[str, Any] = {"best": math.inf, "bad": 0, "weights": copy.deepcopy(model.state_dict())}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, state=state)
    for _ in run.epochs(per_epoch=PER_EPOCH):
        for _ in run.steps():
            learn((model(torch.randn(8, 4)) + torch.randn(1)).square().mean(), optimizer)
        with torch.no_grad():
            score = model(torch.ones(2, 4)).square().mean().item() + random.random()
        scheduler.step(score)
        if score < state["best"]:
            state |= {"best": score, "bad": 0, "weights": copy.deepcopy(model.state_dict())}
        else:
            state["bad"] += 1
            model.load_state_dict(state["weights"])


def embeds_sparsely(run: Run) -> None:
    torch.manual_seed(1)
    embedding, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)
    ours, theirs = torch.optim.SparseAdam(embedding.parameters(), lr=0.1), torch.optim.Adam(head.parameters(), lr=0.1)
    run.keep(embedding=embedding, head=head, ours=ours, theirs=theirs)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = head(embedding(torch.randint(20, (8,)))).square().mean()
        if step.number % 3:  # two of three steps leave their gradient for the next one
            loss.backward()
            continue
        loss.backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()


class Remembers(nn.Module):
    """Has a buffer that grows, and one that is None at first."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros(0, 4))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x[:1]])[-7:]
        self.mean = self.seen.mean(0)
        return self.net(x - self.mean)  # type: ignore[no-any-return]


def has_buffers_that_grow(run: Run) -> None:
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn(model(torch.randn(8, 4)).square().mean(), optimizer)


class Pool(Dataset[Tensor]):
    """Samples to which the loop adds others, as active learning and pseudo-labels do."""

    def __init__(self) -> None:
        self.items, self.stage = [torch.full((4,), float(each)) for each in range(10)], 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        return self.items[index] * (1 + self.stage)


def adds_samples(run: Run) -> None:
    model, pool = net(), Pool()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, items=pool.items)
    for step in run.steps(DataLoader(pool, 4, shuffle=True), per_epoch=PER_EPOCH):
        learn(model(step.batch).square().mean(), optimizer)
        pool.items.append(torch.randn(4))


def splits_its_data(run: Run) -> None:
    parts = [TensorDataset(torch.linspace(-1, 1, 4 * count).view(count, 4)) for count in (20, 10)]
    train, validation = random_split(ConcatDataset(parts), [22, 8], torch.Generator().manual_seed(0))
    sampler = BatchSampler(RandomSampler(train, replacement=True, num_samples=24), 4, drop_last=True)
    loader, others = DataLoader(train, batch_sampler=sampler), DataLoader(validation, 4, shuffle=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(loader):
        (x,) = step.batch
        learn(model(x).square().mean(), optimizer)
        if step.number % 3 == 2:
            with torch.no_grad():
                step.log(loss=sum(model(each).square().mean() for (each,) in others))


def takes_batches(run: Run) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    batches = run.batches(TensorDataset(torch.linspace(-1, 1, 88).view(22, 4)), batch_size=4)
    for _ in run.steps(per_epoch=PER_EPOCH):
        (x,) = next(batches)
        learn(model(x).square().mean(), optimizer)


def fills_a_rollout(run: Run) -> None:
    """On-policy data in arrays that each step fills anew, as PPO has them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    seen, values = torch.zeros(5, 4), np.zeros(5)
    for _ in run.steps(per_epoch=PER_EPOCH):
        for place in range(5):
            seen[place] = torch.randn(4)
            values[place] = np.random.rand()
        learn(((model(seen) - float(values.mean())) ** 2).mean(), optimizer)


def steps_in_the_backward_pass(run: Run) -> None:
    """An optimizer for each parameter, which a hook steps."""
    model = net()
    optimizers = {each: torch.optim.Adam([each], lr=0.05) for each in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(step)
    run.keep(model=model, **{f"optimizer_{number}": each for number, each in enumerate(optimizers.values())})
    for _ in run.steps(per_epoch=PER_EPOCH):
        model(torch.randn(8, 4)).square().mean().backward()


ORDINARY_LOOPS = [
    each.__name__
    for each in (
        carries_a_hidden_state, is_aware_of_sharpness, searches_lines, learns_to_learn, contrasts, plays,
        averages_weights, stops_early, embeds_sparsely, has_buffers_that_grow, adds_samples, splits_its_data,
        takes_batches, fills_a_rollout, steps_in_the_backward_pass,
    )
]  # fmt: skip


# ---- state that is not kept


def forgets_the_datasets_stage(run: Run) -> None:
    model, pool = net(), Pool()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(pool, 4, shuffle=True), per_epoch=PER_EPOCH):
        learn(model(step.batch).square().mean(), optimizer)
        if step.number == 2:
            pool.stage = 2


def forgets_samples(run: Run) -> None:
    model, pool = net(), Pool()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(pool, 4, shuffle=True), per_epoch=PER_EPOCH):
        learn(model(step.batch).square().mean(), optimizer)
        pool.items.append(torch.randn(4))


class Noise:
    strength = 0.1

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.strength * torch.randn_like(x)


class Noisy(TensorDataset):
    def __init__(self, transform: Any) -> None:
        super().__init__(torch.linspace(-1, 1, 88).view(22, 4))
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index)[0])


def forgets_the_transforms_strength(run: Run) -> None:
    model, loader = net(), DataLoader(Noisy(Noise()), 4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(loader):
        learn(model(step.batch).square().mean(), optimizer)
        loader.dataset.transform.strength *= 1.2  # type: ignore[attr-defined]


class Memory:
    def __init__(self) -> None:
        self.items: deque[Tensor] = deque(maxlen=5)

    def push(self, item: Tensor) -> None:
        self.items.append(item)


def forgets_the_memory(run: Run) -> None:
    model, memory = net(), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        memory.push(torch.randn(4))
        learn(model(random.choice(memory.items)).square().mean(), optimizer)


def forgets_an_average(run: Run) -> None:
    model = net()
    average, optimizer = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn(model(torch.randn(8, 4)).square().mean(), optimizer)
        average.update_parameters(model)


def forgets_a_ring(run: Run) -> None:
    model, ring = net(), torch.zeros(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        ring[step.number % 5] = torch.randn(4)
        learn(model(ring).square().mean(), optimizer)


class Recurrent(nn.Module):
    """Has a hidden state in an attribute, and an output that is looked at later."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.hidden, self.last = nn.GRU(4, 4), None, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out, hidden = self.rnn(x, self.hidden)
        self.hidden = hidden.detach()
        self.last = out.detach().mean()
        return out  # type: ignore[no-any-return]


def forgets_the_hidden_state(run: Run) -> None:
    torch.manual_seed(1)
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn(model(torch.randn(3, 2, 4)).square().mean(), optimizer)


class Trainer:
    """Changes a number in a method that the loop calls."""

    def __init__(self, run: Run) -> None:
        self.run, self.model, self.best = run, net(), math.inf
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        run.keep(model=self.model, optimizer=self.optimizer)

    def fit(self) -> None:
        for _ in self.run.steps(per_epoch=PER_EPOCH):
            self.train_step()

    def train_step(self) -> None:
        loss = self.model(torch.randn(8, 4)).square().mean()
        learn(loss, self.optimizer)
        self.best = min(self.best, loss.item())


def forgets_the_trainers_best(run: Run) -> None:
    Trainer(run).fit()


def cycle(loader: Any) -> Any:
    while True:
        yield from loader


def forgets_the_place_in_a_cycle(run: Run) -> None:
    model, batches = net(), cycle(DataLoader(TensorDataset(torch.linspace(-1, 1, 88).view(22, 4)), 4, shuffle=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        (x,) = next(batches)
        learn(model(x).square().mean(), optimizer)


# ---- state that no resume could restore


def grows(run: Run) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 1:
            model.append(nn.Linear(4, 4))
            optimizer.add_param_group({"params": model[1].parameters()})
        learn(model(torch.randn(8, 4)).square().mean(), optimizer)


def has_a_league(run: Run) -> None:
    model, league = net(), [net()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, league=league)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn((model(torch.randn(8, 4)) - random.choice(league)(torch.ones(4))).square().mean(), optimizer)
        league.append(copy.deepcopy(model))


def rounds_its_weights(run: Run) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 1:
            model.bfloat16()
        learn(model(torch.randn(8, 4).to(model[0].weight.dtype)).float().square().mean(), optimizer)


def grows_in_a_list(run: Run) -> None:
    models = [nn.Sequential(nn.Linear(4, 4))]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    run.keep(models=models, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 1:
            models[0].append(nn.Linear(4, 4))
        learn(models[0](torch.randn(8, 4)).square().mean(), optimizer)


def regroups_in_a_list(run: Run) -> None:
    model = net()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1)]
    run.keep(model=model, optimizers=optimizers)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 1:
            optimizers[0].add_param_group({"params": model[2].parameters()})
        learn(model(torch.randn(8, 4)).square().mean(), optimizers[0])


def _replace(run: Run, built: Any, make_other: Any) -> None:
    """Replace an object of a kept container in the first step."""
    model, state = net(), {"object": built}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, state=state)
    for _ in run.steps(per_epoch=PER_EPOCH):
        state["object"] = make_other()
        learn(model(torch.randn(8, 4)).square().mean(), optimizer)


def replaces_a_loss(run: Run) -> None:
    _replace(run, nn.MSELoss(), nn.L1Loss)


def replaces_a_layer(run: Run) -> None:
    _replace(run, nn.Conv1d(2, 2, 1, stride=1), lambda: nn.Conv1d(2, 2, 1, stride=2))


def replaces_an_optimizer(run: Run) -> None:
    weight = torch.zeros(3, requires_grad=True)
    _replace(run, torch.optim.Adam([weight]), lambda: torch.optim.Adam([weight]))


def replaces_a_scheduler(run: Run) -> None:
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
    schedulers = torch.optim.lr_scheduler
    _replace(run, schedulers.LinearLR(optimizer), lambda: schedulers.CosineAnnealingLR(optimizer, 9))


class Elsewhere(dict[str, float]):
    """Items that can't be listed here."""

    def items(self) -> Any:
        raise RuntimeError("the items are on another machine")


def cannot_be_read(run: Run) -> None:
    model, scores = net(), Elsewhere()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = model(torch.randn(8, 4)).square().mean()
        learn(loss, optimizer)
        scores[f"{step.number}"] = loss.item()

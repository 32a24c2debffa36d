"""Loops that keep their state as people do: each once ended on different bytes when it resumed."""

import copy
import enum
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from holdfast import Run

PER_EPOCH = 6


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> Tensor:
    loss = (model(torch.randn(8, 4)) * scale).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _begin(run: Run, **kept: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, **kept)
    return model, optimizer


def draws_from_a_dict(run: Run) -> None:
    levels = {"forest": 0.0, "cave": 0.0}
    model, optimizer = _begin(run, levels=levels)
    for step in run.steps(per_epoch=PER_EPOCH):
        levels[f"level {20 - step.number}"] = random.random()
        learn(model, optimizer, levels[random.choice(list(levels))])


def evicts_the_oldest(run: Run) -> None:
    cache: OrderedDict[str, Tensor] = OrderedDict()
    model, optimizer = _begin(run, cache=cache)
    for step in run.steps(per_epoch=PER_EPOCH):
        cache[f"{step.number * 7 % 23}"] = torch.rand(())
        if len(cache) > 3:
            cache.popitem(last=False)
        learn(model, optimizer, float(next(iter(cache.values()))))


def names_its_parameters(run: Run) -> None:
    """Parameters without a module, as tutorials have them: a list for the optimizer, and a name for each."""
    torch.manual_seed(1)
    first, second = torch.randn(4, 8, requires_grad=True), torch.randn(8, 2, requires_grad=True)
    parameters = [first, second]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    run.keep(parameters=parameters, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        loss = (torch.tanh(torch.randn(8, 4) @ first) @ second).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def names_its_buffers(run: Run) -> None:
    buffer = {"seen": torch.zeros(8, 4), "rewards": np.zeros(8, np.float32)}
    seen, rewards = buffer["seen"], buffer["rewards"]
    model, optimizer = _begin(run, buffer=buffer)
    for step in run.steps(per_epoch=PER_EPOCH):
        seen[step.number % 8] = torch.randn(4)  # type: ignore[index]
        rewards[step.number % 8] = np.random.randn()
        learn(model, optimizer, float(seen.sum() + rewards.sum()))


class Env:
    def __init__(self) -> None:
        self.seen = np.zeros(4, np.float32)
        self.total = np.float32(0.1)

    def step(self) -> None:
        self.seen = self.seen * np.float32(0.9) + np.random.randn(4).astype(np.float32)
        self.total = self.total * 0.99 + self.seen[0] * 0.1


class Transition(NamedTuple):
    seen: Any
    reward: Any


def remembers_transitions(run: Run) -> None:
    """The newest item of the memory is also an attribute of the environment."""
    env, memory = Env(), deque[Transition](maxlen=5)
    model, optimizer = _begin(run, env=vars(env), memory=memory)
    for _ in run.steps(per_epoch=PER_EPOCH):
        env.step()
        memory.append(Transition(env.seen, env.total))
        drawn = random.choice(memory)
        learn(model, optimizer, float(drawn.seen.sum() * drawn.reward))


def averages_returns(run: Run) -> None:
    recent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=2))
    counts: dict[str, Any] = {}
    model, optimizer = _begin(run, recent=recent, counts=counts)
    for step in run.steps(per_epoch=PER_EPOCH):
        recent[f"env {step.number % 2}"].append(random.random())
        windows = counts.setdefault("windows", defaultdict(float))
        windows[step.number % 3] += 1
        counts.setdefault("last", deque(maxlen=3)).append(len(windows))
        learn(model, optimizer, sum(recent["env 0"]) + sum(counts["last"]) / 9)


class Phase(enum.StrEnum):
    WARM_UP = "warm up"
    MAIN = "main"


def has_phases(run: Run) -> None:
    state = {"phase": Phase.WARM_UP}
    model, optimizer = _begin(run, state=state)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 3:
            state["phase"] = Phase.MAIN
        learn(model, optimizer, 2.0 if state["phase"] is Phase.MAIN else 1.0)


def keeps_the_best(run: Run) -> None:
    """The best weights are those of the model itself before the first step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"best": float("inf"), "weights": model.state_dict()}
    parameters = [*model.parameters()]
    run.keep(model=model, optimizer=optimizer, state=state, parameters=parameters)
    for step in run.steps(per_epoch=PER_EPOCH):
        loss = learn(model, optimizer).item()
        with torch.no_grad():
            parameters[0].mul_(0.9)
        if loss < state["best"]:
            state |= {"best": loss, "weights": copy.deepcopy(model.state_dict())}
        if step.number % 5 == 4:
            model.load_state_dict(state["weights"])


def unfreezes(run: Run) -> None:
    model, optimizer = _begin(run)
    model[0].requires_grad_(False)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 4:
            model[0].requires_grad_(True)
        if step.number == 9:
            model[3].bias.requires_grad_(False)
        learn(model, optimizer)


class Cooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = net(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.9
        return self.net(x) / self.temperature  # type: ignore[no-any-return]


def changes_attributes(run: Run) -> None:
    model = Cooling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 4:
            model.net[1].p = 0.5
        learn(model, optimizer)


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, which its state_dict leaves out."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups if self.count % 4 == 0 else ():
            group["lr"] *= 0.7
        return super().step(closure)


def counts_in_the_optimizer(run: Run) -> None:
    model = net()
    optimizer = Counting(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn(model, optimizer)


class Rounding(torch.optim.Optimizer):
    """Has float32 weights behind bf16 ones, and momentum of eight bits."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["whole"] = each.detach().float().clone()
                    state["small"] = torch.zeros(each.shape, dtype=torch.int8)
                momentum = state["small"].float() / 127 * 0.9 + each.grad.float()
                state["small"] = (momentum.clamp(-1, 1) * 127).round().to(torch.int8)
                state["whole"] -= group["lr"] * momentum
                each.copy_(state["whole"])


def rounds(run: Run) -> None:
    model = net().to(torch.bfloat16)
    optimizer = Rounding(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        loss = model(torch.randn(8, 4).to(torch.bfloat16)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- gradients


def steps_late(run: Run) -> None:
    """Step along the gradient of the step before."""
    model, optimizer = _begin(run)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number:
            optimizer.step()
            optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()


def steps_by_turns(run: Run) -> None:
    """One optimizer steps in each step; the other one accumulates."""
    generator, critic = net(), net()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, critic))
    run.keep(generator=generator, critic=critic, ours=ours, theirs=theirs)
    for step in run.steps(per_epoch=PER_EPOCH):
        learn(critic, theirs)
        generator(torch.randn(8, 4)).square().mean().backward()
        if step.number % 4 == 3:
            ours.step()
            ours.zero_grad()


def _train_adversaries(run: Run, ours_every: int, theirs_every: int) -> None:
    """Add the generator's loss to gradients that the critic's optimizer has taken: the next step drops them."""
    torch.manual_seed(1)
    generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, critic))
    run.keep(generator=generator, critic=critic, ours=ours, theirs=theirs)
    for step in run.steps(per_epoch=PER_EPOCH):
        made = generator(torch.randn(8, 2))
        if step.number % theirs_every == 0:
            theirs.zero_grad()
            (nn.functional.softplus(critic(made.detach())) - critic(torch.randn(8, 4))).mean().backward()
            theirs.step()
        if step.number % ours_every == ours_every - 1:
            ours.zero_grad()
            nn.functional.softplus(-critic(made)).mean().backward()
            ours.step()


def trains_adversaries(run: Run) -> None:
    _train_adversaries(run, 1, 1)


def trains_the_critic_more(run: Run) -> None:
    _train_adversaries(run, 2, 1)


def trains_the_critic_less(run: Run) -> None:
    _train_adversaries(run, 1, 3)


def train_with_left_gradients(
    steps: Iterable[Any], model: nn.ModuleDict, optimizer: torch.optim.Optimizer, to: str
) -> None:
    """Train two layers, one of them seldom, and leave their gradients as they are, or set them to zero or None.

    Args:
        steps: the steps of a run, or their numbers.
    """
    for each in steps:
        number = getattr(each, "number", each)
        x = torch.linspace(-1, 1, 32).reshape(8, 4) * (number % 3 + 1)
        if to != "left":
            optimizer.zero_grad(set_to_none=to == "none")
        loss = model["usual"](x).square().mean()
        if number % 4 == 1:
            loss = loss + model["seldom"](x).square().mean()
        loss.backward()
        optimizer.step()


def make_two_layers() -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """Build what `train_with_left_gradients` takes. AdamW decays a layer with a gradient of zero, and not without."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"usual": nn.Linear(4, 8), "seldom": nn.Linear(4, 8)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def leaves_gradients(run: Run, to: str) -> None:
    model, optimizer = make_two_layers()
    run.keep(model=model, optimizer=optimizer)
    train_with_left_gradients(run.steps(per_epoch=PER_EPOCH), model, optimizer, to)


def prunes_again(run: Run) -> None:
    """A lottery ticket: each epoch begins with fewer weights."""
    model = net()
    for layer in (model[0], model[3]):
        prune.identity(layer, "weight")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number % 3 == 0:
            for layer in (model[0], model[3]):
                prune.l1_unstructured(layer, "weight", 0.2)
        learn(model, optimizer)


def never_zeroes(run: Run) -> None:
    leaves_gradients(run, "left")


def keeps_zeroes(run: Run) -> None:
    leaves_gradients(run, "zero")


# ---- the order of the data


class Shuffled(Sampler[int]):
    """Draws from a generator of its own, and counts its passes."""

    def __init__(self, count: int) -> None:
        self.count, self.random, self.passes = count, random.Random(7), 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        indices = np.random.RandomState(self.passes).permutation(self.count).tolist()
        self.random.shuffle(indices)
        return iter(indices)


def _train_on(run: Run, sampler: Sampler[int], **kept: Any) -> None:
    x = torch.linspace(-1, 1, 22 * 4).view(22, 4)
    model, optimizer = _begin(run, **kept)
    for step in run.steps(DataLoader(TensorDataset(x), 4, sampler=sampler)):
        (batch,) = step.batch
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if isinstance(sampler, WeightedRandomSampler):
            sampler.weights[step.number] *= 50


def has_its_own_sampler(run: Run) -> None:
    _train_on(run, Shuffled(22))


def mines_hard_samples(run: Run) -> None:
    _train_on(run, WeightedRandomSampler(torch.ones(22), 22))  # type: ignore[arg-type]


def keeps_the_samplers_weights(run: Run) -> None:
    weights = torch.ones(22, dtype=torch.double)
    _train_on(run, WeightedRandomSampler(weights, 22), weights=weights)  # type: ignore[arg-type]


class Harder(TensorDataset):
    level = 0.0

    def __getitem__(self, index: int) -> Any:
        return tuple(each + self.level for each in super().__getitem__(index))


def has_a_curriculum(run: Run) -> None:
    dataset = Harder(torch.linspace(-1, 1, 22 * 4).view(22, 4))
    dataset.level = 0.0
    model, optimizer = _begin(run, dataset=vars(dataset))
    for step in run.steps(DataLoader(dataset, 4, shuffle=True)):
        dataset.level = step.number / 4
        (batch,) = step.batch
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Agent:
    """A network and its optimizer, as an object with a state of its own."""

    def __init__(self) -> None:
        self.network = net()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])


def trains_an_ensemble(run: Run) -> None:
    """Networks in a list, in an object and in a dict: gradients are left, a rate changes, a layer is frozen."""
    networks, agent = [net(), net()], Agent()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in networks]
    members = {"student": {"network": net()}}
    optimizers.append(torch.optim.SGD(members["student"]["network"].parameters(), lr=0.1))
    run.keep(networks=networks, optimizers=optimizers, agent=agent, members=members)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 2:
            networks[0][1].p = 0.5
            networks[1].eval()
            agent.network[0].weight.requires_grad_(False)
        if step.number == 9:
            networks[1].train()
            agent.network[0].weight.requires_grad_(True)
        x = torch.randn(8, 4)
        for each in (*networks, agent.network, members["student"]["network"]):
            each(x).square().mean().backward()
        for count, each in enumerate((*optimizers, agent.optimizer), 2):
            if step.number % count == 0:
                each.step()
                each.zero_grad()


def spawns_generators(run: Run) -> None:
    """A generator for each step, and another one for each few steps, as NumPy advises."""
    random_numbers = np.random.default_rng(3)
    own = {"noise": random_numbers.spawn(1)[0]}
    model, optimizer = _begin(run, random_numbers=random_numbers, own=own)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number % 4 == 3:
            own["noise"] = random_numbers.spawn(1)[0]
        (drawn,) = random_numbers.spawn(1)
        learn(model, optimizer, float(drawn.random() + own["noise"].random()))


def replaces_modules(run: Run) -> None:
    """A league of snapshots with rates and modes of their own, and a loss without its smoothing after some steps."""
    league = [net() for _ in range(3)]
    state = {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)}
    model, optimizer = _begin(run, league=league, state=state)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 7:
            state["loss"] = nn.CrossEntropyLoss()
        if step.number % 3 == 2:
            snapshot = copy.deepcopy(model)
            snapshot[1].p = 0.05 * step.number
            league[:] = [*league[1:], snapshot.train(step.number % 2 == 0).requires_grad_(False)]
        x = torch.randn(8, 4)
        targets = sum(each(x) for each in league).softmax(1).detach()  # type: ignore[union-attr]
        loss = state["loss"](model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def makes_generators(run: Run) -> None:
    """Generators of all kinds, which the steps put into a dict and a list, in place of others or of nothing."""
    kinds = [
        lambda seed: random.Random(seed),
        lambda seed: np.random.default_rng(seed),
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda seed: np.random.RandomState(seed),
        lambda seed: torch.Generator().manual_seed(seed),
    ]
    state: dict[str, Any] = {"own": kinds[0](0), "later": None, "all": []}
    model, optimizer = _begin(run, state=state)
    for step in run.steps(per_epoch=PER_EPOCH):
        state["own"] = kinds[step.number % 5](step.number) if step.number % 3 == 2 else state["own"]
        state["later"] = state["later"] or np.random.default_rng(7)
        state["all"].append(kinds[step.number % 5](step.number))
        drawn = [_draw(each) for each in (state["own"], *state["all"], *state["later"].spawn(1))]
        learn(model, optimizer, sum(drawn))


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return float(generator.random_sample() if isinstance(generator, np.random.RandomState) else generator.random())


class Lazy(Sampler[int]):
    """Makes its generator when it is needed first."""

    def __init__(self) -> None:
        self.generator: Any = None

    def __len__(self) -> int:
        return 4 * PER_EPOCH

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or np.random.default_rng(4)
        yield from self.generator.permutation(len(self)).tolist()


def has_a_lazy_sampler(run: Run) -> None:
    model, optimizer = _begin(run)
    points = torch.linspace(-1, 1, 4 * PER_EPOCH * 4).view(-1, 4)
    for step in run.steps(DataLoader(TensorDataset(points), 4, sampler=Lazy())):
        (batch,) = step.batch
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def decays_a_tensor(run: Run) -> None:
    """Rates as tensors, to which the loop and two groups refer: one is kept, too, and one belongs to a list."""
    model, other = net(), net()
    rates = [torch.tensor(0.05), torch.tensor(0.1), torch.tensor(0.2)]
    one = torch.optim.Adam(model.parameters(), lr=rates[0], foreach=False)
    two = torch.optim.SGD([{"params": other[0].parameters()}, {"params": other[3].parameters()}], lr=rates[1])
    weight = torch.ones(4, requires_grad=True)
    listed = [torch.optim.SGD([weight], lr=rates[2])]
    run.keep(model=model, other=other, one=one, two=two, weight=weight, listed=listed, rate=rates[0])
    for _ in run.steps(per_epoch=PER_EPOCH):
        x = torch.randn(8, 4)
        loss = model(x).square().mean() + other(x * weight).square().mean()
        for each in (one, two, *listed):
            each.zero_grad()
        loss.backward()
        for each in (one, two, *listed):
            each.step()
        for rate in rates:
            rate.mul_(0.9)


ODD_LOOPS = [
    each.__name__
    for each in (
        draws_from_a_dict, evicts_the_oldest, names_its_parameters, names_its_buffers, remembers_transitions,
        averages_returns, has_phases, keeps_the_best, unfreezes, changes_attributes, counts_in_the_optimizer, rounds,
        steps_late, steps_by_turns, trains_adversaries, trains_the_critic_more, trains_the_critic_less, never_zeroes,
        keeps_zeroes, has_its_own_sampler, mines_hard_samples, keeps_the_samplers_weights, has_a_curriculum,
        prunes_again, trains_an_ensemble, spawns_generators, replaces_modules,
        makes_generators, has_a_lazy_sampler, decays_a_tensor,
    )
]  # fmt: skip

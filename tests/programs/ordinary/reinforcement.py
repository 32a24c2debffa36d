"""Agents: policies, critics, tables, searches, environments whose attributes are kept."""

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from holdfast import Run
from tests.programs.network import LONG_EPOCH, begin, learn


class Track:
    """A toy environment with gymnasium's verbs, and a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.np_random = np.random.default_rng(seed)
        self.place, self.time = np.zeros(4, np.float32), 0

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.place, self.time = self.np_random.normal(size=4).astype(np.float32), 0
        return self.place, {}

    def step(self, action: float) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        noise = self.np_random.normal(size=4) * 0.1
        self.place = (self.place * 0.9 + float(action) * 0.1 + noise).astype(np.float32)
        return self.place, float(-abs(self.place).sum()), self.time >= 9, False, {}


class Policy(nn.Module):
    """The policy of the well-known example, which notes the episode in lists that it empties after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.affine, self.action, self.value = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
        self.saved: list[tuple[Tensor, Tensor]] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.affine(x))
        return self.action(hidden).softmax(-1), self.value(hidden)

    def act(self, seen: Any) -> int:
        chances, value = self(torch.from_numpy(seen))
        chosen = Categorical(chances)
        action = chosen.sample()
        self.saved.append((chosen.log_prob(action), value))
        return int(action)


def _returns(rewards: list[float]) -> Tensor:
    total, found = 0.0, []
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        found.insert(0, total)
    returns = torch.tensor(found)
    return (returns - returns.mean()) / (returns.std() + 1e-6)


def reinforces(run: Run) -> None:
    """REINFORCE: an episode each step, a running reward that is kept."""
    env, policy = Track(), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    state = {"running_reward": 10.0}
    run.keep(policy=policy, optimizer=optimizer, env=vars(env), state=state)
    for step in run.steps(per_epoch=LONG_EPOCH):
        seen, _ = env.reset()
        for _ in range(9):
            seen, reward, is_over, _, _ = env.step(policy.act(seen))
            policy.rewards.append(reward)
            if is_over:
                break
        state["running_reward"] = 0.05 * sum(policy.rewards) + 0.95 * state["running_reward"]
        returns = _returns(policy.rewards)
        loss = torch.stack([-chance * value for (chance, _), value in zip(policy.saved, returns, strict=True)]).sum()
        step.log(loss=learn(loss, optimizer), running_reward=state["running_reward"])
        del policy.rewards[:], policy.saved[:]


def has_an_actor_and_a_critic(run: Run) -> None:
    env, model = Track(), Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    run.keep(model=model, optimizer=optimizer, env=vars(env))
    for step in run.steps(per_epoch=LONG_EPOCH):
        seen, _ = env.reset()
        for _ in range(9):
            seen, reward, *_ = env.step(model.act(seen))
            model.rewards.append(reward)
        policy_losses, value_losses = [], []
        for (chance, value), wanted in zip(model.saved, _returns(model.rewards), strict=True):
            policy_losses.append(-chance * (wanted - value.item()))
            value_losses.append(F.smooth_l1_loss(value, wanted[None]))
        step.log(loss=learn(torch.stack(policy_losses).sum() + torch.stack(value_losses).sum(), optimizer))
        model.rewards.clear()
        model.saved.clear()


def clips_its_policy(run: Run) -> None:
    """PPO: a rollout whose observation continues in the next step, and epochs of minibatches."""
    env, model = Track(), Policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    state = {"seen": env.reset()[0]}
    run.keep(model=model, optimizer=optimizer, env=vars(env), state=state)
    for step in run.steps(per_epoch=LONG_EPOCH):
        seen, actions, chances, rewards = [], [], [], []
        with torch.no_grad():
            for _ in range(12):
                now = torch.from_numpy(state["seen"])
                chosen = Categorical(model(now)[0])
                action = chosen.sample()
                then, reward, is_over, _, _ = env.step(int(action))
                seen.append(now), actions.append(action), chances.append(chosen.log_prob(action))
                rewards.append(reward)
                state["seen"] = env.reset()[0] if is_over else then
        wanted = _returns(rewards)
        order = np.arange(12)
        for _ in range(2):
            np.random.shuffle(order)
            for start in range(0, 12, 4):
                chosen_rows = order[start : start + 4]
                new, value = model(torch.stack([seen[row] for row in chosen_rows]))
                taken = torch.stack([actions[row] for row in chosen_rows])
                old = torch.stack([chances[row] for row in chosen_rows])
                ratio = (Categorical(new).log_prob(taken) - old).exp()
                gain = wanted[chosen_rows] - value.detach()[:, 0]
                policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = learn(policy_loss + 0.5 * (value[:, 0] - wanted[chosen_rows]).square().mean(), optimizer)
        step.log(loss=loss)


def learns_values(run: Run) -> None:
    """DQN: a memory of transitions, a target network that is copied every seven steps, and an epsilon."""
    torch.manual_seed(1)
    policy, target, env = nn.Linear(4, 2), nn.Linear(4, 2), Track()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=0.01)
    memory: deque[Any] = deque(maxlen=30)
    env.reset()
    run.keep(policy=policy, target=target, optimizer=optimizer, memory=memory, env=vars(env))
    for step in run.steps(per_epoch=LONG_EPOCH):
        for _ in range(4):
            seen = env.place
            is_random = random.random() < max(0.05, 0.9 - step.number / 20)
            action = random.randrange(2) if is_random else int(policy(torch.from_numpy(seen)).argmax())
            then, reward, is_over, _, _ = env.step(action)
            memory.append((seen, action, reward, then, is_over))
            if is_over:
                env.reset()
        if step.number % 7 == 0:
            target.load_state_dict(policy.state_dict())
        batch = random.sample(memory, 4)
        seen, then = (torch.from_numpy(np.stack([each[place] for each in batch])) for place in (0, 3))
        actions = torch.tensor([each[1] for each in batch])
        with torch.no_grad():
            later = target(then).amax(1) * torch.tensor([not each[4] for each in batch])
        wanted = torch.tensor([each[2] for each in batch]) + 0.9 * later
        step.log(loss=learn(F.huber_loss(policy(seen).gather(1, actions[:, None])[:, 0], wanted), optimizer))


def learns_its_temperature(run: Run) -> None:
    """SAC: an actor, two critics with targets, and a parameter without a module."""
    torch.manual_seed(1)
    actor, critics = nn.Linear(4, 2), nn.ModuleList(nn.Linear(5, 1) for _ in range(2))
    targets = nn.ModuleList(nn.Linear(5, 1) for _ in range(2)).requires_grad_(False)
    targets.load_state_dict(critics.state_dict())
    log_alpha = torch.zeros(1, requires_grad=True)
    ours, theirs = torch.optim.Adam(actor.parameters(), 0.01), torch.optim.Adam(critics.parameters(), 0.01)
    alphas = torch.optim.Adam([log_alpha], 0.01)
    run.keep(actor=actor, critics=critics, targets=targets, parameters=[log_alpha])
    run.keep(ours=ours, theirs=theirs, alphas=alphas)
    for step in run.steps(per_epoch=LONG_EPOCH):
        seen, reward = torch.randn(8, 4), torch.randn(8, 1)
        mean, size = actor(seen).chunk(2, 1)
        chosen = Normal(mean, size.clamp(-2, 1).exp())
        action = chosen.rsample()
        with torch.no_grad():
            wanted = reward + 0.9 * torch.min(*(each(torch.cat([seen, action], 1)) for each in targets))
        given = torch.cat([seen, action.detach()], 1)
        learn(sum(F.mse_loss(each(given), wanted) for each in critics), theirs)
        judged = torch.min(*(each(torch.cat([seen, action], 1)) for each in critics))
        loss = learn((log_alpha.exp().detach() * chosen.log_prob(action) - judged).mean(), ours)
        learn(-(log_alpha * (chosen.log_prob(action).detach() + 1)).mean(), alphas)
        for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.05)
        step.log(loss=loss)


def evolves(run: Run) -> None:
    """Evolution strategies: a population of noise, no gradient of torch's."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    run.keep(model=model)
    for step in run.steps(per_epoch=LONG_EPOCH):
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        noise = torch.randn(6, len(flat))
        x = torch.randn(8, 4)
        scores = []
        for each in noise:
            nn.utils.vector_to_parameters(flat + 0.1 * each, model.parameters())
            with torch.no_grad():
                scores.append(-(model(x) - x.sum(1, keepdim=True)).square().mean())
        score = torch.stack(scores)
        better = flat + 0.05 * (noise * ((score - score.mean()) / (score.std() + 1e-6))[:, None]).mean(0)
        nn.utils.vector_to_parameters(better, model.parameters())
        step.log(loss=-score.mean())


def fills_a_table(run: Run) -> None:
    """Q-learning in an array that is kept, with a bonus for states that were seldom visited."""
    table, visits, place = np.zeros((5, 2)), np.ones(5), {"now": 0}
    model, optimizer = begin(run, nn.Linear(2, 1), table=table, visits=visits, place=place)
    for step in run.steps(per_epoch=LONG_EPOCH):
        for _ in range(5):
            now = place["now"]
            action = np.random.randint(2) if np.random.random() < 0.2 else int(table[now].argmax())
            then = (now + (1 if action else -1)) % 5
            visits[then] += 1
            reward = float(then == 3) + 1 / np.sqrt(visits[then])
            table[now, action] += 0.1 * (reward + 0.9 * table[then].max() - table[now, action])
            place["now"] = then
        loss = (model(torch.tensor(table, dtype=torch.float32)) - 1).square().mean()
        step.log(loss=learn(loss, optimizer))


class RunningMeanStd:
    """Statistics of observations, as gymnasium's wrappers have them."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x: Any) -> None:
        mean, var, count = x.mean(0), x.var(0), len(x)
        delta, total = mean - self.mean, self.count + count
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean, self.var, self.count = self.mean + delta * count / total, squares / total, total


def normalises_observations(run: Run) -> None:
    env, seen, rewards = Track(), RunningMeanStd((4,)), RunningMeanStd((1,))
    model, optimizer = begin(run, nn.Linear(4, 1), env=vars(env), seen=vars(seen), rewards=vars(rewards))
    for step in run.steps(per_epoch=LONG_EPOCH):
        rows = [env.step(random.random()) for _ in range(4)]
        places, gains = np.stack([each[0] for each in rows]), np.array([[each[1]] for each in rows])
        seen.update(places)
        rewards.update(gains)
        x = torch.tensor((places - seen.mean) / np.sqrt(seen.var + 1e-8), dtype=torch.float32)
        y = torch.tensor(gains / np.sqrt(rewards.var + 1e-8), dtype=torch.float32)
        step.log(loss=learn(F.mse_loss(model(x), y), optimizer))


def plays_itself(run: Run) -> None:
    """Self-play: a list of the last opponents' weights, which is kept."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    league = [{name: each.clone() for name, each in model.state_dict().items()}]
    model, optimizer = begin(run, model, league=league)
    for step in run.steps(per_epoch=LONG_EPOCH):
        x = torch.randn(8, 4)
        other = random.choice(league)
        with torch.no_grad():
            theirs = torch.func.functional_call(model, other, (x,)).softmax(1)
        step.log(loss=learn(-(model(x).softmax(1) * (1 - theirs)).sum(1).mean(), optimizer))
        if step.number % 3 == 2:
            league.append({name: each.clone() for name, each in model.state_dict().items()})
            del league[:-3]

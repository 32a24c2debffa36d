"""Tutorials of games: bandits, tables, searches, memories of several steps, offline data, imitation, many agents."""

import copy
import math
import random
from collections import defaultdict, deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Beta, Categorical, Normal
from torch.nn import functional as F

from holdfast import Run
from tests.programs.tutorials.data import BATCH, STEPS


class Corridor:
    """A corridor with a goal, slippery steps and gymnasium's verbs."""

    def __init__(self, size: int = 6, seed: int = 0) -> None:
        self.size, self.rng, self.place, self.steps = size, random.Random(seed), 0, 0

    def observe(self):
        return np.eye(self.size, dtype=np.float32)[self.place]

    def reset(self):
        self.place, self.steps = self.rng.randrange(2), 0
        return self.observe(), {}

    def step(self, action):
        move = 1 if action == 1 else -1
        if self.rng.random() < 0.1:
            move = -move
        self.place, self.steps = min(max(self.place + move, 0), self.size - 1), self.steps + 1
        done = self.place == self.size - 1
        return self.observe(), 1.0 if done else -0.01, done, self.steps >= 15, {}


def mlp(inputs: int, outputs: int, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class SumTree:
    """Priorities in a tree of NumPy arrays."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.write, self.n_entries = capacity, 0, 0
        self.tree, self.data = np.zeros(2 * capacity - 1), [None] * capacity

    def add(self, p: float, data) -> None:
        self.data[self.write] = data
        self.update(self.write + self.capacity - 1, p)
        self.write, self.n_entries = (self.write + 1) % self.capacity, min(self.n_entries + 1, self.capacity)

    def update(self, index: int, p: float) -> None:
        change = p - self.tree[index]
        while True:
            self.tree[index] += change
            if index == 0:
                return
            index = (index - 1) // 2

    def get(self, s: float):
        index = 0
        while (left := 2 * index + 1) < len(self.tree):
            if s <= self.tree[left]:
                index = left
            else:
                s, index = s - self.tree[left], left + 1
        return index, self.data[index - self.capacity + 1]


class NoisyLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mu, self.sigma = nn.Linear(inputs, outputs), nn.Parameter(torch.full((outputs, inputs), 0.1))
        self.register_buffer("epsilon", torch.zeros(outputs, inputs))

    def reset_noise(self) -> None:
        f = [torch.randn(n) for n in self.epsilon.shape]
        self.epsilon.copy_(torch.outer(*(each.sign() * each.abs().sqrt() for each in f)))

    def forward(self, x):
        return self.mu(x) + F.linear(x, self.sigma * self.epsilon)


def is_rainbow(run: Run, n_step: int = 3, atoms: int = 11) -> None:
    """A distributional DQN with noisy layers, transitions of several steps, and priorities in a tree."""
    torch.manual_seed(0)
    np.random.seed(0)
    env, support = Corridor(), torch.linspace(-1, 2, atoms)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), NoisyLinear(16, 2 * atoms))
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005, eps=1.5e-4)
    memory, n_step_buffer = SumTree(32), deque(maxlen=n_step)
    state = {"obs": env.reset()[0], "beta": 0.4, "score": 0.0, "scores": []}
    run.keep(net=net, target=target, optimizer=optimizer, memory=vars(memory), n_step_buffer=n_step_buffer)
    run.keep(state=state, env=vars(env))

    def distribution(model, x):
        return model(x).view(-1, 2, atoms).softmax(-1).clamp(min=1e-3)

    for step in run.steps(per_epoch=STEPS):
        for _ in range(4):
            net[2].reset_noise()
            with torch.no_grad():
                q = (distribution(net, torch.from_numpy(state["obs"])[None]) * support).sum(-1)
            obs, reward, terminated, truncated, _ = env.step(q.argmax(1).item())
            n_step_buffer.append((state["obs"], q.argmax(1).item(), reward, obs, terminated))
            state["score"] += reward
            if len(n_step_buffer) == n_step:
                total = sum(0.99**i * each[2] for i, each in enumerate(n_step_buffer))
                memory.add(1.0, (*n_step_buffer[0][:2], total, *n_step_buffer[-1][3:]))
            state["obs"] = obs
            if terminated or truncated:
                state["scores"].append(state["score"])
                state["obs"], state["score"] = env.reset()[0], 0.0
                n_step_buffer.clear()
        if memory.n_entries < BATCH:
            continue
        segment = memory.tree[0] / BATCH
        drawn = [memory.get(np.random.uniform(segment * i, segment * (i + 1))) for i in range(BATCH)]
        indices, samples = zip(*[(i, s if s is not None else memory.data[0]) for i, s in drawn])
        obs, action, reward, after, done = zip(*samples)
        obs, after = torch.from_numpy(np.stack(obs)), torch.from_numpy(np.stack(after))
        reward, done = torch.tensor(reward)[:, None], torch.tensor(done).float()[:, None]
        state["beta"] = min(1.0, state["beta"] + 0.01)
        weights = (memory.n_entries * memory.tree[list(indices)] / memory.tree[0] + 1e-6) ** -state["beta"]
        with torch.no_grad():
            net[2].reset_noise()
            target[2].reset_noise()
            best = (distribution(net, after) * support).sum(-1).argmax(1)
            following = distribution(target, after)[range(BATCH), best]
            b = ((reward + (1 - done) * 0.99**n_step * support).clamp(-1, 2) + 1) / (3 / (atoms - 1))
            low, high = b.floor().long(), b.ceil().long()
            projected = torch.zeros(BATCH, atoms)
            projected.scatter_add_(1, low, following * (high.float() - b + (low == high)))
            projected.scatter_add_(1, high, following * (b - low.float()))
        each = -(projected * distribution(net, obs)[range(BATCH), list(action)].log()).sum(1)
        loss = (each * torch.from_numpy(weights / weights.max()).float()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        for index, p in zip(indices, each.tolist()):
            memory.update(index, (abs(p) + 1e-6) ** 0.5)
        if step.number % 6 == 0:
            target.load_state_dict(net.state_dict())
        step.log(loss=loss, score=float(np.mean(state["scores"][-5:])) if state["scores"] else 0.0)


class OUNoise:
    """An Ornstein-Uhlenbeck process."""

    def __init__(self, size: int, seed: int, theta: float = 0.15, sigma: float = 0.2) -> None:
        self.mu, self.theta, self.sigma = np.zeros(size), theta, sigma
        self.rng = np.random.RandomState(seed)
        self.reset()

    def reset(self) -> None:
        self.state = copy.copy(self.mu)

    def sample(self):
        self.state = (
            self.state + self.theta * (self.mu - self.state) + self.sigma * self.rng.standard_normal(len(self.mu))
        )
        return self.state


def explores_by_a_process(run: Run) -> None:
    """DDPG, with a process of noise, a buffer of preallocated arrays, and goals that are relabelled in hindsight."""
    torch.manual_seed(1)
    actor, critic = nn.Sequential(mlp(4, 2), nn.Tanh()), mlp(6, 1)
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, weight_decay=1e-4)
    noise = OUNoise(2, seed=3)
    buffers = {"obs": np.zeros((64, 4), np.float32), "act": np.zeros((64, 2), np.float32),
               "rew": np.zeros(64, np.float32), "next": np.zeros((64, 4), np.float32)}  # fmt: skip
    state = {"ptr": 0, "size": 0, "place": np.zeros(2, np.float32)}
    run.keep(actor=actor, critic=critic, actor_target=actor_target, critic_target=critic_target, noise=noise)
    run.keep(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer, buffers=buffers, state=state)

    def store(place, act, after, goal) -> None:
        i = state["ptr"]
        buffers["obs"][i], buffers["act"][i] = np.concatenate([place, goal]), act
        buffers["rew"][i], buffers["next"][i] = -np.linalg.norm(after - goal), np.concatenate([after, goal])
        state["ptr"], state["size"] = (i + 1) % 64, min(state["size"] + 1, 64)

    for step in run.steps(per_epoch=STEPS):
        goal, episode = np.random.uniform(-1, 1, 2).astype(np.float32), []
        for _ in range(4):
            obs = torch.from_numpy(np.concatenate([state["place"], goal]))
            with torch.no_grad():
                act = np.clip(actor(obs).numpy() + noise.sample(), -1, 1).astype(np.float32)
            after = np.clip(state["place"] + 0.3 * act, -2, 2).astype(np.float32)
            episode.append((state["place"], act, after))
            state["place"] = after
        for each in episode:
            store(*each, goal)
            store(*each, random.choice(episode)[2])
        noise.reset()
        index = np.random.randint(0, state["size"], BATCH)
        obs, act, rew, after = (torch.from_numpy(buffers[name][index]) for name in ("obs", "act", "rew", "next"))
        with torch.no_grad():
            wanted = rew[:, None] + 0.9 * critic_target(torch.cat([after, actor_target(after)], 1))
        critic_loss = F.mse_loss(critic(torch.cat([obs, act], 1)), wanted)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        actor_loss = -critic(torch.cat([obs, actor(obs)], 1)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for net, target in ((actor, actor_target), (critic, critic_target)):
            for p, t in zip(net.parameters(), target.parameters()):
                t.data.copy_(0.05 * p.data + 0.95 * t.data)
        step.log(loss=critic_loss, actor_loss=actor_loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.lstm = nn.Linear(6, 12), nn.LSTM(12, 12)
        self.actor, self.critic = nn.Linear(12, 2), nn.Linear(12, 1)

    def forward(self, x, carried, done):
        hidden, out = torch.tanh(self.network(x)), []
        for h, d in zip(hidden, done):
            keep = (1.0 - d)[None, :, None]
            h, carried = self.lstm(h[None], (keep * carried[0], keep * carried[1]))
            out.append(h)
        out = torch.cat(out)
        return Categorical(logits=self.actor(out)), self.critic(out).squeeze(-1), carried


def remembers_in_ppo(run: Run, num_steps: int = 6, num_envs: int = 2, target_kl: float = 0.02) -> None:
    """Recurrent PPO: the LSTM's state and the dones are carried between rollouts; minibatches of environments."""
    torch.manual_seed(2)
    random.seed(2)
    envs = [Corridor(seed=i) for i in range(num_envs)]
    agent = Recurrent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    carry = {
        "next_obs": torch.from_numpy(np.stack([env.reset()[0] for env in envs])), "next_done": torch.zeros(num_envs),
        "lstm": (torch.zeros(1, num_envs, 12), torch.zeros(1, num_envs, 12)),
    }  # fmt: skip
    run.keep(agent=agent, optimizer=optimizer, carry=carry, envs=[vars(env) for env in envs])
    total = 4 * STEPS
    for step in run.steps(per_epoch=STEPS):
        optimizer.param_groups[0]["lr"] = (1 - step.number / total) * 2.5e-3
        initial = tuple(each.clone() for each in carry["lstm"])
        obs, actions, logprobs, rewards, dones, values = ([] for _ in range(6))
        for _ in range(num_steps):
            obs.append(carry["next_obs"])
            dones.append(carry["next_done"])
            with torch.no_grad():
                dist, value, carry["lstm"] = agent(carry["next_obs"][None], carry["lstm"], carry["next_done"][None])
            action = dist.sample()[0]
            actions.append(action)
            logprobs.append(dist.log_prob(action)[0])
            values.append(value[0])
            seen, reward, done = [], [], []
            for env, a in zip(envs, action.tolist()):
                o, r, terminated, truncated, _ = env.step(a)
                seen.append(env.reset()[0] if terminated or truncated else o)
                reward.append(r)
                done.append(float(terminated or truncated))
            carry["next_obs"], carry["next_done"] = torch.from_numpy(np.stack(seen)), torch.tensor(done)
            rewards.append(torch.tensor(reward))
        with torch.no_grad():
            _, last, _ = agent(carry["next_obs"][None], carry["lstm"], carry["next_done"][None])
        advantages, lam = [], torch.zeros(num_envs)
        for t in reversed(range(num_steps)):
            alive = 1 - (carry["next_done"] if t == num_steps - 1 else dones[t + 1])
            following = last[0] if t == num_steps - 1 else values[t + 1]
            lam = rewards[t] + 0.99 * following * alive - values[t] + 0.99 * 0.95 * alive * lam
            advantages.insert(0, lam)
        obs, actions, logprobs, dones, values = map(torch.stack, (obs, actions, logprobs, dones, values))
        advantages = torch.stack(advantages)
        returns, order, kl = advantages + values, list(range(num_envs)), torch.zeros(())
        for _ in range(3):
            random.shuffle(order)
            for env in order:
                one = [env]
                dist, value, _ = agent(obs[:, one], tuple(each[:, one] for each in initial), dones[:, one])
                ratio = (dist.log_prob(actions[:, one]) - logprobs[:, one]).exp()
                kl = ((ratio - 1) - ratio.log()).mean().detach()
                a = (advantages[:, one] - advantages[:, one].mean()) / (advantages[:, one].std() + 1e-8)
                loss = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean() - 0.01 * dist.entropy().mean()
                loss = loss + 0.5 * (value - returns[:, one]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
            if kl > target_kl:
                break
        step.log(loss=loss, kl=kl)


class Node:
    """A node of a search tree."""

    def __init__(self, prior: float) -> None:
        self.prior, self.visits, self.value_sum, self.children = prior, 0, 0.0, {}

    def value(self) -> float:
        return self.value_sum / self.visits if self.visits else 0.0


def searches_trees(run: Run, simulations: int = 8) -> None:
    """AlphaZero on Nim: search by a network, add Dirichlet noise, play itself, and train on kept games."""
    torch.manual_seed(3)
    np.random.seed(3)
    net = nn.ModuleDict({"body": nn.Linear(10, 16), "policy": nn.Linear(16, 3), "value": nn.Linear(16, 1)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    examples = deque(maxlen=40)
    run.keep(net=net, optimizer=optimizer, examples=examples)

    def evaluate(x):
        h = net["body"](x).relu()
        return net["policy"](h), torch.tanh(net["value"](h)).squeeze(-1)

    def encode(stones):
        return torch.eye(10)[stones]

    def expand(node, stones):
        with torch.no_grad():
            logits, value = evaluate(encode(stones)[None])
        p = logits[0].softmax(0).tolist()
        node.children = {a: Node(p[a]) for a in range(min(3, stones))}
        return value.item()

    def simulate(node, stones):
        if stones == 0:
            value = -1.0
        elif not node.children:
            value = expand(node, stones)
        else:
            action, child = max(
                node.children.items(),
                key=lambda each: -each[1].value() + 1.5 * each[1].prior * math.sqrt(node.visits) / (1 + each[1].visits),
            )
            value = -simulate(child, stones - action - 1)
        node.visits, node.value_sum = node.visits + 1, node.value_sum + value
        return value

    for step in run.steps(per_epoch=STEPS):
        stones, game = int(np.random.randint(4, 10)), []
        while stones:
            root = Node(0)
            expand(root, stones)
            for child, noise in zip(root.children.values(), np.random.dirichlet([0.3] * len(root.children))):
                child.prior = 0.75 * child.prior + 0.25 * noise
            for _ in range(simulations):
                simulate(root, stones)
            visits = np.array([root.children[a].visits if a in root.children else 0 for a in range(3)], dtype=float)
            pi = visits / visits.sum()
            game.append((stones, pi))
            stones -= int(np.random.choice(3, p=pi)) + 1
        for i, (s, pi) in enumerate(reversed(game)):
            examples.append((s, pi, 1.0 if i % 2 == 0 else -1.0))
        batch = random.choices(examples, k=BATCH)
        s, pi, z = zip(*batch)
        logits, value = evaluate(encode(list(s)))
        pi, z = torch.tensor(np.stack(pi)).float(), torch.tensor(z)
        loss = -(pi * logits.log_softmax(1)).sum(1).mean() + F.mse_loss(value, z)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)


def plans_in_a_table(run: Run, planning: int = 5) -> None:
    """Dyna-Q: a table in a dict of arrays by state, a model of transitions in a dict, and planning from both."""
    env = Corridor()
    q = {f"{s}": np.zeros(2) for s in range(6)}
    model = {}
    state = {"place": int(env.reset()[0].argmax()), "episodes": 0, "epsilon": 1.0}
    run.keep(q=q, model=model, env=vars(env), state=state)
    for step in run.steps(per_epoch=STEPS):
        for _ in range(5):
            s = f"{state['place']}"
            action = random.randrange(2) if random.random() < state["epsilon"] else int(q[s].argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            after = int(obs.argmax())
            q[s][action] += 0.1 * (reward + 0.95 * (not terminated) * q[f"{after}"].max() - q[s][action])
            model[f"{s}:{action}"] = (reward, after, terminated)
            for key in random.choices(sorted(model), k=planning):
                r, n, d = model[key]
                s0, a0 = key.split(":")
                q[s0][int(a0)] += 0.1 * (r + 0.95 * (not d) * q[f"{n}"].max() - q[s0][int(a0)])
            state["place"] = after
            if terminated or truncated:
                state["place"] = int(env.reset()[0].argmax())
                state["episodes"] += 1
                state["epsilon"] = max(0.1, state["epsilon"] * 0.9)
        step.log(loss=float(-max(each.max() for each in q.values())), episodes=float(state["episodes"]))


def pulls_arms(run: Run, arms: int = 5) -> None:
    """Contextual bandits: Thompson sampling of arms, and LinUCB's matrices by arm in arrays of NumPy."""
    rng = np.random.default_rng(7)
    truth = np.random.default_rng(1).normal(size=(arms, 4))
    alphas, betas = torch.ones(arms), torch.ones(arms)
    a, b = np.stack([np.eye(4)] * arms), np.zeros((arms, 4))
    regret = {"total": 0.0, "by_arm": [0] * arms}
    run.keep(rng=rng, alphas=alphas, betas=betas, a=a, b=b, regret=regret)
    for step in run.steps(per_epoch=STEPS):
        context = rng.normal(size=4)
        theta = np.linalg.solve(a, b[..., None])[..., 0]
        width = np.sqrt(np.einsum("i,aij,j->a", context, np.linalg.inv(a), context))
        prior = Beta(alphas, betas).sample().numpy()
        arm = int((theta @ context + 0.5 * width + 0.2 * prior).argmax())
        reward = float(rng.random() < 1 / (1 + np.exp(-truth[arm] @ context)))
        a[arm] += np.outer(context, context)
        b[arm] += reward * context
        alphas[arm] += reward
        betas[arm] += 1 - reward
        regret["total"] += float((truth @ context).max() - truth[arm] @ context)
        regret["by_arm"][arm] += 1
        step.log(loss=regret["total"] / (step.number + 1))


def imitates(run: Run, beta_decay: float = 0.5) -> None:
    """DAgger and GAIL together: an expert labels states that the policy visits; a discriminator gives rewards."""
    torch.manual_seed(4)
    env = Corridor(seed=4)
    policy, judge = mlp(6, 2), mlp(8, 1)
    optimizers = {
        "policy": torch.optim.Adam(policy.parameters(), lr=0.01),
        "judge": torch.optim.Adam(judge.parameters(), lr=0.01),
    }
    data = {"obs": [], "labels": []}
    run.keep(policy=policy, judge=judge, optimizers=optimizers, data=data, env=vars(env))
    for step in run.steps(per_epoch=STEPS):
        beta = beta_decay ** (step.number // STEPS)
        obs, _ = env.reset()
        visited, done = [], False
        while not done:
            dist = Categorical(logits=policy(torch.from_numpy(obs)))
            action = dist.sample()
            visited.append((obs, action, dist.log_prob(action)))
            data["obs"].append(obs)
            data["labels"].append(1)
            chosen = 1 if random.random() < beta else action.item()
            obs, _, terminated, truncated, _ = env.step(chosen)
            done = terminated or truncated
        del data["obs"][:-50], data["labels"][:-50]
        index = np.random.choice(len(data["obs"]), BATCH)
        x, y = (
            torch.from_numpy(np.stack([data["obs"][i] for i in index])),
            torch.tensor([data["labels"][i] for i in index]),
        )
        fake = torch.cat(
            [
                torch.from_numpy(np.stack([o for o, _, _ in visited])),
                F.one_hot(torch.stack([a for _, a, _ in visited]), 2).float(),
            ],
            1,
        )
        real = torch.cat([x, F.one_hot(y, 2).float()], 1)
        judge_loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
        optimizers["judge"].zero_grad()
        judge_loss.backward()
        optimizers["judge"].step()
        reward = -F.softplus(-judge(fake)).detach().squeeze(1)
        log_p = torch.stack([p for _, _, p in visited])
        loss = F.cross_entropy(policy(x), y) - 0.1 * (log_p * (reward - reward.mean())).mean()
        optimizers["policy"].zero_grad()
        loss.backward()
        optimizers["policy"].step()
        step.log(loss=loss, judge_loss=judge_loss)


def learns_offline(run: Run, expectile: float = 0.7) -> None:
    """IQL on a fixed data set, with a regularisation of CQL, returns to go, and a policy by advantages."""
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(6)
    states, actions = torch.randn(80, 4, generator=g), torch.randint(2, (80,), generator=g)
    rewards, after = states[:, 0] * (2 * actions - 1), torch.roll(states, 1, 0)
    q, v, policy = mlp(4, 2), mlp(4, 1), mlp(4, 2)
    q_target = copy.deepcopy(q).requires_grad_(False)
    opts = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (q, v, policy)]
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opts[2], 40)
    log_alpha = torch.zeros((), requires_grad=True)
    alpha_optim = torch.optim.Adam([log_alpha], lr=0.01)
    run.keep(q=q, v=v, policy=policy, q_target=q_target, opts=opts, cosine=cosine)
    run.keep(log_alpha=log_alpha, alpha_optim=alpha_optim)
    for step in run.steps(per_epoch=STEPS):
        i = torch.randint(80, (BATCH,))
        s, a, r, n = states[i], actions[i], rewards[i], after[i]
        with torch.no_grad():
            target = q_target(s).gather(1, a[:, None])
        off = target - v(s)
        v_loss = ((expectile - (off < 0).float()).abs() * off.square()).mean()
        values = q(s)
        gap = (values.logsumexp(1) - values.gather(1, a[:, None]).squeeze(1)).mean()
        q_loss = F.mse_loss(values.gather(1, a[:, None]).squeeze(1), r + 0.9 * v(n).squeeze(1).detach())
        q_loss = q_loss + log_alpha.exp().detach() * gap
        weight = (3 * off.detach().squeeze(1)).exp().clamp(max=100)
        policy_loss = (weight * F.cross_entropy(policy(s), a, reduction="none")).mean()
        for opt, loss in zip(opts, (q_loss, v_loss, policy_loss)):
            opt.zero_grad()
            loss.backward()
            opt.step()
        cosine.step()
        alpha_optim.zero_grad()
        (-log_alpha.exp() * (gap.detach() - 1.0)).backward()
        alpha_optim.step()
        for t, p in zip(q_target.parameters(), q.parameters()):
            t.lerp_(p.detach(), 0.05)
        step.log(loss=q_loss, v_loss=v_loss, gap=gap)


def plays_together(run: Run, agents: int = 2) -> None:
    """QMIX: agents share a network, a mixer of hyper-networks joins their values; episodes are kept in a deque."""
    torch.manual_seed(6)
    agent = nn.ModuleDict({"fc": nn.Linear(3 + agents, 8), "rnn": nn.GRUCell(8, 8), "out": nn.Linear(8, 2)})
    mixer = nn.ModuleDict(
        {"w1": nn.Linear(2, agents * 4), "b1": nn.Linear(2, 4), "w2": nn.Linear(2, 4), "v": mlp(2, 1)}
    )
    old_agent, old_mixer = copy.deepcopy(agent), copy.deepcopy(mixer)
    optimiser = torch.optim.RMSprop([*agent.parameters(), *mixer.parameters()], lr=0.005, alpha=0.99, eps=1e-5)
    episodes, state = deque(maxlen=8), {"last_target_update": 0, "wins": defaultdict(int)}
    run.keep(agent=agent, mixer=mixer, old_agent=old_agent, old_mixer=old_mixer, optimiser=optimiser)
    run.keep(episodes=episodes, state=state)

    def values(net, obs, hidden):
        ids = torch.eye(agents).expand(len(obs), -1, -1)
        h = net["fc"](torch.cat([obs, ids], -1)).relu().flatten(0, 1)
        hidden = net["rnn"](h, hidden)
        return net["out"](hidden).view(len(obs), agents, 2), hidden

    def mix(net, q, s):
        w = net["w1"](s).abs().view(-1, agents, 4)
        h = F.elu((q[:, None] @ w).squeeze(1) + net["b1"](s))
        return (h * net["w2"](s).abs()).sum(1) + net["v"](s).squeeze(1)

    for step in run.steps(per_epoch=STEPS):
        epsilon, hidden, place = max(0.1, 1 - step.number / 20), torch.zeros(agents, 8), torch.randn(2)
        seen = []
        for _ in range(4):
            obs = torch.stack([torch.cat([place, place[i : i + 1]]) for i in range(agents)])
            with torch.no_grad():
                q, hidden = values(agent, obs[None], hidden)
            action = torch.where(torch.rand(agents) < epsilon, torch.randint(2, (agents,)), q[0].argmax(1))
            reward = float(-(place + 0.5 * (2 * action - 1)).norm())
            seen.append((obs, place, action, reward))
            place = place + 0.5 * (2 * action - 1) + 0.05 * torch.randn(2)
        state["wins"][f"{len(episodes)}"] += reward > -0.5
        episodes.append(seen)
        batch = random.sample(list(episodes), min(4, len(episodes)))
        hidden, old_hidden = torch.zeros(len(batch) * agents, 8), torch.zeros(len(batch) * agents, 8)
        chosen, following, rewards = [], [], []
        for t in range(4):
            obs = torch.stack([e[t][0] for e in batch])
            s = torch.stack([e[t][1] for e in batch])
            a = torch.stack([e[t][2] for e in batch])
            q, hidden = values(agent, obs, hidden)
            with torch.no_grad():
                old_q, old_hidden = values(old_agent, obs, old_hidden)
                following.append(mix(old_mixer, old_q.max(2)[0], s))
            chosen.append(mix(mixer, q.gather(2, a[..., None]).squeeze(2), s))
            rewards.append(torch.tensor([e[t][3] for e in batch]))
        loss = sum((c - (r + 0.9 * n)).square().mean() for c, r, n in zip(chosen, rewards, following[1:]))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*agent.parameters(), *mixer.parameters()], 10)
        optimiser.step()
        if step.number - state["last_target_update"] >= 7:
            old_agent.load_state_dict(agent.state_dict())
            old_mixer.load_state_dict(mixer.state_dict())
            state["last_target_update"] = step.number
        step.log(loss=loss)


def adapts_covariances(run: Run, population: int = 8) -> None:
    """CMA-ES: mean, paths and covariance in arrays that are kept; no gradient, no module."""
    rng = np.random.RandomState(8)
    n, mu = 5, population // 2
    es = {
        "mean": rng.randn(n), "sigma": 0.5, "c": np.eye(n), "pc": np.zeros(n), "ps": np.zeros(n), "best": None,
        "generation": 0,
    }  # fmt: skip
    run.keep(es=es, rng=rng)
    weights = np.log(mu + 0.5) - np.log(np.arange(1, mu + 1))
    weights /= weights.sum()
    mueff = 1 / (weights**2).sum()
    for step in run.steps(per_epoch=STEPS):
        values, vectors = np.linalg.eigh(es["c"])
        root = vectors @ np.diag(np.sqrt(np.maximum(values, 1e-12))) @ vectors.T
        y = rng.randn(population, n) @ root
        x = es["mean"] + es["sigma"] * y
        f = (x**2 * np.arange(1, n + 1)).sum(1)
        order = f.argsort()
        if es["best"] is None or f[order[0]] < es["best"][0]:
            es["best"] = (f[order[0]], x[order[0]].copy())
        step_ = weights @ y[order[:mu]]
        es["mean"] = es["mean"] + es["sigma"] * step_
        inverse = vectors @ np.diag(1 / np.sqrt(np.maximum(values, 1e-12))) @ vectors.T
        es["ps"] = 0.6 * es["ps"] + np.sqrt(0.4 * 1.6 * mueff) * inverse @ step_
        es["pc"] = 0.6 * es["pc"] + np.sqrt(0.4 * 1.6 * mueff) * step_
        es["c"] = 0.8 * es["c"] + 0.1 * np.outer(es["pc"], es["pc"]) + 0.1 * (y[order[:mu]].T * weights) @ y[order[:mu]]
        es["sigma"] *= float(np.exp(0.3 * (np.linalg.norm(es["ps"]) / np.sqrt(n) - 1)))
        es["generation"] += 1
        step.log(loss=es["best"][0], sigma=es["sigma"])


def imagines(run: Run, ensemble: int = 3, horizon: int = 3) -> None:
    """A world model: an ensemble of dynamics with normalisers, imagined rollouts, and a policy through them."""
    torch.manual_seed(7)
    models = nn.ModuleList(mlp(4, 6) for _ in range(ensemble))
    policy, stats = mlp(3, 2), {"mean": torch.zeros(3), "var": torch.ones(3), "count": 1e-4}
    model_opts = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
    policy_opt = torch.optim.Adam(policy.parameters(), lr=0.003)
    elites, replay, state = [0, 1], deque(maxlen=60), {"obs": torch.zeros(3)}
    run.keep(models=models, policy=policy, stats=stats, model_opts=model_opts, policy_opt=policy_opt)
    run.keep(elites=elites, replay=replay, state=state)

    def act(s):
        mean, log_std = policy((s - stats["mean"]) / stats["var"].sqrt()).chunk(2, -1)
        return torch.tanh(Normal(mean, log_std.clamp(-3, 0).exp()).rsample())

    for step in run.steps(per_epoch=STEPS):
        for _ in range(4):
            with torch.no_grad():
                a = act(state["obs"])
            after = 0.9 * state["obs"] + 0.3 * torch.cat([a, a**2, -a]) + 0.02 * torch.randn(3)
            replay.append((state["obs"], a, after))
            state["obs"] = after if after.norm() < 1.5 else torch.randn(3) * 0.1
        new = torch.stack([each[2] for each in list(replay)[-4:]])
        delta, total = new.mean(0) - stats["mean"], stats["count"] + 4
        stats["var"] = (stats["var"] * stats["count"] + new.var(0) * 4 + delta**2 * stats["count"] * 4 / total) / total
        stats["mean"], stats["count"] = stats["mean"] + delta * 4 / total, total
        errors = []
        for model, opt in zip(models, model_opts):
            s, a, n = map(torch.stack, zip(*random.choices(replay, k=BATCH)))
            mean, log_var = model(torch.cat([s, a], 1)).chunk(2, 1)
            log_var = log_var.clamp(-4, 2)
            loss = ((mean - (n - s)).square() * (-log_var).exp() + log_var).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            errors.append(loss.item())
        elites[:] = np.argsort(errors)[:2].tolist()
        s = torch.stack([each[0] for each in random.choices(replay, k=BATCH)])
        total = 0.0
        for _ in range(horizon):
            a = act(s)
            s = s + models[random.choice(elites)](torch.cat([s, a], 1)).chunk(2, 1)[0]
            total = total - s.square().sum(1).mean()
        policy_opt.zero_grad()
        (-total).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        policy_opt.step()
        step.log(loss=sum(errors) / ensemble, value=total)

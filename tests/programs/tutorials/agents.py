"""Tutorials of agents: policies, critics, memories, curiosity, evolution."""

import copy
import math
import random
from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from holdfast import Run
from tests.programs.tutorials.data import STEPS

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class CartPole:
    """A toy with gymnasium's verbs: it falls at a distance, or after some steps."""

    def __init__(self, seed: int = 0) -> None:
        self.np_random, self.steps_beyond = np.random.default_rng(seed), None
        self.reset()

    def reset(self):
        self.state, self.steps = self.np_random.uniform(-0.05, 0.05, size=(4,)).astype(np.float32), 0
        return self.state.copy(), {}

    def step(self, action):
        force = np.float32(2.0 * float(action) - 1.0)
        self.state = (self.state + 0.1 * np.roll(self.state, 1) + 0.02 * force).astype(np.float32)
        self.steps += 1
        return self.state.copy(), 1.0, bool(abs(self.state).max() > 0.5), self.steps >= 12, {}


class Agent(nn.Module):
    def __init__(self, actions: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.actor, self.critic = nn.Linear(4, 12), nn.Linear(12, actions), nn.Linear(12, 1)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return Categorical(logits=self.actor(x)), self.critic(x).squeeze(-1)


def reinforces(run: Run) -> None:
    """REINFORCE with a baseline: an episode each step, and a running reward."""
    policy, env = Agent(), CartPole()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
    state = {"running_reward": 10.0}
    run.keep(policy=policy, optimizer=optimizer, state=state, env=vars(env))
    for step in run.steps(per_epoch=STEPS):
        saved_actions, rewards = [], []
        observation, _ = env.reset()
        for _ in range(30):
            dist, value = policy(torch.from_numpy(observation))
            action = dist.sample()
            saved_actions.append((dist.log_prob(action), value))
            observation, reward, terminated, truncated, _ = env.step(action.item())
            rewards.append(reward)
            if terminated or truncated:
                break
        state["running_reward"] = 0.05 * sum(rewards) + (1 - 0.05) * state["running_reward"]
        returns, ret = deque(), 0
        for r in rewards[::-1]:
            ret = r + 0.99 * ret
            returns.appendleft(ret)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        losses = [
            -log_prob * (r - v.item()) + F.smooth_l1_loss(v, r) for (log_prob, v), r in zip(saved_actions, returns)
        ]
        optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        loss.backward()
        optimizer.step()
        if step.number % 5 == 0:
            print(f"Episode {step.number}\tAverage reward: {state['running_reward']:.2f}")
        step.log(loss=loss, reward=state["running_reward"])


def a2c(run: Run, n_envs: int = 3, n_steps: int = 5) -> None:
    """Step several environments together, and learn from advantages of a few steps."""
    agent, envs = Agent(), [CartPole(each) for each in range(n_envs)]
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=5e-3, alpha=0.99)
    states = {"now": np.stack([each.reset()[0] for each in envs])}
    run.keep(agent=agent, optimizer=optimizer, states=states, **{f"env_{i}": vars(each) for i, each in enumerate(envs)})
    for step in run.steps(per_epoch=STEPS):
        log_probs, values, rewards, masks, entropies = [], [], [], [], []
        for _ in range(n_steps):
            dist, value = agent(torch.from_numpy(states["now"]))
            actions = dist.sample()
            results = [env.step(action.item()) for env, action in zip(envs, actions)]
            dones = [terminated or truncated for _, _, terminated, truncated, _ in results]
            states["now"] = np.stack([env.reset()[0] if done else r[0] for env, r, done in zip(envs, results, dones)])
            log_probs.append(dist.log_prob(actions))
            values.append(value)
            entropies.append(dist.entropy().mean())
            rewards.append(torch.tensor([r[1] for r in results]))
            masks.append(1 - torch.tensor(dones).float())
        with torch.no_grad():
            _, ahead = agent(torch.from_numpy(states["now"]))
        returns = []
        for reward, mask in zip(reversed(rewards), reversed(masks)):
            ahead = reward + 0.95 * ahead * mask
            returns.insert(0, ahead)
        advantage = torch.stack(returns) - torch.stack(values)
        actor_loss = -(torch.stack(log_probs) * advantage.detach()).mean()
        loss = actor_loss + 0.5 * advantage.pow(2).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        step.log(loss=loss, entropy=torch.stack(entropies).mean())


def ppo(run: Run, num_steps: int = 8, num_envs: int = 2) -> None:
    """Fill arrays by a rollout, and train on them for some epochs, as a script in one file does."""
    random.seed(1)
    np.random.seed(1)
    agent, envs = Agent(), [CartPole(each) for each in range(num_envs)]
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    obs, actions = torch.zeros(num_steps, num_envs, 4), torch.zeros(num_steps, num_envs)
    logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(4))
    state = {"obs": torch.tensor(np.stack([each.reset()[0] for each in envs])), "done": torch.zeros(num_envs)}
    state["global_step"] = 0
    run.keep(agent=agent, optimizer=optimizer, state=state, **{f"env_{i}": vars(each) for i, each in enumerate(envs)})
    num_updates = STEPS * run.config.epochs
    for update in run.steps(per_epoch=STEPS):
        optimizer.param_groups[0]["lr"] = (1.0 - update.number / num_updates) * 2.5e-3
        for t in range(num_steps):
            state["global_step"] += num_envs
            obs[t], dones[t] = state["obs"], state["done"]
            with torch.no_grad():
                dist, values[t] = agent(state["obs"])
                actions[t] = dist.sample()
                logprobs[t] = dist.log_prob(actions[t])
            results = [env.step(int(action)) for env, action in zip(envs, actions[t])]
            rewards[t] = torch.tensor([r[1] for r in results])
            ended = [r[2] or r[3] for r in results]
            state["obs"] = torch.tensor(
                np.stack([e.reset()[0] if d else r[0] for e, r, d in zip(envs, results, ended)])
            )
            state["done"] = torch.tensor(ended).float()
        with torch.no_grad():
            next_value, lastgaelam, advantages = agent(state["obs"])[1], 0, torch.zeros_like(rewards)
            for t in reversed(range(num_steps)):
                is_last = t == num_steps - 1
                alive = 1.0 - (state["done"] if is_last else dones[t + 1])
                delta = rewards[t] + 0.99 * (next_value if is_last else values[t + 1]) * alive - values[t]
                advantages[t] = lastgaelam = delta + 0.99 * 0.95 * alive * lastgaelam
        flat = [each.reshape(-1, *each.shape[2:]) for each in (obs, actions, logprobs, advantages, advantages + values)]
        b_inds, clipfracs = np.arange(num_steps * num_envs), []
        for _ in range(2):
            np.random.shuffle(b_inds)
            for start in range(0, len(b_inds), 8):
                b_obs, b_actions, b_logprobs, b_adv, b_returns = (each[b_inds[start : start + 8]] for each in flat)
                dist, newvalue = agent(b_obs)
                ratio = (dist.log_prob(b_actions) - b_logprobs).exp()
                clipfracs.append(((ratio - 1.0).abs() > 0.2).float().mean().item())
                b_adv = (b_adv - b_adv.mean()) / (b_adv.std() + 1e-8)
                pg_loss = torch.max(-b_adv * ratio, -b_adv * ratio.clamp(0.8, 1.2)).mean()
                loss = pg_loss + 0.5 * 0.5 * (newvalue - b_returns).square().mean() - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        update.log(loss=loss, clipfrac=np.mean(clipfracs), global_step=state["global_step"])


class ReplayMemory:
    def __init__(self, capacity: int) -> None:
        self.memory = deque(maxlen=capacity)

    def push(self, *args) -> None:
        self.memory.append(Transition(*args))

    def sample(self, batch_size: int):
        return random.sample(self.memory, batch_size)

    def __len__(self) -> int:
        return len(self.memory)


def dqn(run: Run, tau: float = 0.05) -> None:
    """Explore by a rate that decays with the steps done, and follow softly by a target network."""
    torch.manual_seed(1)
    policy_net, target_net, env, memory = nn.Linear(4, 2), nn.Linear(4, 2), CartPole(), ReplayMemory(40)
    target_net.load_state_dict(policy_net.state_dict())
    optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-2, amsgrad=True)
    state = {"steps_done": 0, "observation": torch.tensor(env.reset()[0])[None]}
    run.keep(policy_net=policy_net, target_net=target_net, optimizer=optimizer, memory=memory.memory, state=state)
    run.keep(env=vars(env))
    episode_durations, loss = [], torch.zeros(())
    for step in run.steps(per_epoch=STEPS):
        for _ in range(3):
            threshold = 0.05 + 0.85 * math.exp(-1.0 * state["steps_done"] / 30)
            state["steps_done"] += 1
            if random.random() > threshold:
                with torch.no_grad():
                    action = policy_net(state["observation"]).max(1).indices.view(1, 1)
            else:
                action = torch.tensor([[random.randrange(2)]])
            observation, reward, terminated, truncated, _ = env.step(action.item())
            following = None if terminated else torch.tensor(observation)[None]
            memory.push(state["observation"], action, following, torch.tensor([reward]))
            if terminated or truncated:
                episode_durations.append(env.steps)
                following = torch.tensor(env.reset()[0])[None]
            state["observation"] = following
        if len(memory) >= 8:
            batch = Transition(*zip(*memory.sample(8)))
            mask = torch.tensor([each is not None for each in batch.next_state])
            q = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
            ahead = torch.zeros(8)
            with torch.no_grad():
                alive = [each for each in batch.next_state if each is not None]
                ahead[mask] = target_net(torch.cat(alive)).max(1).values
            loss = F.smooth_l1_loss(q, (ahead * 0.99 + torch.cat(batch.reward)).unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
            optimizer.step()
            target, policy = target_net.state_dict(), policy_net.state_dict()
            target_net.load_state_dict({key: policy[key] * tau + target[key] * (1 - tau) for key in policy})
        step.log(loss=loss.detach())


def replays_by_priority(run: Run, size: int = 32) -> None:
    """Draw transitions by priorities in an array, and correct by weights that anneal with the step."""
    torch.manual_seed(1)
    net, target, env = nn.Linear(4, 2), nn.Linear(4, 2), CartPole()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    storage = {
        "obs": np.zeros((size, 4), np.float32),
        "then": np.zeros((size, 4), np.float32),
        "action": np.zeros(size, int),
    }
    priorities, state = np.zeros(size), {"place": 0, "filled": 0, "obs": env.reset()[0]}
    run.keep(
        net=net, target=target, optimizer=optimizer, storage=storage, priorities=priorities, state=state, env=vars(env)
    )
    for step in run.steps(per_epoch=STEPS):
        for _ in range(4):
            place, obs = state["place"], state["obs"]
            action = np.random.randint(2) if np.random.rand() < 0.3 else int(net(torch.from_numpy(obs)).argmax())
            then, _, terminated, truncated, _ = env.step(action)
            storage["obs"][place], storage["then"][place], storage["action"][place] = obs, then, action
            priorities[place] = priorities.max() or 1.0
            state["obs"] = env.reset()[0] if terminated or truncated else then
            state["place"], state["filled"] = (place + 1) % size, min(state["filled"] + 1, size)
        chances = priorities[: state["filled"]] ** 0.6
        chances /= chances.sum()
        indices = np.random.choice(state["filled"], 4, p=chances)
        beta = min(1.0, 0.4 + step.number * 0.6 / 40)
        weights = (state["filled"] * chances[indices]) ** -beta
        obs, then = (torch.from_numpy(storage[name][indices]) for name in ("obs", "then"))
        with torch.no_grad():
            wanted = 1 + 0.9 * target(then).max(1).values
        error = net(obs).gather(1, torch.from_numpy(storage["action"][indices])[:, None])[:, 0] - wanted
        loss = (torch.from_numpy(weights / weights.max()) * error**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        priorities[indices] = error.detach().abs().numpy() + 1e-5
        if step.number % 6 == 0:
            target.load_state_dict(net.state_dict())
        step.log(loss=loss, beta=beta)


def td3(run: Run, policy_frequency: int = 2) -> None:
    """Update the actor and the targets every second step, with smoothed actions."""
    torch.manual_seed(1)
    actor, qf1, qf2 = nn.Linear(4, 1), nn.Linear(5, 1), nn.Linear(5, 1)
    targets = nn.ModuleList([copy.deepcopy(each).requires_grad_(False) for each in (actor, qf1, qf2)])
    q_optimizer = torch.optim.Adam([*qf1.parameters(), *qf2.parameters()], lr=1e-2)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    env, buffer = CartPole(), deque(maxlen=50)
    state = {"obs": env.reset()[0]}
    run.keep(actor=actor, qf1=qf1, qf2=qf2, targets=targets, q_optimizer=q_optimizer, actor_optimizer=actor_optimizer)
    run.keep(env=vars(env), buffer=buffer, state=state)
    for step in run.steps(per_epoch=STEPS):
        with torch.no_grad():
            action = (actor(torch.from_numpy(state["obs"])) + Normal(0.0, 0.1).sample((1,))).clamp(0, 1)
        then, reward, terminated, truncated, _ = env.step(action.item())
        buffer.append((state["obs"], action.numpy(), np.float32(reward), then, np.float32(terminated)))
        state["obs"] = env.reset()[0] if terminated or truncated else then
        obs, act, rew, then, done = (torch.from_numpy(np.stack(each)) for each in zip(*random.choices(buffer, k=6)))
        with torch.no_grad():
            noise = (torch.randn_like(act) * 0.2).clamp(-0.5, 0.5)
            following = torch.cat([then, (targets[0](then) + noise).clamp(0, 1)], 1)
            ahead = torch.min(targets[1](following), targets[2](following)).view(-1)
            wanted = rew + (1 - done) * 0.99 * ahead
        pairs = torch.cat([obs, act], 1)
        loss = F.mse_loss(qf1(pairs).view(-1), wanted) + F.mse_loss(qf2(pairs).view(-1), wanted)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        if step.number % policy_frequency == 0:
            actor_loss = -qf1(torch.cat([obs, actor(obs)], 1)).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
            for ours, each in zip(targets, (actor, qf1, qf2)):
                for param, target_param in zip(each.parameters(), ours.parameters()):
                    target_param.data.copy_(0.1 * param.data + 0.9 * target_param.data)
        step.log(loss=loss)


class RunningMeanStd:
    def __init__(self, shape=()) -> None:
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x) -> None:
        delta, total = x.mean(0) - self.mean, self.count + len(x)
        self.mean = self.mean + delta * len(x) / total
        self.var = (self.var * self.count + x.var(0) * len(x) + delta**2 * self.count * len(x) / total) / total
        self.count = total


def is_curious(run: Run) -> None:
    """Reward what a random network's predictor doesn't know yet, normalised by running statistics."""
    agent, env = Agent(), CartPole()
    predictor, target = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False)
    optimizer = torch.optim.Adam([*agent.parameters(), *predictor.parameters()], lr=1e-2)
    obs_rms, reward_rms, state = RunningMeanStd((4,)), RunningMeanStd(), {"obs": env.reset()[0]}
    run.keep(agent=agent, predictor=predictor, target=target, optimizer=optimizer, env=vars(env), state=state)
    run.keep(obs_rms=vars(obs_rms), reward_rms=vars(reward_rms))
    for step in run.steps(per_epoch=STEPS):
        seen, log_probs = [], []
        for _ in range(6):
            dist, _ = agent(torch.from_numpy(state["obs"]))
            action = dist.sample()
            log_probs.append(dist.log_prob(action))
            then, _, terminated, truncated, _ = env.step(action.item())
            seen.append(then)
            state["obs"] = env.reset()[0] if terminated or truncated else then
        obs_rms.update(np.stack(seen))
        x = torch.from_numpy(((np.stack(seen) - obs_rms.mean) / np.sqrt(obs_rms.var)).clip(-5, 5)).float()
        novelty = (predictor(x) - target(x)).square().mean(1)
        reward_rms.update(novelty.detach().numpy())
        reward = novelty.detach() / float(np.sqrt(reward_rms.var))
        loss = -(torch.stack(log_probs) * (reward - reward.mean())).mean() + novelty.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss, novelty=novelty.mean())


def evolves(run: Run, population: int = 8, sigma: float = 0.1) -> None:
    """Follow the mean of noises weighted by their episodes' rewards; the best score is kept."""
    torch.manual_seed(1)
    policy, env, state = nn.Linear(4, 2), CartPole(), {"best": 0.0, "generation": 0}
    run.keep(policy=policy, state=state, env=vars(env))

    def play(weights) -> float:
        observation, total = env.reset()[0], 0.0
        while True:
            action = torch.func.functional_call(policy, weights, torch.from_numpy(observation)).argmax().item()
            observation, reward, terminated, truncated, _ = env.step(action)
            total += reward - abs(observation).sum()
            if terminated or truncated:
                return total

    for generation in run.steps(per_epoch=STEPS):
        noises = [{name: torch.randn_like(each) for name, each in policy.named_parameters()} for _ in range(population)]
        with torch.no_grad():
            scores = [
                play({name: each + sigma * noise[name] for name, each in policy.named_parameters()}) for noise in noises
            ]
            order = np.argsort(np.argsort(scores)) / (population - 1) - 0.5
            for name, each in policy.named_parameters():
                each += 0.1 * sum(float(rank) * noise[name] for rank, noise in zip(order, noises))
        state["best"] = max(state["best"], max(scores))
        state["generation"] += 1
        generation.log(loss=-np.mean(scores), best=state["best"])

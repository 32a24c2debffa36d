"""Train an agent by PPO on a vector of balancing environments."""

import json
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn, optim
from torch.distributions.categorical import Categorical
from torch.nn import functional as F


@dataclass
class Args:
    seed: int = 1
    learning_rate: float = 3e-3
    num_envs: int = 8
    num_steps: int = 24  # of each environment in a rollout
    num_iterations: int = 60  # rollouts, each followed by updates
    anneal_lr: bool = True
    gamma: float = 0.98
    gae_lambda: float = 0.95
    num_minibatches: int = 3
    update_epochs: int = 2
    norm_adv: bool = True
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5


class BalanceVectorEnv:
    """A vector of poles, each to be held upright by a push to the left or to the right."""

    def __init__(self, num_envs, dt=0.1, max_angle=0.6, max_length=80):
        self.num_envs, self.dt, self.max_angle, self.max_length = num_envs, dt, max_angle, max_length

    def reset(self):
        self.state = np.random.uniform(-0.1, 0.1, (self.num_envs, 2))
        self.lengths = np.zeros(self.num_envs, dtype=np.int64)
        return self.state.astype(np.float32)

    def step(self, actions):
        angle, speed = self.state.T
        push = np.where(actions == 1, 1.0, -1.0) + np.random.normal(0, 0.2, self.num_envs)
        speed = speed + self.dt * (2.0 * np.sin(angle) + push)
        angle = angle + self.dt * speed
        self.state = np.stack([angle, speed], axis=1)
        self.lengths = self.lengths + 1
        terminations = np.abs(angle) > self.max_angle
        dones = terminations | (self.lengths >= self.max_length)
        finished = self.lengths[dones]
        # a finished environment begins anew at once
        self.state[dones] = np.random.uniform(-0.1, 0.1, (int(dones.sum()), 2))
        self.lengths[dones] = 0
        return self.state.astype(np.float32), np.where(terminations, -1.0, 0.1), dones, finished


def layer_init(layer, std=1.4, bias=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias)
    return layer


def build_mlp(out_features, std, hidden=32):
    first, second = nn.Linear(2, hidden), nn.Linear(hidden, hidden)
    last = layer_init(nn.Linear(hidden, out_features), std)
    return nn.Sequential(layer_init(first), nn.Tanh(), layer_init(second), nn.Tanh(), last)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = build_mlp(1, std=1.0)
        self.actor = build_mlp(2, std=0.01)

    def get_value(self, x):
        return self.critic(x).squeeze(-1)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.get_value(x)


if __name__ == "__main__":
    args = Args()
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    envs = BalanceVectorEnv(args.num_envs)
    agent = Agent().to(device)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # the memory of one rollout
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, 2), device=device)
    actions, logprobs, values = (torch.zeros(shape, device=device) for _ in range(3))
    rewards, dones = (torch.zeros(shape, device=device) for _ in range(2))

    next_obs = torch.as_tensor(envs.reset(), device=device)
    next_done = torch.zeros(args.num_envs, device=device)

    for iteration in range(1, args.num_iterations + 1):
        if args.anneal_lr:
            left = 1.0 - (iteration - 1) / args.num_iterations
            optimizer.param_groups[0]["lr"] = left * args.learning_rate

        # play
        lengths = []
        for t in range(args.num_steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t] = agent.get_action_and_value(next_obs)
            observation, reward, done, finished = envs.step(actions[t].cpu().numpy())
            rewards[t] = torch.as_tensor(reward, device=device)
            next_obs, next_done = torch.tensor(observation).to(device), torch.tensor(done).float().to(device)
            lengths.extend(finished.tolist())

        # generalized advantage estimation, from the rollout's end to its beginning
        with torch.no_grad():
            advantages = torch.zeros_like(rewards)
            value_after, alive_after, advantage = agent.get_value(next_obs), 1.0 - next_done, 0.0
            for t in reversed(range(args.num_steps)):
                delta = rewards[t] + args.gamma * value_after * alive_after - values[t]
                advantage = delta + args.gamma * args.gae_lambda * alive_after * advantage
                advantages[t] = advantage
                value_after, alive_after = values[t], 1.0 - dones[t]
            returns = advantages + values

        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()

        # learn
        indices = np.arange(batch_size)
        for _ in range(args.update_epochs):
            np.random.shuffle(indices)
            for start in range(0, batch_size, minibatch_size):
                chosen = indices[start : start + minibatch_size]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[chosen], b_actions[chosen])
                ratio = (newlogprob - b_logprobs[chosen]).exp()
                adv = b_advantages[chosen]
                if args.norm_adv:
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = -torch.min(adv * ratio, adv * clipped).mean()
                v_loss = 0.5 * F.mse_loss(newvalue, b_returns[chosen])
                loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss

                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        losses = {"loss": loss.item(), "value_loss": v_loss.item(), "policy_loss": pg_loss.item()}
        print(json.dumps({"step": iteration, **losses}))
        if lengths:
            print(f"iteration {iteration}: {len(lengths)} episodes of {np.mean(lengths):.1f} steps")

"""Train a soft actor-critic on Pendulum, with a replay buffer."""

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from stable_baselines3.common.buffers import ReplayBuffer
from torch import nn


def make_critic(env: gym.Env, hidden: int) -> nn.Module:
    size = env.observation_space.shape[0] + env.action_space.shape[0]
    body = nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(hidden, 1))


class Actor(nn.Module):
    def __init__(self, env: gym.Env, hidden: int) -> None:
        super().__init__()
        size = env.observation_space.shape[0]
        self.body = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, env.action_space.shape[0])
        self.log_std = nn.Linear(hidden, env.action_space.shape[0])
        self.register_buffer("scale", torch.tensor((env.action_space.high - env.action_space.low) / 2))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(obs)
        normal = torch.distributions.Normal(self.mean(hidden), self.log_std(hidden).clamp(-5, 2).exp())
        raw = normal.rsample()
        log_prob = normal.log_prob(raw) - torch.log(self.scale * (1 - raw.tanh() ** 2) + 1e-6)
        return raw.tanh() * self.scale, log_prob.sum(1, keepdim=True)


def main(total_timesteps: int = 2000, learning_starts: int = 64, hidden: int = 64, tau: float = 0.02) -> None:
    np.random.seed(1)
    torch.manual_seed(1)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("Pendulum-v1", max_episode_steps=50))
    obs, _ = env.reset(seed=1)
    env.action_space.seed(1)
    actor, critics = Actor(env, hidden), nn.ModuleList(make_critic(env, hidden) for _ in range(2))
    targets = nn.ModuleList(make_critic(env, hidden) for _ in range(2)).requires_grad_(False)
    targets.load_state_dict(critics.state_dict())
    log_alpha = torch.zeros(1, requires_grad=True)
    q_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-3)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    a_optimizer = torch.optim.Adam([log_alpha], lr=3e-3)
    rb = ReplayBuffer(10_000, env.observation_space, env.action_space, "cpu", handle_timeout_termination=False)

    for step in range(total_timesteps):
        if step < learning_starts:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = actor(torch.as_tensor(obs)[None])[0][0].numpy()
        next_obs, reward, terminated, truncated, info = env.step(action)
        if "episode" in info:
            print(f"step={step}, episodic_return={info['episode']['r']}")
        rb.add(obs, next_obs, action, np.array([reward]), np.array([terminated]), [info])
        obs = env.reset()[0] if terminated or truncated else next_obs
        if step < learning_starts:
            continue

        data = rb.sample(128)
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            next_action, next_log_prob = actor(data.next_observations)
            pairs = torch.cat([data.next_observations, next_action], 1)
            next_q = torch.min(targets[0](pairs), targets[1](pairs)) - alpha * next_log_prob
            wanted = data.rewards + (1 - data.dones) * 0.99 * next_q
        pairs = torch.cat([data.observations, data.actions], 1)
        q_loss = sum(F.mse_loss(each(pairs), wanted) for each in critics)
        q_optimizer.zero_grad()
        q_loss.backward()
        q_optimizer.step()

        action, log_prob = actor(data.observations)
        pairs = torch.cat([data.observations, action], 1)
        actor_loss = (alpha * log_prob - torch.min(critics[0](pairs), critics[1](pairs))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        a_optimizer.zero_grad()
        (-log_alpha.exp() * (log_prob.detach() - 1)).mean().backward()
        a_optimizer.step()
        for target, each in zip(targets.parameters(), critics.parameters(), strict=True):
            target.lerp_(each.detach(), tau)

    torch.save(actor.state_dict(), "soft_actor_critic.pt")


if __name__ == "__main__":
    main()

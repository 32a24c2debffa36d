import argparse
import random
import time
from itertools import count

import torch
from torch import nn, optim
from torch.utils.tensorboard import SummaryWriter
from zoo import RingBuffer


class Walk:
    """A walk on a line: the reward is the distance to the middle."""

    def __init__(self):
        self.place = 0.0

    def reset(self):
        self.place = random.uniform(-1, 1)
        return [self.place]

    def step(self, action):
        self.place += action
        return [self.place], -abs(self.place)


def make_env(run_name):
    print(f"{run_name} has no video")
    return Walk()


parser = argparse.ArgumentParser()
parser.add_argument("--tune", action="store_false")
parser.add_argument("--episodes", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(4)
random.seed(4)
actor = nn.Linear(1, 1)
critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)


def update(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main():
    run_name = f"walk-{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    env = make_env(run_name)
    if args.tune:
        log_alpha = torch.zeros(1, requires_grad=True)
        alpha_optimizer = optim.Adam([log_alpha], lr=1e-2)
    memory = RingBuffer(64)
    average = 0.0
    begun = time.time()

    place = env.reset()
    for episode in count(1):
        for _ in range(3):
            action = actor(torch.tensor([place])).item() + random.gauss(0, 0.1)
            new_place, reward = env.step(action)
            memory.add((place[0], action, reward))
            place = new_place
        average = 0.9 * average + 0.1 * reward
        if episode % 2 == 0:
            places, actions, rewards = memory.sample(8)
            values = critic(torch.cat([places, actions], 1)).squeeze(1)
            actor_loss = -critic(torch.cat([places, actor(places)], 1)).mean()
            loss = nn.functional.mse_loss(values, rewards) + 0.1 * actor_loss
            if args.tune:
                alpha_loss = (log_alpha.exp() * (values.detach().mean() - average)).mean()
                alpha_optimizer.zero_grad()
                alpha_loss.backward()
                alpha_optimizer.step()
                loss = loss * log_alpha.exp().item()
            update(loss)
        if episode % 4 == 0:
            writer.add_scalar("actor_loss", actor_loss.item(), episode)
        if abs(place[0]) > 5:
            place = env.reset()
        print(f"{episode}: {average:.3f} after {time.time() - begun:.1f} s")
        if average > 10:
            break
    writer.close()


if __name__ == "__main__":
    main()

"""``python -m tests.bench.foreign NAME``: loops as other people write them, held over bare, by the length of a step.

Trains in this process, held and bare in turn, and prints one JSON object of seconds.
"""

import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from holdfast import Run
from holdfast.config import Determinism, Log, RunConfig
from holdfast.machine import determinism
from holdfast.training import Training, run_program, steps
from tests.bench.frame import Benchmark, Row, ask, compare

WARM_UP, STEPS, ROUNDS = 10, 40, 3
Learn = Callable[[], torch.Tensor]


class Attention(nn.Module):
    """A layer of a graph attention network with one head, over a dense adjacency matrix."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.project, self.source, self.target = (
            nn.Linear(inside, outside),
            nn.Linear(outside, 1),
            nn.Linear(outside, 1),
        )

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        nodes = self.project(nodes)
        scores = F.leaky_relu(self.source(nodes) + self.target(nodes).T, 0.2)
        return scores.masked_fill(~edges, -1e9).softmax(-1) @ nodes


class Block(nn.Module):
    """A block of a GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class UNet(nn.Module):
    """A denoiser with two scales."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(2 * width, 1, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        first = F.silu(self.down(torch.cat([x, t.view(-1, 1, 1, 1).expand_as(x)], 1)))
        second = F.silu(self.middle(F.silu(self.norm(self.inner(first)))))
        return self.out(torch.cat([first, F.silu(self.up(second))], 1))


def dqn() -> tuple[dict[str, Any], Learn]:
    """Deep Q-learning with a replay memory and a target network."""
    online, target = (nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 2)) for _ in range(2))
    optimizer, memory = torch.optim.Adam(online.parameters(), 1e-3), deque[Any](maxlen=500)

    def learn() -> torch.Tensor:
        for _ in range(4):
            memory.append(([random.random() for _ in range(4)], random.randrange(2), random.random()))
        states, actions, rewards = zip(*random.choices(memory, k=32), strict=True)
        states = torch.tensor(states)
        with torch.no_grad():
            aims = torch.tensor(rewards) + 0.99 * target(states).max(1).values
        loss = F.mse_loss(online(states).gather(1, torch.tensor(actions)[:, None])[:, 0], aims)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for theirs, own in zip(target.parameters(), online.parameters(), strict=True):
                theirs.lerp_(own, 0.005)
        return loss

    return {"online": online, "target": target, "optimizer": optimizer, "memory": memory}, learn


def gat() -> tuple[dict[str, Any], Learn]:
    """A graph attention network on one graph."""
    model = nn.ModuleList([Attention(64, 64), Attention(64, 7)])
    optimizer = torch.optim.Adam(model.parameters(), 5e-3, weight_decay=5e-4)
    nodes, edges, labels = torch.randn(220, 64), torch.rand(220, 220) < 0.05, torch.randint(7, (220,))

    def learn() -> torch.Tensor:
        optimizer.zero_grad()
        x = F.elu(model[0](F.dropout(nodes, 0.6), edges))
        loss = F.cross_entropy(model[1](F.dropout(x, 0.6), edges), labels)
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "optimizer": optimizer}, learn


def llm() -> tuple[dict[str, Any], Learn]:
    """A small GPT-2 with clipping and a warm-up."""
    model = nn.Sequential(nn.Embedding(256, 64), Block(64), Block(64), nn.LayerNorm(64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))

    def learn() -> torch.Tensor:
        tokens = torch.randint(256, (8, 33))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return {"model": model, "optimizer": optimizer, "schedule": schedule}, learn


def unet() -> tuple[dict[str, Any], Learn]:
    """A diffusion model's denoiser with an average of the weights."""
    model = UNet(24)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-4)

    def learn() -> torch.Tensor:
        images, t = torch.rand(16, 1, 28, 28), torch.rand(16)
        noise = torch.randn_like(images)
        noisy = images * (1 - t).sqrt().view(-1, 1, 1, 1) + noise * t.sqrt().view(-1, 1, 1, 1)
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return {"model": model, "average": average, "optimizer": optimizer}, learn


# About 1, 3, 10 and 50 ms a step.
LOOPS = {"dqn": dqn, "gat": gat, "llm": llm, "unet": unet}
TITLES = {
    "dqn": "deep Q-learning",
    "gat": "a graph attention network",
    "llm": "a small GPT-2",
    "unet": "a diffusion UNet",
}
# The median seconds of a step of each round.
SAMPLES: list[float] = []


def run(full: bool) -> list[Row]:
    """Each loop in a process of its own."""
    rows: list[Row] = []
    for name, title in TITLES.items():
        found = ask("tests.bench.foreign", name, **determinism.preamble(Determinism()))
        state = f"{title}, {found['bare'] * 1e3:.1f} ms a step"
        rows.append(compare(state, "time of a step, held", found["held"], "the bare loop", found["bare"]))
    return rows


def held(run: Run, name: str) -> None:
    """Train in a run, and add to `SAMPLES`."""
    kept, learn = LOOPS[name]()
    run.keep(**kept)
    ends = []
    for step in run.steps(per_epoch=10**6):
        step.log(loss=learn())
        ends.append(time.thread_time())
        if step.number == WARM_UP + STEPS - 1:
            SAMPLES.append(median_step(ends))


def bare(name: str) -> float:
    """Train without a run, and return the median seconds of a step."""
    _, learn = LOOPS[name]()
    ends = []
    for _ in range(WARM_UP + STEPS):
        learn()
        ends.append(time.thread_time())
    return median_step(ends)


def median_step(ends: list[float]) -> float:
    """Return the median of the differences between times, without those of the first steps."""
    return statistics.median(end - begin for begin, end in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False))


def main(name: str) -> None:
    found = importlib.import_module("tests.bench.foreign").SAMPLES  # as the run has imported it
    others = []
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            recipe="tests.bench.foreign:held", run="foreign", store=folder, log=Log(folder=folder),
            settings={"name": name},
        )  # fmt: skip

        def serve(training: Training) -> Generator[None, None, None]:
            yield from steps(training, WARM_UP + STEPS, lambda: False)

        for _ in range(ROUNDS):
            run_program(config, serve)
            others.append(bare(name))
    print(json.dumps({"held": statistics.median(found), "bare": statistics.median(others)}))


BENCHMARK = Benchmark(
    name="foreign",
    about="Loops as other people write them, held by a run over bare, in processor time, by the length of their steps.",
    run=run,
)

if __name__ == "__main__":
    main(sys.argv[1])

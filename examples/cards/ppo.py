"""Proximal policy optimization over rollouts of games with two seats."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from examples.cards.games import SEATS
from examples.cards.policy import TINY, Sampler, entropy
from examples.cards.rollouts import Rollout
from examples.cards.settings import TrainSettings
from holdfast import Anneal


class ReturnScale:
    """The standard deviation of all returns so far, by which returns are divided.

    Source: Welford, "Note on a method for calculating corrected sums of squares and products" (1962).
    """

    def __init__(self) -> None:
        self.count = self.mean = self.squares = 0.0

    def add(self, returns: Tensor) -> None:
        """Add the returns of finished games, of any shape."""
        if not returns.numel():
            return
        count, mean = self.count + returns.numel(), float(returns.double().mean())
        difference = mean - self.mean
        self.squares += float((returns.double() - mean).square().sum())
        self.squares += difference**2 * self.count * returns.numel() / count
        self.mean += difference * returns.numel() / count
        self.count = count

    @property
    def value(self) -> float:
        """Return the deviation; 1 before returns differ."""
        deviation = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return deviation or 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


@dataclass(frozen=True)
class Targets:
    """The training targets of each action of a rollout; (ticks, rows).

    Attributes:
        advantage: by how much the action was better than expected.
        returns: the value that the policy should have expected.
        weight: 1 for actions that are trained, otherwise 0.
    """

    advantage: Tensor
    returns: Tensor
    weight: Tensor


def estimate(rollout: Rollout, scale: float, gamma: float, gae_lambda: float) -> Targets:
    """Return generalized advantage estimates along each seat's own actions.

    The reward of a seat's action is what the seat wins before its next action. Opponents' actions are not trained. An
    action after which the seat has not moved again is not trained either, because its result isn't known. All actions
    of the last tick are left out: of these only actions that end a game have a known result, and training them alone
    would favour ending games.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (2016).

    Args:
        scale: the number by which returns are divided.
        gamma: the discount of each own action.
        gae_lambda: the decay of the estimates.
    """
    rows = torch.arange(rollout.seat.shape[1], device=rollout.seat.device)
    value, won = rollout.value, rollout.won / scale
    # For each row and seat: the value and the advantage of its next action, whether they are known, and the reward.
    after, above, reward = (value.new_zeros(len(rows), SEATS) for _ in range(3))
    is_known = torch.zeros_like(after, dtype=torch.bool)
    after[rows, rollout.next_seat], is_known[rows, rollout.next_seat] = rollout.next_value, True
    advantage, weight = torch.zeros_like(value), torch.zeros_like(value)
    for tick in reversed(range(len(value))):
        ended, seat = rollout.ended[tick], rollout.seat[tick]
        after[ended], above[ended], is_known[ended], reward[ended] = 0.0, 0.0, True, won[tick][ended]
        own = (rows, seat)
        advantage[tick] = reward[own] + gamma * after[own] - value[tick] + gamma * gae_lambda * above[own]
        advantage[tick] *= is_known[own]
        weight[tick] = is_known[own] & rollout.is_own[tick]
        after[own], above[own], is_known[own], reward[own] = value[tick], advantage[tick], True, 0.0
    weight[-1] = 0.0
    return Targets(advantage, advantage + value, weight)


@dataclass(frozen=True)
class Learner:
    """PPO with a clipped ratio.

    Source: Schulman et al., "Proximal policy optimization algorithms" (2017).

    Attributes:
        model: the policy, which may be wrapped to average gradients over ranks.
        ent_coef: the weight of the entropy in the loss, which changes with the step.
        draw: the generator from which minibatches are drawn.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    sampler: Sampler
    ent_coef: Anneal
    settings: TrainSettings
    draw: torch.Generator

    def improve(self, rollout: Rollout, targets: Targets) -> dict[str, Tensor]:
        """Improve the policy on a rollout. Return the means of the minibatches' numbers."""
        found: list[dict[str, Tensor]] = []
        for rows in self._draw_minibatches(rollout):
            numbers = self._losses(rollout, targets, rows)
            self.optimizer.zero_grad()
            self.accelerator.backward(numbers["loss"])
            numbers["grad_norm"] = self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
            self.optimizer.step()
            found.append({name: number.detach() for name, number in numbers.items()})
        return {name: torch.stack([each[name] for each in found]).mean() for name in found[0]}

    def _draw_minibatches(self, rollout: Rollout) -> Iterator[Tensor]:
        """Yield the rows of each minibatch. A row stays whole, because the memory goes along it."""
        for _ in range(self.settings.passes):
            order = torch.randperm(rollout.seat.shape[1], generator=self.draw).to(rollout.seat.device)
            yield from order.chunk(self.settings.minibatches)

    def _losses(self, rollout: Rollout, targets: Targets, rows: Tensor) -> dict[str, Tensor]:
        """Return the loss of a minibatch and its parts, and how far the policy has moved."""
        seen, seat, ended = rollout.seen[:, rows], rollout.seat[:, rows], rollout.ended[:, rows]
        logits, value = self.model(seen, seat, ended, rollout.memory[rows])
        weight = targets.weight[:, rows]
        total = weight.sum().clamp_min(1.0)

        def mean(numbers: Tensor) -> Tensor:
            return (numbers * weight).sum() / total

        chances = self.sampler.chances(logits, rollout.legal[:, rows])
        # one_hot is deterministic on a GPU, too; gather isn't
        taken = F.one_hot(rollout.action[:, rows], chances.shape[-1])
        moved = (chances.clamp_min(TINY).log() * taken).sum(-1) - rollout.chance[:, rows]
        advantage = targets.advantage[:, rows]
        advantage = advantage - mean(advantage)
        advantage = advantage / mean(advantage.square()).sqrt().clamp_min(1e-8)
        ratio, clip = moved.exp(), self.settings.clip
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        policy_loss, value_loss = -mean(gain), mean((value - targets.returns[:, rows]).square())
        spread = mean(entropy(chances))
        return {
            "loss": policy_loss + self.settings.value_coef * value_loss - self.ent_coef.value * spread,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": spread,
            "kl": mean(ratio - 1 - moved),
        }

"""The recurrent policy with a value, and the distribution from which its actions are sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.cards.games import SEATS
from holdfast import Anneal

# The smallest chance whose logarithm is taken. Chances of illegal actions are 0.
TINY = 1e-12


@dataclass(frozen=True)
class Sampler:
    """The sampling of actions from logits. Its temperature and smoothing are functions of the step."""

    temperature: Anneal
    smoothing: Anneal

    def chances(self, logits: Tensor, legal: Tensor) -> Tensor:
        """Return the chance of each action, (..., actions): the policy's, mixed with equal chances by the smoothing."""
        share = self.smoothing.value
        return (1 - share) * self.policy(logits, legal) + share * even(legal)

    def policy(self, logits: Tensor, legal: Tensor) -> Tensor:
        """Return the chances without smoothing, which would hide a collapsed policy."""
        return (logits / self.temperature.value).masked_fill(~legal, -torch.inf).softmax(-1)


def even(legal: Tensor) -> Tensor:
    """Return equal chances of all legal actions."""
    return legal / legal.sum(-1, keepdim=True)


def entropy(chances: Tensor) -> Tensor:
    """Return the entropy over the last dimension, in nats."""
    return -(chances * chances.clamp_min(TINY).log()).sum(-1)


def reset_rows(state: Tensor, rows: Tensor) -> Tensor:
    """Return a recurrent state with zeros in the rows of finished games.

    Args:
        state: of shape (rows, ...).
        rows: ids of rows in any order; repeated ids are allowed, and ids out of range are ignored.
    """
    inside = rows[(rows >= 0) & (rows < len(state))]
    return state.index_fill(0, inside, 0.0)


class Policy(nn.Module):
    """An LSTM with two heads: the logits of all actions, and the value of the game for the player to move.

    Each game has a memory: the hidden and the cell state of both seats, of shape (2 seats, 2, hidden). A player's
    memory changes only when the player acts, so that it never contains the opponent's hand.
    """

    def __init__(self, inputs: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.encode = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.cell = nn.LSTMCell(hidden, hidden)
        self.act = nn.Linear(hidden, actions)
        self.judge = nn.Linear(hidden, 1)
        # Near-zero weights make the first policy almost uniform, so that it explores most.
        nn.init.orthogonal_(self.act.weight, 0.01)
        nn.init.zeros_(self.act.bias)

    def begin(self, games: int) -> Tensor:
        """Return the recurrent memories at the beginning of ``games`` games: zeros."""
        return self.act.weight.new_zeros(games, SEATS, 2, self.hidden)

    def step(self, seen: Tensor, seat: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (games, actions), values (games,) and the memories after one action in each game.

        Args:
            seen, seat: see `games.View`.
            memory: of shape (games, 2, 2, hidden).
        """
        hidden, memory = self._remember(self.encode(seen), seat, memory)
        return self.act(hidden), self.judge(hidden).squeeze(-1), memory

    def _remember(self, encoded: Tensor, seat: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new hidden states (games, hidden) of the players to move, and the updated memories."""
        moves = (seat[:, None] == torch.arange(SEATS, device=seat.device))[:, :, None, None]
        own = memory[:, 0].where(moves[:, 0], memory[:, 1])
        hidden, cell = self.cell(encoded, (own[:, 0], own[:, 1]))
        return hidden, torch.stack([hidden, cell], 1)[:, None].where(moves, memory)

    def forward(self, seen: Tensor, seat: Tensor, ended: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (ticks, games, actions) and values (ticks, games) of a rollout.

        Args:
            seen, seat: of shape (ticks, games, ...).
            ended: whether a game ended with the tick, so that a new one follows; of shape (ticks, games).
            memory: the memories before the first tick.
        """
        encoded, states = self.encode(seen), []
        for tick in range(len(seen)):
            hidden, memory = self._remember(encoded[tick], seat[tick], memory)
            memory = reset_rows(memory, ended[tick].nonzero().squeeze(1))
            states.append(hidden)
        hidden = torch.stack(states)
        return self.act(hidden), self.judge(hidden).squeeze(-1)

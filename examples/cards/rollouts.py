"""Rollouts: games of the policy against itself and its league. A game continues in the next step."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.cards.games import SEATS, Games, View
from examples.cards.league import SELF, League
from examples.cards.policy import Policy, Sampler, entropy, reset_rows


@dataclass(frozen=True)
class Rollout:
    """Some ticks of all games: in each tick one action in each game. Shapes are (ticks, rows, ...).

    Attributes:
        seen, legal, seat: see `games.View`.
        action: the action that was taken.
        chance: the logarithm of the probability with which the action was sampled.
        value: the value that the policy expected.
        is_own: whether the policy acted, and not an opponent of the league.
        ended: whether the game ended with the action.
        won: what each seat won in the game that ended, otherwise 0; (ticks, rows, 2).
        memory: the games' memories before the first tick; (rows, 2, 2, hidden).
        next_seat, next_value: the seat that moves after the last tick, and the value that the policy expects; (rows,).
        entropy: the mean entropy of the policy's own choices, without smoothing.
        noop_rate: the fraction of no-ops among the policy's own choices that include one.
    """

    seen: Tensor
    legal: Tensor
    seat: Tensor
    action: Tensor
    chance: Tensor
    value: Tensor
    is_own: Tensor
    ended: Tensor
    won: Tensor
    memory: Tensor
    next_seat: Tensor
    next_value: Tensor
    entropy: float
    noop_rate: float


@dataclass
class Choices:
    """Sums over the policy's choices: decisions with more than one legal action."""

    noops: Tensor
    entropy: float = 0.0
    count: int = 0
    noop_count: float = 0.0
    with_noop: int = 0

    def add(self, chances: Tensor, legal: Tensor, action: Tensor, is_counted: Tensor) -> None:
        """Add one decision in each row of ``is_counted``.

        Args:
            chances: the policy's chances, without smoothing.
        """
        noops = self.noops.to(legal.device)
        is_choice = is_counted & (legal.sum(-1) > 1)
        has_noop = is_choice & (legal & noops).any(-1)
        self.entropy += float(entropy(chances)[is_choice].sum())
        self.count += int(is_choice.sum())
        self.noop_count += int(noops[action][has_noop].sum())
        self.with_noop += int(has_noop.sum())

    @property
    def mean_entropy(self) -> float:
        return self.entropy / self.count if self.count else math.nan

    @property
    def noop_rate(self) -> float:
        """Return the fraction of no-ops among the choices that include one; 0 for a game without no-ops."""
        return self.noop_count / self.with_noop if self.with_noop else 0.0


class Rollouts:
    """The games of one rank, with all that the next rollout depends on.

    Attributes:
        memory: the memories of all games; (rows, 2, 2, hidden).
        opponent: each game's opponent, as a slot of the league, or `SELF`; (rows,).
        own_seat: the policy's seat in games against the league; (rows,).
    """

    def __init__(
        self, games: Games, rows: int, policy: Policy, league: League, sampler: Sampler, draw: torch.Generator
    ) -> None:
        """
        Args:
            draw: the generator from which actions and opponents are drawn.
        """
        self._games, self._policy, self._league, self._sampler, self._draw = games, policy, league, sampler, draw
        self._rows = range(rows)
        self.memory = policy.begin(rows)
        self.opponent = torch.full((rows,), SELF)
        self.own_seat = torch.zeros(rows, dtype=torch.int64)

    @torch.no_grad()
    def collect(self, ticks: int, noops: Tensor) -> Rollout:
        """Play ``ticks`` actions in each game, and return the rollout. A new game follows each game that ends.

        Args:
            noops: for each action, whether it does nothing; (actions,).
        """
        memory, choices = self.memory, Choices(noops)
        done = [self._tick(choices) for _ in range(ticks)]
        view = self._view()
        _, next_value, _ = self._policy.step(view.seen, view.seat, self.memory)
        return Rollout(
            **{name: torch.stack([each[name] for each in done]) for name in done[0]},
            memory=memory,
            next_seat=view.seat,
            next_value=next_value,
            entropy=choices.mean_entropy,
            noop_rate=choices.noop_rate,
        )

    def begin(self, rows: Tensor) -> None:
        """Begin new games in these rows, against newly drawn opponents."""
        self._games.begin(rows.tolist())
        self.memory = reset_rows(self.memory, rows.to(self.memory.device))
        self.opponent[rows] = self._league.draw(len(rows), self._draw)
        self.own_seat[rows] = torch.randint(SEATS, (len(rows),), generator=self._draw)

    def leave(self, slots: Tensor) -> None:
        """Begin new games wherever the opponent has left the league."""
        self.begin(torch.isin(self.opponent, slots).nonzero().squeeze(1))

    def _view(self) -> View:
        return self._games.view(self._rows).to(self.memory.device)

    def _tick(self, choices: Choices) -> dict[str, Tensor]:
        view = self._view()
        is_own = ((self.opponent == SELF) | (view.seat.cpu() == self.own_seat)).to(view.seat.device)
        logits, value = self._think(view, is_own)
        chances = self._sampler.chances(logits, view.legal)
        action = torch.multinomial(chances.cpu(), 1, generator=self._draw).to(chances.device)
        choices.add(self._sampler.policy(logits, view.legal), view.legal, action[:, 0], is_own)
        ended, won = self._play(action[:, 0].tolist())
        return {
            "seen": view.seen,
            "legal": view.legal,
            "seat": view.seat,
            "action": action[:, 0],
            "chance": chances.gather(1, action)[:, 0].log(),
            "value": value,
            "is_own": is_own,
            "ended": ended.to(view.seat.device),
            "won": won.to(view.seat.device),
        }

    def _think(self, view: View, is_own: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values for the players to move, and update the memories."""
        slots = self.opponent.to(is_own.device).masked_fill(is_own, SELF)
        logits = view.seen.new_empty(view.legal.shape)
        value, memory = logits.new_empty(len(logits)), self.memory.clone()
        for slot in sorted({*slots.tolist()}):
            player = self._policy if slot == SELF else self._league.player(slot)
            rows = (slots == slot).nonzero().squeeze(1)
            logits[rows], value[rows], memory[rows] = player.step(view.seen[rows], view.seat[rows], self.memory[rows])
        self.memory = memory
        return logits, value

    def _play(self, actions: list[int]) -> tuple[Tensor, Tensor]:
        """Play an action in each game. Return the rows in which a game ended, and each seat's return."""
        ended, won = torch.zeros(len(self._rows), dtype=torch.bool), torch.zeros(len(self._rows), SEATS)
        rows = torch.tensor(self._games.play(self._rows, actions), dtype=torch.int64)
        ended[rows] = True
        won[rows] = self._games.returns(rows.tolist())
        self._league.count(self.opponent[rows], won[rows, self.own_seat[rows]])
        self.begin(rows)
        return ended, won

    def state_dict(self) -> dict[str, Any]:
        return {
            "games": self._games.state_dict(),
            "memory": self.memory,
            "opponent": self.opponent,
            "own_seat": self.own_seat,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._games.load_state_dict(saved["games"])
        self.memory = saved["memory"].to(self.memory.device)
        self.opponent, self.own_seat = saved["opponent"], saved["own_seat"]

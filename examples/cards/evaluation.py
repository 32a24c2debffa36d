"""The evaluation of a policy: seeded games from their beginning, and exact NashConv."""

import math
from dataclasses import dataclass
from typing import Any

import pyspiel
import torch
from torch import Tensor

from examples.cards.games import SEATS, Games, view
from examples.cards.policy import Policy, Sampler, even
from examples.cards.rollouts import Choices


@dataclass(frozen=True)
class Played:
    """The result of some games from their beginning.

    Attributes:
        won: the return of each seat; (games, 2).
        lengths: how many actions each game took.
        choices: the policy's choices.
    """

    won: Tensor
    lengths: list[int]
    choices: Choices

    def describe(self) -> dict[str, float]:
        """Return the policy's results. It has seat 0 in the first game, then seat 1, and so on."""
        own = self.won[torch.arange(len(self.won)), torch.arange(len(self.won)) % SEATS]
        return {
            "win_rate": float((own > 0).double().mean()),
            "draw_rate": float((own == 0).double().mean()),
            "mean_return": float(own.double().mean()),
            "mean_length": sum(self.lengths) / len(self.lengths),
            "noop_rate": self.choices.noop_rate,
        }


@torch.no_grad()
def play(
    game: Any, policy: Policy, sampler: Sampler, noops: Tensor, count: int, seed: int, *, is_alone: bool
) -> Played:
    """Play games to their ends. The same policy and seed play the same games.

    Args:
        noops: which actions do nothing.
        is_alone: whether the policy plays both seats, and without smoothing. If not, an opponent that chooses each
            legal action with the same chance plays one of the seats.
    """
    games, draw = Games(game, count, seed), torch.Generator().manual_seed(seed)
    memory, choices = policy.begin(count), Choices(noops)
    own_seat = torch.arange(count) % SEATS
    live = torch.arange(count)
    while len(live):
        seen = games.view(live.tolist()).to(memory.device)
        logits, _, memory[live] = policy.step(seen.seen, seen.seat, memory[live])
        chances = sampler.policy(logits, seen.legal)
        is_own = torch.full_like(live, is_alone, dtype=torch.bool) | (seen.seat.cpu() == own_seat[live])
        is_own = is_own.to(memory.device)
        sampled = chances if is_alone else sampler.chances(logits, seen.legal)
        sampled = torch.where(is_own[:, None], sampled, even(seen.legal))
        action = torch.multinomial(sampled.cpu(), 1, generator=draw)[:, 0]
        choices.add(chances, seen.legal, action.to(memory.device), is_own)
        ended = games.play(live.tolist(), action.tolist())
        live = live[~torch.isin(live, torch.tensor(ended, dtype=torch.int64))]
    everyone = range(count)
    return Played(games.returns(everyone), [games.length(row) for row in everyone], choices)


@dataclass(frozen=True)
class Level:
    """Information states in which a player is to move for the n-th time.

    Attributes:
        names: OpenSpiel's names of the information states.
        states: for each information state, a state of the game that belongs to it.
        before: for each information state, the number of the same player's previous one, counted over all levels; -1 if
            there is none.
    """

    names: list[str]
    states: list[Any]
    before: list[int]


class Tree:
    """All information states of a small game, for the exact NashConv of a recurrent policy.

    In a game of perfect recall, a player's information state determines all that the player has seen before, and so
    the memory of the player's LSTM.
    """

    def __init__(self, game: Any, levels: list[Level]) -> None:
        self._game, self._levels = game, levels

    def nash_conv(self, policy: Policy, sampler: Sampler) -> float:
        """Return how much both players together could gain by a best response to the policy; 0 at an equilibrium."""
        return float(pyspiel.nash_conv(self._game, pyspiel.TabularPolicy(self.chances(policy, sampler))))

    @torch.no_grad()
    def chances(self, policy: Policy, sampler: Sampler) -> dict[str, list[tuple[int, float]]]:
        """Return the chance of each legal action in each information state."""
        found: dict[str, list[tuple[int, float]]] = {}
        memories = policy.begin(1)  # the last memory belongs to a player who has not moved yet
        for level in self._levels:
            seen = view(level.states).to(memories.device)
            logits, _, memory = policy.step(seen.seen, seen.seat, memories[level.before])
            memories = torch.cat([memories[:-1], memory, memories[-1:]])
            for name, each in zip(level.names, sampler.chances(logits, seen.legal).double().tolist(), strict=True):
                total = math.fsum(each)
                found[name] = [(action, chance / total) for action, chance in enumerate(each) if chance > 0]
        return found


def find_tree(game: Any, most: int) -> Tree | None:
    """Return a game's tree; None if it has more than ``most`` histories, or if the game names no information states."""
    if not game.get_type().provides_information_state_string:
        return None
    # For each information state: its depth, a state in it, and the player's information state before.
    known: dict[str, tuple[int, Any, str]] = {}
    waiting: list[tuple[Any, tuple[str, ...]]] = [(game.new_initial_state(), ("",) * SEATS)]
    histories = 0
    while waiting:
        state, last = waiting.pop()
        histories += 1
        if histories > most:
            return None
        if state.is_terminal():
            continue
        if not state.is_chance_node():
            seat, name = state.current_player(), state.information_state_string()
            before = last[seat]
            known.setdefault(name, (known[before][0] + 1 if before else 0, state, before))
            last = tuple(name if each == seat else last[each] for each in range(SEATS))
        waiting += [(state.child(action), last) for action in state.legal_actions()]
    return Tree(game, _sort(known))


def _sort(known: dict[str, tuple[int, Any, str]]) -> list[Level]:
    """Return the information states by their depths, and number them in this order."""
    levels: list[Level] = []
    numbers: dict[str, int] = {"": -1}
    for name, (depth, state, before) in sorted(known.items(), key=lambda item: item[1][0]):
        if depth == len(levels):
            levels.append(Level([], [], []))
        numbers[name] = len(numbers) - 1
        levels[depth].names.append(name)
        levels[depth].states.append(state)
        levels[depth].before.append(numbers[before])
    return levels

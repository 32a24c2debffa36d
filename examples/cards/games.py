"""OpenSpiel's games: the choice of a game by name, and many games played at a time."""

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyspiel
import torch
from torch import Tensor

from holdfast.errors import RecipeError

SEATS = 2
USUAL_NOOP = "Pass"


def load_game(name: str) -> Any:
    """Return a game by the name that OpenSpiel gives it, with parameters in parentheses if it takes any.

    Raises:
        RecipeError: there is no such game, or the recipe can't play it.
    """
    known = sorted(game.short_name for game in pyspiel.registered_games())
    short = name.partition("(")[0]
    if short not in known:
        raise RecipeError(f"settings.game = {name!r}: OpenSpiel has no game {short!r}", hint=_hint(short, known))
    try:
        game = pyspiel.load_game(name)
    except pyspiel.SpielError as error:
        raise RecipeError(f"settings.game = {name!r}: {str(error).splitlines()[0]}") from None
    kind = game.get_type()
    if (players := game.num_players()) != SEATS:
        raise RecipeError(
            f"settings.game = {name!r}: it has {players} players, expected {SEATS}",
            hint=f'game = "{short}(players=2)"' if "players" in kind.parameter_specification else "",
        )
    if kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
        raise RecipeError(
            f"settings.game = {name!r}: its players act at the same time, expected one after the other",
            hint=f'game = "turn_based_simultaneous_game(game={name if "(" in name else f"{name}()"})"',
        )
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise RecipeError(
            f"settings.game = {name!r}: its chance events have no explicit probabilities, so a game can't be restored",
            hint="choose a game whose chance mode is deterministic or explicit stochastic",
        )
    if not (kind.provides_information_state_tensor or kind.provides_observation_tensor):
        raise RecipeError(
            f"settings.game = {name!r}: it provides neither an information state tensor nor an observation tensor",
            hint="choose a game that provides one of them",
        )
    return game


def find_noops(game: Any, names: Sequence[str] | None) -> Tensor:
    """Return which actions do nothing, as booleans of shape (actions,).

    Args:
        names: the names of these actions, as the game has them; None for "Pass" if the game has it.

    Raises:
        RecipeError: the game has no action of a given name.
    """
    found = name_actions(game)
    for name in names or ():
        if name not in found:
            raise RecipeError(f"settings.noop_actions: the game has no action {name!r}", hint=_hint(name, found))
    chosen = {USUAL_NOOP} if names is None else {*names}
    return torch.tensor([name in chosen for name in found])


def _hint(name: str, known: Sequence[str]) -> str:
    return f"the nearest: {', '.join(difflib.get_close_matches(name, known, 3, 0.0))}"


def name_actions(game: Any) -> list[str]:
    """Return the names of all actions, by number; empty for an action that has no name where a game begins."""
    state = game.new_initial_state()
    while state.is_chance_node():
        state.apply_action(state.legal_actions()[0])

    def name(action: int) -> str:
        try:
            return str(state.action_to_string(state.current_player(), action))
        except pyspiel.SpielError:
            return ""

    return [name(action) for action in range(game.num_distinct_actions())]


@dataclass(frozen=True)
class View:
    """The observations of the players to move, one game each.

    Attributes:
        seen: float32 of shape (games, `count_inputs`).
        legal: booleans of shape (games, actions).
        seat: the player's number, int64 of shape (games,).
    """

    seen: Tensor
    legal: Tensor
    seat: Tensor

    def to(self, device: torch.device) -> "View":
        return View(self.seen.to(device), self.legal.to(device), self.seat.to(device))


def count_inputs(game: Any) -> int:
    """Return how many numbers a player sees."""
    sees_all = game.get_type().provides_information_state_tensor
    return int(game.information_state_tensor_size() if sees_all else game.observation_tensor_size())


def view(states: Sequence[Any]) -> View:
    """Return the observations of the players to move in these states.

    An observation is the information state, which has everything that the player has seen, if the game offers it.
    If not, it is the present observation, and the LSTM remembers the earlier ones.
    """
    seats = [state.current_player() for state in states]
    sees_all = bool(states) and states[0].get_game().get_type().provides_information_state_tensor
    look = "information_state_tensor" if sees_all else "observation_tensor"
    seen = [getattr(state, look)(seat) for state, seat in zip(states, seats, strict=True)]
    legal = [state.legal_actions_mask(seat) for state, seat in zip(states, seats, strict=True)]
    return View(
        torch.from_numpy(np.array(seen, dtype=np.float32)),
        torch.from_numpy(np.array(legal, dtype=np.bool_)),
        torch.tensor(seats),
    )


class Games:
    """Games that are played at a time, one in each row.

    The state consists of each game's history, from which OpenSpiel restores the game, and of the generator that deals.
    """

    def __init__(self, game: Any, rows: int, seed: str | int) -> None:
        self._game = game
        self._deals = random.Random(seed)
        self._states: list[Any] = [None] * rows
        self.begin(range(rows))

    def begin(self, rows: Sequence[int]) -> None:
        """Begin a new game in each of these rows."""
        for row in rows:
            self._states[row] = self._deal(self._game.new_initial_state())

    def view(self, rows: Sequence[int]) -> View:
        """Return the observations of the players to move in these rows."""
        return view([self._states[row] for row in rows])

    def play(self, rows: Sequence[int], actions: Sequence[int]) -> list[int]:
        """Apply an action to the game in each of these rows. Return the rows whose game has ended."""
        for row, action in zip(rows, actions, strict=True):
            state = self._states[row]
            state.apply_action(action)
            self._deal(state)
        return [row for row in rows if self._states[row].is_terminal()]

    def returns(self, rows: Sequence[int]) -> Tensor:
        """Return each seat's return in the ended games of these rows; float32 of shape (rows, 2)."""
        won = [self._states[row].returns() for row in rows]
        return torch.tensor(won, dtype=torch.float32).reshape(-1, SEATS)

    def length(self, row: int) -> int:
        """Return how many actions the players have taken in a row's game."""
        return sum(action.player >= 0 for action in self._states[row].full_history())

    def _deal(self, state: Any) -> Any:
        """Sample the chance nodes until a player is to move."""
        while state.is_chance_node():
            state.apply_action(_sample(state.chance_outcomes(), self._deals.random()))
        return state

    def state_dict(self) -> dict[str, Any]:
        return {"deals": self._deals.getstate(), "histories": [state.history() for state in self._states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._deals.setstate(saved["deals"])
        for row, history in enumerate(saved["histories"]):
            self._states[row] = self._game.new_initial_state()
            for action in history:
                self._states[row].apply_action(action)


def _sample(outcomes: Sequence[tuple[int, float]], share: float) -> int:
    """Return the outcome at a point, from 0 to 1, of the cumulative chances."""
    for action, chance in outcomes:
        share -= chance
        if share < 0:
            return action
    return outcomes[-1][0]  # chances may add up to a bit less than 1

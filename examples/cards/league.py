"""The league: past policies of the run as opponents.

A snapshot of the policy joins the league at fixed steps. The league keeps the weights of its members in the run's own
state, and doesn't read them from the run's older checkpoints, for three reasons. The steps with a checkpoint depend
on the lengths of chunks and on deaths, so a resumed run would meet different opponents. A checkpoint is still being
written while the next steps train. And retention deletes checkpoints. So every opponent comes out of a checkpoint that
was verified against its commit; in addition, each member is compared with the SHA-256 that it had when it joined.

All members together are one module, so that a checkpoint has them once, and not once for each rank. Parts of a
checkpoint in which no member has changed are copied from the checkpoint before.
"""

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from examples.cards.policy import Policy
from examples.cards.settings import LeagueSettings

# The opponent of a game in which the policy plays both seats.
SELF = -1
# The middle bucket takes every third snapshot that leaves the recent bucket; the old bucket takes every ninth.
MIDDLE_EVERY, OLD_EVERY = 3, 9
# The quantile of the normal distribution for an interval with 95 % confidence.
Z = 1.96


@dataclass(frozen=True)
class Member:
    """A snapshot in the league.

    Attributes:
        number: the snapshot's number in the run, from 1.
        step: the steps that the policy was trained.
        slot: the snapshot's place among the league's modules.
        sha256: the hash of the snapshot's weights.
    """

    number: int
    step: int
    slot: int
    sha256: str


def choose_buckets(numbers: Sequence[int], settings: LeagueSettings) -> dict[str, list[int]]:
    """Return which snapshots stay in which bucket, each newest first.

    Args:
        numbers: the numbers of the snapshots that the league has.
    """
    ordered = sorted(numbers, reverse=True)
    recent, rest = ordered[: settings.recent], ordered[settings.recent :]
    thirds = [number for number in rest if number % MIDDLE_EVERY == 0]
    middle, rest = thirds[: settings.middle], thirds[settings.middle :]
    old = [number for number in rest if number % OLD_EVERY == 0][: settings.old]
    return {"recent": recent, "middle": middle, "old": old}


def wilson_lower(wins: float, games: float) -> float:
    """Return the lower end of the 95 % confidence interval of a win rate.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    if not games:
        return 0.0
    share, z2 = wins / games, Z * Z
    middle = share + z2 / (2 * games)
    width = Z * math.sqrt(share * (1 - share) / games + z2 / (4 * games * games))
    return (middle - width) / (1 + z2 / games)


class League:
    """The members, the champion among them, and the policy's games against the champion since the last snapshot.

    Attributes:
        players: a module for each slot; their weights count only if a member has the slot.
        members: the members, oldest first.
        champion: the champion's number; 0 for none.
    """

    def __init__(self, settings: LeagueSettings, policy: Policy, accelerator: Accelerator) -> None:
        self._settings, self._accelerator = settings, accelerator
        slots = settings.recent + settings.middle + settings.old + 1  # one for the champion
        self.players = nn.ModuleList(copy.deepcopy(policy) for _ in range(slots)).requires_grad_(False)
        self.members: list[Member] = []
        self.champion = 0
        self._is_active = False
        self._snapshots = 0
        self._wins = self._games = 0.0

    @property
    def is_active(self) -> bool:
        """Return whether members are drawn as opponents."""
        return self._is_active and bool(self.members)

    def player(self, slot: int) -> Policy:
        """Return the policy in a slot."""
        player = self.players[slot]
        assert isinstance(player, Policy)
        return player

    def begin_step(self, step: int) -> None:
        """Store the number of the step that begins, from 0."""
        self._is_active = step >= self._settings.activate_after_steps

    def draw(self, games: int, draw: torch.Generator) -> Tensor:
        """Return an opponent for each new game: `SELF`, or the slot of a member. Each member is equally likely."""
        is_against = torch.rand(games, generator=draw) < (self._settings.share if self.is_active else 0.0)
        slots = torch.tensor([member.slot for member in self.members] or [SELF])
        chosen = slots[torch.randint(len(slots), (games,), generator=draw)]
        return chosen.where(is_against, torch.tensor(SELF))

    def count(self, opponent: Tensor, won: Tensor) -> None:
        """Count finished games of this rank against the champion; a draw counts as half a win.

        Args:
            opponent: the slot of each game's opponent, or `SELF`; (games,).
            won: the policy's return in each game: above 0 for a win, 0 for a draw, below 0 for a loss; (games,).
        """
        is_counted = opponent == self._find(self.champion).slot if self.champion else torch.zeros_like(opponent).bool()
        self._games += float(is_counted.sum())
        self._wins += float((won[is_counted] > 0).sum() + 0.5 * (won[is_counted] == 0).sum())

    def add_snapshot(self, step: int, policy: Policy) -> Tensor:
        """Add the policy, and promote it if it has beaten the champion. Return the slots of members that have left.

        All ranks call it together.

        Args:
            step: the steps that the policy was trained.
        """
        self._snapshots += 1
        counted = torch.tensor([self._wins, self._games], device=self._accelerator.device)
        wins, games = self._accelerator.reduce(counted, "sum").tolist()
        if not self.champion or wilson_lower(wins, games) > self._settings.promote_above:
            self.champion = self._snapshots
        self._wins = self._games = 0.0
        buckets = choose_buckets([self._snapshots, *(member.number for member in self.members)], self._settings)
        kept = {self.champion}.union(*buckets.values())
        gone = [member.slot for member in self.members if member.number not in kept]
        self.members = [member for member in self.members if member.number in kept]
        taken = {member.slot for member in self.members}
        slot = next(slot for slot in range(len(self.players)) if slot not in taken)
        self.players[slot].load_state_dict(policy.state_dict())
        self.members.append(Member(self._snapshots, step, slot, self._hash(slot)))
        return torch.tensor(gone, dtype=torch.int64)

    def describe(self) -> dict[str, float]:
        """Return numbers to log: how many members play, and the champion's step (0 without a champion)."""
        return {
            "league/members": float(len(self.members) if self.is_active else 0),
            "league/champion_step": float(self._find(self.champion).step if self.champion else 0),
        }

    def _find(self, number: int) -> Member:
        return next(member for member in self.members if member.number == number)

    def _hash(self, slot: int) -> str:
        """Return the SHA-256 of a slot's weights, in the order of the module."""
        digest = hashlib.sha256()
        for weight in self.players[slot].state_dict().values():
            digest.update(weight.cpu().numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {
            "members": [asdict(member) for member in self.members],
            "champion": self.champion,
            "snapshots": self._snapshots,
            "wins": self._wins,
            "games": self._games,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the league's records. Call it when the players' weights are restored.

        Raises:
            ValueError: a member's weights differ from those with which it joined the league.
        """
        self.members = [Member(**member) for member in saved["members"]]
        for member in self.members:
            if (found := self._hash(member.slot)) != member.sha256:
                joined = member.sha256[:12]
                raise ValueError(f"the opponent of step {member.step} had the hash {joined}, now it has {found[:12]}")
        self.champion, self._snapshots = saved["champion"], saved["snapshots"]
        self._wins, self._games = saved["wins"], saved["games"]

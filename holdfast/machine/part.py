"""The part of each step that one rank trained. A single process trains this part again, to check the rank."""

import json
import os
from dataclasses import asdict, dataclass

# The environment variable with the part that a process trains; empty in every ordinary rank.
PART_VARIABLE = "HOLDFAST_PART"


@dataclass(frozen=True)
class RankPart:
    """The part of a run's steps that one rank trained.

    Attributes:
        rank: the rank's number.
        ranks: the number of ranks of the run.
        shares: the numbers of the virtual ranks that the rank trained, in the rank's order; empty without virtual
            ranks.
    """

    rank: int
    ranks: int
    shares: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return the part as the value of `PART_VARIABLE`."""
        return json.dumps(asdict(self))


def read_part() -> RankPart | None:
    """Return the part that this process trains; None if this process is an ordinary rank."""
    text = os.environ.get(PART_VARIABLE)
    if not text:
        return None
    found = json.loads(text)
    return RankPart(found["rank"], found["ranks"], tuple(found["shares"]))

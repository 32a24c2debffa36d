"""The part of one rank, which a process trains alone in place of that rank, to judge it."""

import json
import os
from dataclasses import asdict, dataclass

# The variable of a process that trains a part; empty in every other rank.
PART_VARIABLE = "HOLDFAST_PART"


@dataclass(frozen=True)
class RankPart:
    """The part of one rank of a run.

    Attributes:
        rank: the rank's number.
        ranks: the number of ranks of the run.
        shares: the shares that the rank trained, in its order; empty without virtual ranks.
    """

    rank: int
    ranks: int
    shares: tuple[int, ...] = ()

    def to_text(self) -> str:
        """Return the part as the value of `PART_VARIABLE`."""
        return json.dumps(asdict(self))


def read_part() -> RankPart | None:
    """Return the part that this process trains; None if it trains as a rank of its own."""
    text = os.environ.get(PART_VARIABLE)
    if not text:
        return None
    found = json.loads(text)
    return RankPart(found["rank"], found["ranks"], tuple(found["shares"]))

"""Three ranks that agree on when to save and when to stop, without training."""

import json
import os
from pathlib import Path

from torch import distributed

from holdfast.rank.agreement import SLOW_STEP_S, Agreement, Wish
from tests.support.forked import launch

RANKS = 3
CALLS = 6


def agree(folder: str, is_slow: bool) -> int:
    """Let ranks 0 and 1 wish for a save in calls 0 and 2, and rank 2 for a stop in call 4; write each rank's answers.

    Args:
        is_slow: whether one rank's steps are slow.
    """

    def main() -> int:
        distributed.init_process_group("gloo")
        agreement, rank = Agreement(), int(os.environ["RANK"])
        wishes = {(0, 0): Wish.SAVE, (1, 2): Wish.SAVE, (2, 4): Wish.STOP}
        step_s = 2 * SLOW_STEP_S if is_slow and rank == 1 else 0.0
        answers = [agreement.exchange(wishes.get((rank, call), Wish.NOTHING), step_s) for call in range(CALLS)]
        Path(folder, str(rank)).write_text(json.dumps(answers))
        distributed.barrier()
        return 0

    return launch(main, RANKS)

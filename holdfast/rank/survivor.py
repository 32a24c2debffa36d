"""Saving after the loss of a rank: one of the surviving ranks saves the last completed step before all of them end.

The ranks can't communicate any more, so their numbers decide which rank saves: a rank waits for all lower ranks that
are alive and may still save. The next attempt finds the checkpoint on the store and adopts it.
"""

import os
import sys
import time
import traceback
from dataclasses import replace
from typing import NamedTuple

from holdfast.machine import heartbeats
from holdfast.machine.heartbeats import Phase, RankStanding
from holdfast.machine.processes import is_running
from holdfast.rank.lived_steps import open_lived
from holdfast.training import SaveRequest, Training, go_back, save_alone

LOOK_EVERY_S = 0.02
# The longest wait for a lower rank that hasn't noticed the loss, because it waits for a rank that is still alive. After
# this time a higher rank saves in place of the lower rank.
NOTICES_WITHIN_S = 3.0


class RankChunk(NamedTuple):
    """The chunk that a rank trains.

    Attributes:
        request: how to save the chunk, without the seconds that its steps took.
        began: when the first step that isn't saved yet began, on the clock of `time.monotonic`.
    """

    training: Training
    request: SaveRequest
    began: float


class Survivor:
    """Saves this rank's state after another rank was lost.

    Attributes:
        chunk: the chunk to save; None if no chunk is being trained, or if no rank could save it alone.
        is_shadow: whether the last save is durable, and only steps follow that are never saved.
        lived: the file of the steps that no commit contains yet; needed if this rank is lost, too.
    """

    def __init__(self) -> None:
        self.chunk: RankChunk | None = None
        self.is_shadow = False
        self.lived = open_lived()

    def begin_shadow(self) -> None:
        """Note that the last save is durable, and that no later step will be saved."""
        self.chunk, self.is_shadow = None, True

    def save(self) -> None:
        """Save the last completed step, if it is this rank's turn and its state is certainly complete.

        Raise no error.
        """
        if self.chunk is None:
            return
        training, request, began = self.chunk
        heartbeats.begin(Phase.SAVING)
        try:
            if not go_back(training):
                _say(f"step {training.progress.step} is not saved: the next step had begun to change the state")
            elif await_turn(int(os.environ["RANK"])):
                saved = save_alone(training, replace(request, train_s=time.monotonic() - began))
                heartbeats.stand(RankStanding.SAVED)
                if saved is not None:
                    _say(f"another rank is lost; step {saved.step} is saved in {saved.path}")
        except Exception:  # only print the error, because this rank ends with the error about the lost connection
            traceback.print_exc()
            _say(f"step {training.progress.step} is not saved")


def await_turn(rank: int) -> bool:
    """Wait until no lower rank can save the state any more. Return whether this rank has to save it.

    Return False if another rank has saved, or has refused to save. A rank refuses if its own error has ended it,
    because that error may mean that the last step must not be saved.
    """
    deadline = time.monotonic() + NOTICES_WITHIN_S
    while beats := heartbeats.read_beats():
        if any(beat.standing in (RankStanding.SAVED, RankStanding.REFUSED) for beat in beats.values()):
            return False
        earlier = [beat for number, beat in beats.items() if number < rank and is_running(beat.pid)]
        has_noticed = any(beat.standing is RankStanding.LEAVING for beat in earlier)
        if not earlier or (not has_noticed and time.monotonic() > deadline):
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _say(text: str) -> None:
    print(f"rank {os.environ['RANK']}: {text}", file=sys.stderr, flush=True)

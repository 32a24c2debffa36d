"""The steps of a proof: how many there are, which chunks they form, and in which steps the ranks are killed."""

import itertools
import random
from dataclasses import dataclass

# The fewest and the most steps of a proof, whatever the speed.
FEWEST_STEPS = 20
MOST_STEPS = 1000


@dataclass(frozen=True)
class Speed:
    """The measured times of a run, in seconds, from which the number of steps of a proof is computed.

    Attributes:
        spent_s: the time that the measurement took.
        start_s: the time from the start of ranks until they can train.
        step_s: the time of a step.
        epoch_s: the time of an epoch's end, such as its evaluation.
        own_epoch, own_steps: the number of steps of one epoch of the run, and of all its epochs.
    """

    spent_s: float
    start_s: float
    step_s: float
    epoch_s: float
    own_epoch: int
    own_steps: int

    def choose_steps(self, within_s: float, kills: int) -> int:
        """Return the number of steps that can be trained twice in the remaining time.

        The time of all starts of ranks is subtracted first: 1 start for the straight run (the run without kills), and
        ``kills + 1`` starts for the killed run.
        """
        left_s = within_s - self.spent_s - (kills + 2) * self.start_s

        def fits(steps: int) -> bool:
            ends = steps // min(self.own_epoch, steps // 2)
            return 2 * (steps * self.step_s + ends * self.epoch_s) <= left_s

        most = min(MOST_STEPS, self.own_steps)
        fewest = min(FEWEST_STEPS, max(most, 2))
        return next(filter(fits, range(most, fewest, -1)), fewest)


def choose_kills(steps: int, kills: int, epoch: int, choice: random.Random) -> tuple[list[int], list[int]]:
    """Return the steps in which to kill the ranks, and the steps at which a chunk ends.

    A chunk ends before each kill, and the run resumes from there. The first three chunk ends are chosen around the end
    of one epoch: one inside the next epoch, one inside this epoch, and one exactly at this epoch's end. Further chunk
    ends are chosen anywhere. So the run saves before and after the end of an epoch, and is killed after it. It crosses
    the end of the next epoch after a resume.

    Args:
        epoch: the number of steps of an epoch, at most half of ``steps``.
    """
    end = epoch * choice.randint(1, steps // epoch - 1)
    before, after = range(end - epoch + 1, end), range(end + 1, end + epoch)
    places = [choice.choice(each) for each in (after, before, [end]) if each]
    first = places[1] if len(places) > 2 else end
    others = [step for step in range(1, steps) if step not in places]
    places = places[:kills] + choice.sample(others, min(max(kills - len(places), 0), len(others)))
    places.sort()
    kill_steps = [choice.randint(place + 1, stop) for place, stop in itertools.pairwise([*places, steps])]
    return kill_steps, sorted({*places, steps} | ({first} if first < places[0] else set()))

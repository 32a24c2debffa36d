"""The steps of a proof: how many there are, which chunks they form, and in which steps the ranks are killed."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# The periods whose phases the resumes of a proof cover.
PERIODS = range(2, 9)
# A chunk end beside an epoch's end has at most this distance from it.
NEAR = 8
# The minimum and the maximum number of steps of a proof, for any speed.
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
    of one epoch: one in the first steps of the next epoch, one in the last steps of this epoch, and one exactly at this
    epoch's end. Further chunk ends are chosen anywhere. So the run saves before and after the end of an epoch, and is
    killed after it. It crosses the end of the next epoch after a resume.

    A resume at a multiple of k can't show the loss of state that changes at every k-th step. So each chunk end is
    chosen to add the most new phases: remainders of its step divided by each number in `PERIODS`.

    Args:
        epoch: the number of steps of an epoch, at most half of ``steps``.
    """
    end = epoch * choice.randint(1, steps // epoch - 1)
    before = range(max(end - NEAR, end - epoch) + 1, end)
    after = range(end + 1, min(end + NEAR, end + epoch))
    places: list[int] = []
    for each in (after, before, [end]):
        if each:
            places.append(_choose_phase(each, places, choice))
    first = places[1] if len(places) > 2 else end
    places = places[:kills]
    while len(places) < min(kills, steps - 1):
        places.append(_choose_phase([step for step in range(1, steps) if step not in places], places, choice))
    places.sort()
    kill_steps = [choice.randint(place + 1, stop) for place, stop in itertools.pairwise([*places, steps])]
    return kill_steps, sorted({*places, steps} | ({first} if first < places[0] else set()))


def find_phases(steps: Iterable[int]) -> set[tuple[int, int]]:
    """Return the phases that steps cover: each period of `PERIODS` with the remainder of a step."""
    return {(period, step % period) for step in steps for period in PERIODS}


def _choose_phase(steps: Sequence[int], chosen: Sequence[int], choice: random.Random) -> int:
    """Return a step that adds the most phases to those of the chosen steps. A phase of 0 counts as covered."""
    known = find_phases([0, *chosen])
    return max(choice.sample(steps, len(steps)), key=lambda step: len(find_phases([step]) - known))


def describe_phases(resumed_from: Sequence[int], epoch: int) -> str:
    """Return a phrase with the phases and the ends of epochs that resumes from these steps have covered.

    Args:
        epoch: the number of steps of an epoch.
    """
    missed = [str(period) for period in PERIODS if not any(step % period for step in resumed_from)]
    periods = f"every period of {PERIODS[0]} to {PERIODS[-1]} steps" + (
        f" except {', '.join(missed)}" if missed else ""
    )
    within = [step % epoch for step in resumed_from]
    places = {
        "an epoch's last steps": any(epoch - NEAR < each < epoch and each for each in within),
        "an epoch's end": 0 in within,
        "an epoch's first steps": any(0 < each < NEAR for each in within),
    }
    covered = ", ".join(name for name, is_covered in places.items() if is_covered) or "no epoch's end"
    steps = f"step{'s' if len(resumed_from) > 1 else ''} {', '.join(map(str, resumed_from))}"
    return f"{steps}: inside {periods}; {covered}"

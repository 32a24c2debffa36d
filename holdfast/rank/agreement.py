"""The agreement of all ranks on when to save and when to stop: a maximum over one number of each, between two steps."""

import datetime
import enum

import torch
from torch import distributed

# A step that takes this long waits for its own answer: a stop would otherwise cost one step more.
SLOW_STEP_S = 0.25
# A rank may evaluate alone for hours while the others wait. The attempt finds the ranks that hang.
WITHIN = datetime.timedelta(days=1)


class Wish(enum.IntEnum):
    """A rank's wish for the next pause; all ranks do what the greatest one says."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Agreement:
    """The agreement of several ranks, through a process group that training doesn't use.

    The answers to one exchange are taken at the next call, so that the exchange continues beside a step. After a slow
    step the ranks wait for the answers at once instead. All ranks call `exchange` equally often.
    """

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=WITHIN)
        self._sent: tuple[distributed.Work, torch.Tensor] | None = None

    @property
    def steps_late(self) -> int:
        """Return how many more steps are trained before a wish is fulfilled that is expressed now."""
        return 0 if self._sent is None else 1

    def exchange(self, wish: Wish, step_s: float) -> Wish:
        """Express this rank's wish. Return the greatest wish of all ranks: as of this call, or of the one before.

        Args:
            step_s: how long this rank's last step took, in seconds; 0 if it isn't known.
        """
        is_answered = self._sent is None
        if is_answered:
            self._send(wish, step_s)
        assert self._sent is not None
        work, numbers = self._sent
        work.wait()
        self._sent = None
        agreed, longest_s = numbers.tolist()
        if longest_s < SLOW_STEP_S:
            self._send(Wish.NOTHING if is_answered else wish, step_s)
        return Wish(int(agreed))

    def _send(self, wish: Wish, step_s: float) -> None:
        numbers = torch.tensor([float(wish), step_s], dtype=torch.float64)
        work = distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._sent = work, numbers

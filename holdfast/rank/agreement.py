"""The agreement of all ranks on when to save or stop: they exchange wishes, and follow the most urgent one."""

import enum

import torch
from torch import distributed

from holdfast.training.objects import PATIENCE

# After a step of at least this many seconds the ranks wait at once for the answers. If they read the answers after the
# next step, a stop would cost one more long step.
SLOW_STEP_S = 0.25


class Wish(enum.IntEnum):
    """A rank's wish for the next pause between steps. A higher number is more urgent; all ranks follow the highest."""

    NOTHING = 0
    SAVE = 1
    STOP = 2


class Agreement:
    """The agreement of several ranks, through a process group that training doesn't use.

    The answers of an exchange are read at the next call, so that the exchange overlaps with a step. Only after a slow
    step do the ranks wait for the answers at once. All ranks call `exchange` equally often.
    """

    def __init__(self) -> None:
        self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        self._sent: tuple[distributed.Work, torch.Tensor] | None = None

    @property
    def steps_late(self) -> int:
        """Return the number of steps that the ranks train before they follow a wish that this rank sends now."""
        return 0 if self._sent is None else 1

    def exchange(self, wish: Wish, step_s: float) -> Wish:
        """Send this rank's wish. Return the highest wish of all ranks.

        If the last step was slow, the wishes are those of this exchange; otherwise those of the exchange before.

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

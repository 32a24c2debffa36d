"""A module's own state, which other modules change."""

from torch import Tensor

CALLS = 0
harden = None


class State:
    """One object for a whole program."""

    steps = 0


STATE = State()


def scale(loss: Tensor) -> Tensor:
    return loss

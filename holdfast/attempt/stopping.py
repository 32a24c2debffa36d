"""How far an attempt is on its way to its end."""

import enum


class Stopping(enum.IntEnum):
    """Stages in their order; an attempt never goes back."""

    TRAINING = 0
    """It trains on."""
    TOLD = 1
    """Its ranks were told to save in the last moment that is safe, and to end."""
    STOPPED = 2
    """Nothing more is trained; what is saved is still to be committed."""

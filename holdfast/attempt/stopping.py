"""The stages of an attempt on its way to its end."""

import enum


class Stopping(enum.IntEnum):
    """Stages in their order. Only new ranks, which no notice was passed on to, lead back from TOLD to TRAINING."""

    TRAINING = 0
    """The ranks train on."""
    TOLD = 1
    """The ranks were told to save in the last moment that is safe, and to end."""
    STOPPED = 2
    """Nothing more is trained; what is saved is still committed."""

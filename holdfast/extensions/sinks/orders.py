"""The orders that an attempt sends to the process of a sink, a line of JSON each."""

from pydantic import BaseModel, ConfigDict

# The environment variable with the run's configuration.
CONFIG_VARIABLE = "HOLDFAST_CONFIG"


class SinkOrder(BaseModel):
    """An order to send the committed numbers.

    Attributes:
        is_end: whether this order is the last.
        is_complete: whether the run is complete.
        within_s: seconds after which the process ends, even if it has not sent everything.
    """

    model_config = ConfigDict(frozen=True)

    is_end: bool = False
    is_complete: bool = False
    within_s: float = 0.0


# The last order to use if the attempt has died without sending it: send the committed numbers, and end.
DEAD = SinkOrder(is_end=True, within_s=20.0)

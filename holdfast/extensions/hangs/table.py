"""The table ``[extensions.hangs]`` of the configuration."""

from typing import Annotated, Literal

from pydantic import Field

from holdfast.config import Section
from holdfast.config.fields import expected
from holdfast.config.limits import Seconds


class Hangs(Section):
    """Ranks that make no progress."""

    hung_after_s: Annotated[
        Literal["auto"] | Annotated[Seconds, Field(gt=0)], expected('a number of seconds, more than 0, or "auto"')
    ] = "auto"
    """Seconds without progress in a step or an evaluation after which a rank counts as hanging, and all ranks are
    replaced. auto: 20 times the longest step or evaluation so far, but at least 30 and at most 60 seconds. A rank
    never counts as hanging before 3 times the longest step or evaluation so far.
    """

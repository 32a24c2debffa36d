"""Preemption traces: when a job of several machines was up. Holdfast ships a few recorded traces; see LICENSES.txt.

A trace is a JSON file with the keys of `Trace`. Between two intervals of ``up`` the job had no capacity. The end of an
interval is a preemption. The end of the last interval is a preemption only if ``last_up_is_censored`` is false.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from holdfast.errors import ConfigError

FOLDER = Path(__file__).parent
MAX_BYTES = 64 * 2**20

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Trace(BaseModel):
    """A recording of the times in which a job had all of its machines.

    Attributes:
        source: where the recording comes from, and its licence.
        nodes: the number of machines that the job needs.
        resolution_s: how exact the times are, in seconds.
        up: the intervals in which the job was up, as seconds from the start of the recording, in order.
        last_up_is_censored: whether the recording ended while the job was up.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    name: str
    source: str = ""
    nodes: int = Field(1, ge=1)
    resolution_s: Seconds = 0.0
    span_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    note: str = ""
    up: list[tuple[Seconds, Seconds]] = Field(min_length=1)
    last_up_is_censored: bool = False

    @field_validator("up")
    @classmethod
    def _check_order(cls, up: list[tuple[float, float]]) -> list[tuple[float, float]]:
        for number, (start_s, end_s) in enumerate(up):
            if end_s <= start_s:
                raise ValueError(f"interval {number} ends at {end_s:g} s, but begins at {start_s:g} s")
        for number, (before, after) in enumerate(itertools.pairwise(up), 1):
            if after[0] < before[1]:
                raise ValueError(f"interval {number} begins at {after[0]:g} s, before the one before it ends")
        return up

    @property
    def lengths_s(self) -> list[float]:
        """Return the length of each interval, in seconds."""
        return [end_s - start_s for start_s, end_s in self.up]

    @property
    def preemptions(self) -> int:
        """Return the number of preemptions."""
        return len(self.up) - self.last_up_is_censored

    @property
    def available_s(self) -> float:
        """Return the seconds in which the job was up."""
        return sum(self.lengths_s)

    @property
    def mean_s(self) -> float:
        """Return the mean time up between two preemptions, in seconds."""
        return self.available_s / max(self.preemptions, 1)


def read_trace(name: str) -> Trace:
    """Return a trace, given its file, or its name if it is shipped with Holdfast.

    Raises:
        ConfigError: there is no such file, or the file is no trace.
    """
    path = FOLDER / f"{name}.json" if name in list_shipped() else Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"there is no trace {name!r}: {error.strerror}",
            hint=f"give a file, or the name of a trace that comes with Holdfast: {', '.join(list_shipped())}",
        ) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes", hint=_HINT)
    try:
        return Trace.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path} is no trace: {field + ': ' if field else ''}{first['msg']}", hint=_HINT) from None


_HINT = 'expected JSON such as {"name": "mine", "span_s": 7200, "up": [[0, 3000], [3120, 7000]]}'


def list_shipped() -> Sequence[str]:
    """Return the names of the traces that are shipped with Holdfast."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))

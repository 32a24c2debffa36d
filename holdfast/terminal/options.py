"""Options and arguments that several commands have, and their JSON output."""

import json
from typing import Annotated, Any

from cyclopts import Parameter, validators

from holdfast.errors import WrongUse

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Set = Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)]
TrustRecords = Annotated[bool, Parameter(name="--trust-records", negative="", show_default=False)]
# The type of an option: how many runs of a store to show; None for the command's default.
Limit = Annotated[int | None, Parameter(name="--limit", validator=validators.Number(gte=1), show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def split_out(what: tuple[str, ...], out: str, example: str) -> tuple[str, ...]:
    """Return the arguments after a run: a commit, which may be left out, and the file or folder to make.

    Args:
        out: the name of the last argument in the message.
    """
    if not 1 <= len(what) <= 2:
        raise WrongUse(f"expected a commit and {out} after the run: RUN [COMMIT] {out}", hint=example)
    return what

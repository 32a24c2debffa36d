"""The command ``holdfast``, and the options and the JSON output that its subcommands share."""

import json
import signal
import sys
from typing import Annotated, Any

from cyclopts import App, Parameter, validators

from holdfast import __version__
from holdfast.config import DEFAULT_STORE
from holdfast.terminal import interrupt
from holdfast.terminal.command import EXIT_CODES, run_app

app = App(
    name="holdfast",
    help=f"Train runs, look at them, check them and keep them. RUN is <store>/<run>, or the name of a run in "
    f"the default store, {DEFAULT_STORE}/.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version=__version__,
)

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Set = Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)]
TrustRecords = Annotated[bool, Parameter(name="--trust-records", negative="", show_default=False)]
# The type of an option: how many runs of a store to show; None for the command's default.
Limit = Annotated[int | None, Parameter(name="--limit", validator=validators.Number(gte=1), show_default=False)]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def main() -> None:
    """Run the console script. On SIGTERM or Ctrl-C, end the ranks and remove scratch folders before exiting."""
    signal.signal(signal.SIGTERM, interrupt.end)
    interrupt.catch(interrupt.end)
    sys.exit(run_app(app))

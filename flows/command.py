"""The command ``python -m flows.train``, whose ranks start before Prefect is imported: both take equally long."""

import contextlib
import signal
import sys
from pathlib import Path
from typing import Annotated

import tasks.untracked  # noqa: F401

from cyclopts import App, Parameter

from holdfast.attempt import started_ahead
from holdfast.attempt.progress import log_plain_lines
from holdfast.config import load_config
from holdfast.ledger.standing import TrainResult, stopped_early
from holdfast.terminal import interrupt, stamp
from holdfast.terminal.command import EXIT_CODES

app = App(
    name="python -m flows.train",
    help="Train a run, or continue it from its last verified checkpoint. If it is killed, the same command continues "
    "the run, to the same bytes.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version_flags=[],
)


@app.default
def main(
    config: Path,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)] = None,
) -> None:
    """Train a run, or continue it.

    Args:
        config: The run's configuration, a TOML file.
        set_: key=value: change a setting, for example --set epochs=8 or --set settings.lr=0.001.
    """
    settings = load_config(config, set_ or [])
    log_plain_lines()
    # While a flow runs, Prefect replaces this signal handler by its own, and calls this one after the flow has ended.
    signal.signal(signal.SIGTERM, interrupt.end)
    with started_ahead(settings) if settings.where == "here" else contextlib.nullcontext():
        from flows.train import train_with_server  # imports Prefect

        result = train_with_server(settings)
    if not isinstance(result, TrainResult) or not result.complete:
        raise stopped_early(settings.run)
    print(f"{stamp(sys.stdout)}{result.describe(settings.store)}")

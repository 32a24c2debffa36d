"""The run that a person starts: ``python -m flows.train CONFIG.toml``, or `train` from Python."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from prefect import flow

from flows.attempt import attempt
from holdfast.cli import EXIT_CODES, run_app
from holdfast.config import RunConfig, load_config
from holdfast.journal import Journal
from holdfast.progress import log_plain_lines
from holdfast.standing import TrainResult, read_standing
from holdfast.store import open_store
from tasks.server import server


@flow(name="train", flow_run_name="{config.run}", retries=0)
def train(config: RunConfig) -> TrainResult:
    """Train a run until its journal says that it is complete.

    Starting it again, after whatever has happened, continues the run; starting it when the run is complete trains
    nothing.

    Args:
        config: The run's configuration.
    """
    journal = Journal(open_store(config.store), config.run)
    outcome = attempt(config, journal.attempts() + 1)
    return TrainResult.of(read_standing(journal), outcome)


app = App(
    name="python -m flows.train",
    help="Train a run, or continue it from its last verified checkpoint. Killed at any moment, the same command "
    "finishes it on the same bytes.",
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
    signal.signal(signal.SIGTERM, _exit_after_sigterm)
    with server():
        result = train(settings)
    show(result, settings)


def show(result: TrainResult, config: RunConfig) -> None:
    """The result, as a person reads it."""
    lies_in = f"{config.store.rstrip('/')}/{result.run}/{result.path}"
    rows: dict[str, Any] = {"final loss": result.avg_loss, **result.metrics}
    print(f"run {result.run} is complete: step {result.steps}, epoch {result.epochs}")
    for name, value in rows.items():
        if value is not None:
            print(f"  {name.replace('_', ' '):14}  {value:.4f}")
    print(f"  {'checkpoint':14}  {result.checkpoint_sha256_last}")
    print(f"  {'lies in':14}  {lies_in}")


def _exit_after_sigterm(signum: int, frame: object) -> None:
    # Prefect's own handler is in place while a flow runs, and calls this one when the flow has ended.
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(run_app(app))

"""The run that a person starts: ``python -m flows.train CONFIG.toml``, or `train` from Python."""

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tasks.untracked  # noqa: F401

from cyclopts import App, Parameter
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled
from prefect.utilities.urls import url_for

from flows.attempt import attempt
from holdfast.attempt import started_ahead
from holdfast.command import EXIT_CODES, run_app
from holdfast.config import RunConfig, load_config
from holdfast.endings import Ending
from holdfast.errors import RunStopped
from holdfast.journal import Journal
from holdfast.liveness import is_cancel
from holdfast.progress import log_plain_lines
from holdfast.retention import prune_run
from holdfast.standing import Outcome, TrainResult, is_trained, read_standing
from holdfast.store import open_store
from holdfast.supervision import judge
from tasks import own_run, pool
from tasks.heartbeat import heartbeat
from tasks.reporting import summarize
from tasks.served import served_flow
from tasks.server import server

log = logging.getLogger("holdfast.train")


@served_flow(name="train", flow_run_name="{config.run}", retries=0)
def train(config: RunConfig) -> TrainResult | State[Any]:
    """Train a run until its journal says that it is complete.

    Starting it again, after whatever has happened, continues the run; starting it when the run is complete trains
    nothing. On a work pool it starts one attempt after the other, each a flow run of its own; killed, or started a
    second time, it watches the attempt that there is.

    Args:
        config: The run's configuration.
    """
    own_run.outlive_worker()
    with heartbeat():
        return train_run(config)


def train_run(config: RunConfig) -> TrainResult | State[Any]:
    """Train a run where its configuration says, and show how it stands."""
    journal = Journal(open_store(config.store), config.run)
    newest = journal.newest()
    pool.claim_train(config)
    if config.where == "here":
        outcome = attempt(config, journal.attempts() + 1)
        assert isinstance(outcome, Outcome)
    else:
        ended = supervise(config, journal)
        if ended.reason != "completed":
            return Cancelled(message=f"attempt {journal.attempts()} was cancelled; the run, started again, continues")
        report = prune_run(journal, dry_run=True)
        outcome = Outcome(complete=True, retention=report.model_dump(mode="json") if report else {})
    summarize(journal)
    return TrainResult.of(read_standing(journal), outcome, newest.epoch if newest else None)


def supervise(
    config: RunConfig, journal: Journal, choose_environment: Callable[[], dict[str, str]] = dict[str, str]
) -> Ending:
    """Train a run by attempts on a work pool, one after the other, until it is complete or cancelled.

    An attempt that was being cancelled before this began is waited for; the run then goes on.

    Args:
        choose_environment: what the next attempt has in its environment, besides what its pool gives it.

    Raises:
        NoProgress: a budget is spent; the message has the last error.
        WrongUse, Damage, Superseded: another attempt can't help.
    """
    others: list[Ending] = []  # ends that the journal doesn't have, since the last step of progress
    furthest = 0
    live = pool.find_live_attempt(config)
    while live is not None or not is_trained(journal, config.epochs):
        flow_run = live or pool.start_attempt(config, journal.attempts() + 1, len(others), choose_environment())
        was_cancelled = live is not None and is_cancel(live.state)
        live = None
        log.info("attempt %d at work: %s", flow_run.parameters["number"], url_for(flow_run) or flow_run.name)
        try:
            flow_run = pool.await_end(flow_run)
        except (TerminationSignal, Pause) as signal:
            is_cancelled = isinstance(signal, Pause) or own_run.is_being_cancelled()
            if is_cancelled:
                pool.cancel(flow_run, config.resume.stop_within_s)
            elif is_cancelled is None:
                log.warning("Prefect's server does not say whether this is being cancelled; %s goes on", flow_run.name)
            raise
        except KeyboardInterrupt:
            log.info("attempt %d goes on; the same command watches it again", flow_run.parameters["number"])
            raise
        number = flow_run.parameters["number"]
        if pool.was_paused(journal, number):  # and resumed, as another attempt
            number = journal.attempts()
        end = find_end(journal, number, flow_run.state)
        pool.add_tags(flow_run.id, end.reason)
        log.info("attempt %d ended at step %d: %s", number, end.step, end)
        if end.reason == "cancelled" and was_cancelled:
            continue
        if end.reason in ("cancelled", "paused"):
            return end
        if end.step > furthest:
            others.clear()
        furthest = max(furthest, end.step)
        if end.reason == "completed" and not is_trained(journal, config.epochs):
            end = Ending("stopped", f"attempt {number} called the run complete, which its journal does not", end.step)
            others.append(end)
        elif not journal.has_attempt(number):
            others.append(end)
        if end.reason != "completed":
            time.sleep(judge([*journal.endings(), *others], config.supervision))
    return Ending("completed")


def find_end(journal: Journal, number: int, state: State[Any] | None) -> Ending:
    """Return how an attempt ended: as it has said itself, or else by the state of its flow run, which goes on record.

    One that a person cancelled counts as cancelled, even if it could not ask the server and said that it was preempted.
    """
    newest = journal.newest()
    end = pool.end_by_state(state, newest.step if newest else 0)
    if not journal.has_attempt(number):
        return end
    said = journal.end_attempt(number, end)
    is_unheard = end.reason == "cancelled" and said.reason != "completed"
    return Ending("cancelled", end.message, said.step) if is_unheard else said


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
    # Starting the ranks takes as long as Prefect's server takes to start.
    ahead = started_ahead(settings) if settings.where == "here" else contextlib.nullcontext()
    with ahead, server():
        result = train(settings)
    if not isinstance(result, TrainResult) or not result.complete:
        raise RunStopped(f"run {settings.run} was stopped early", hint="the same command continues it")
    print(result.describe(settings.store))


def _exit_after_sigterm(signum: int, frame: object) -> None:
    # Prefect's own handler is in place while a flow runs, and calls this one when the flow has ended.
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(run_app(app))

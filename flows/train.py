"""Supervised training: ``python -m flows.train CONFIG.toml``, or `train` from Python, the UI or a schedule."""

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
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Pause, TerminationSignal
from prefect.states import Cancelled
from prefect.utilities.urls import url_for

from flows.attempt import attempt
from holdfast.attempt import started_ahead
from holdfast.attempt.progress import log_plain_lines
from holdfast.attempt.supervision import LONGEST_BACKOFF_S, judge
from holdfast.config import RunConfig, load_config
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.keeping.retention import prune_run
from holdfast.ledger.standing import Outcome, TrainResult, is_finished, read_standing, stopped_early
from holdfast.proof.differences import gives_others
from holdfast.store import open_store
from holdfast.terminal import interrupt
from holdfast.terminal.command import EXIT_CODES, run_app
from tasks import own_run, pool
from tasks.heartbeat import heartbeat
from tasks.liveness import is_cancel
from tasks.reporting import summarize
from tasks.served import served_flow
from tasks.server import check_configured, server
from tasks.states import describe_turned_away, ending_of_state

log = logging.getLogger("holdfast.train")

# The first wait after a deployment's concurrency limit has cancelled an attempt. The waits double.
TRY_AGAIN_AFTER_S = 5.0


@served_flow(name="train", flow_run_name="{config.run}", retries=0, persist_result=False)
def train(config: RunConfig) -> TrainResult | State[Any]:
    """Train a run until its journal says that it is complete.

    Start it again after any interruption, and the run continues. If the run is complete, it trains nothing. On a work
    pool it starts one attempt after the other, each as a flow run of its own. If an attempt is already running, because
    this flow was killed or started twice, it watches that attempt.

    Args:
        config: The run's configuration.
    """
    own_run.outlive_worker()
    with heartbeat():
        return train_run(config)


def train_run(config: RunConfig) -> TrainResult | State[Any]:
    """Train a run here or on a pool, as its configuration says. Show its state as an artifact."""
    journal = Journal(open_store(config.store), config.run)
    try:
        result = _train(config, journal)
    except HoldfastError:
        if journal.exists():
            summarize(journal)
        raise
    summarize(journal)
    return result


def _train(config: RunConfig, journal: Journal) -> TrainResult | State[Any]:
    newest = journal.newest()
    pool.claim_train(config)
    if config.where == "here":
        outcome = attempt(config, journal.attempts() + 1)
        assert isinstance(outcome, Outcome)
    else:
        ended = supervise(config, journal)
        if ended.reason != "completed":
            return Cancelled(message=f"{ended.message}; the run, started again, continues")
        report = prune_run(journal, dry_run=True)
        outcome = Outcome(complete=True, retention=report.model_dump(mode="json") if report else {})
    if outcome.complete and newest is not None and newest.number == journal.newest_number():
        log.info("run %s was complete already: nothing was trained", config.run)
    return TrainResult.of(read_standing(journal), outcome, newest.epoch if newest else None)


def supervise(
    config: RunConfig, journal: Journal, choose_environment: Callable[[], dict[str, str]] = dict[str, str]
) -> Ending:
    """Train a run by attempts on a work pool, one after the other, until it is complete or cancelled.

    If an earlier attempt is still being cancelled, wait for its end first, and then continue the run. A run that others
    have completed with other settings gets one more attempt, which decides whether these may be told so.

    Args:
        choose_environment: returns variables for the next attempt's environment, besides those of its pool.

    Returns:
        The ending of the run: completed or cancelled.

    Raises:
        NoProgress: a budget is spent; the message has the last error.
        WrongUse, Damage, Superseded: another attempt can't help.
    """
    others: list[Ending] = []  # endings since the last progress that are not in the journal
    furthest = turned_away = 0
    is_judged = False  # whether an attempt has accepted this configuration
    live = pool.find_live_attempt(config)
    is_dead = False  # it may have died after its ending went on record, before its report and its metric sinks had it
    if live is not None and gives_others(journal, config):
        log.warning("%s trains with other settings; when it has ended, an attempt judges these", live.name)
    while (
        live is not None
        or is_dead
        or not is_finished(journal, config.epochs)
        or (not is_judged and gives_others(journal, config))
    ):
        again = len(others) + turned_away
        flow_run = live or pool.start_attempt(config, journal.attempts() + 1, again, choose_environment())
        was_cancelled = live is not None and is_cancel(live.state)
        live = None
        log.info("attempt %d at work: %s", flow_run.parameters["number"], url_for(flow_run) or flow_run.name)
        flow_run = await_attempt(flow_run, config.resume.stop_within_s)
        is_dead = flow_run.state is not None and flow_run.state.is_crashed()
        if is_dead:
            pool.end_tasks(flow_run)
        number = flow_run.parameters["number"]
        if refusal := describe_turned_away(flow_run.state):
            wait_s = min(TRY_AGAIN_AFTER_S * 2.0**turned_away, LONGEST_BACKOFF_S)
            turned_away += 1
            log.info("attempt %d did not begin (%s); the next try is in %.0f s", number, refusal, wait_s)
            time.sleep(wait_s)
            continue
        if pool.was_paused(journal, number):  # a person resumed the flow run, which claimed a new attempt
            number = journal.attempts()
        ending = find_ending(journal, number, flow_run.state)
        pool.add_tags(flow_run.id, ending.reason)
        log.info("attempt %d ended at step %d: %s", number, ending.step, ending)
        if ending.reason == "cancelled" and was_cancelled:
            continue
        if ending.reason == "cancelled":
            return Ending("cancelled", f"attempt {number} was cancelled", ending.step)
        if ending.step > furthest:
            others.clear()
        furthest = max(furthest, ending.step)
        if ending.reason == "completed":
            is_judged = RunConfig.model_validate(flow_run.parameters["config"]).identity == config.identity
        if ending.reason == "completed" and not is_finished(journal, config.epochs):
            message = f"attempt {number} completed, but the journal says that the run is not complete"
            ending = Ending("stopped", message, ending.step)
            others.append(ending)
        elif not journal.has_attempt(number) or pool.was_paused(journal, number):
            others.append(ending)
        if ending.reason != "completed":
            time.sleep(judge([*journal.endings(), *others], config.supervision))
    return Ending("completed")


def await_attempt(flow_run: FlowRun, stop_within_s: float) -> FlowRun:
    """Wait until an attempt's flow run has ended, and return it.

    If a person cancels or pauses the current flow run meanwhile, cancel the attempt. If a signal or Ctrl-C ends this
    process for another reason, the attempt goes on.

    Args:
        stop_within_s: the limit for the attempt to save and end after a cancel.

    Raises:
        TerminationSignal, Pause, KeyboardInterrupt: this process was told to end.
    """
    try:
        return pool.await_end(flow_run)
    except (TerminationSignal, Pause) as signal:
        is_cancelled = isinstance(signal, Pause) or own_run.is_being_cancelled()
        if is_cancelled:
            pool.cancel(flow_run, stop_within_s)
        elif is_cancelled is None:
            log.warning("Prefect's server does not say whether this is being cancelled; %s goes on", flow_run.name)
        raise
    except KeyboardInterrupt:
        log.info("attempt %d goes on; the same command watches it again", flow_run.parameters["number"])
        raise


def find_ending(journal: Journal, number: int, state: State[Any] | None) -> Ending:
    """Return how an attempt ended: as it recorded itself, or else by its flow run's state, which goes on record.

    If the server says that a person cancelled the attempt, this overrules a recorded *preempted*: perhaps the attempt
    could not reach the server. Any state overrules a recorded *paused*: a person resumed the flow run, and it ended
    before it claimed another attempt.
    """
    newest = journal.newest()
    by_state = ending_of_state(state, newest.step if newest else 0)
    if not journal.has_attempt(number):
        return by_state
    recorded = journal.end_attempt(number, by_state)
    if recorded.reason == "paused":
        return by_state
    is_overruled = by_state.reason == "cancelled" and recorded.reason != "completed"
    return Ending("cancelled", by_state.message, recorded.step) if is_overruled else recorded


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
    if settings.where != "here":
        check_configured(f'where = "{settings.where}"')
    log_plain_lines()
    # While a flow runs, Prefect's own handler is in place. It calls this one after the flow has ended.
    signal.signal(signal.SIGTERM, interrupt.end)
    # Start the ranks ahead, because their start takes as long as that of Prefect's server.
    ahead = started_ahead(settings) if settings.where == "here" else contextlib.nullcontext()
    with ahead, server():
        result = train(settings)
    if not isinstance(result, TrainResult) or not result.complete:
        raise stopped_early(settings.run)
    print(result.describe(settings.store))


if __name__ == "__main__":
    sys.exit(run_app(app))

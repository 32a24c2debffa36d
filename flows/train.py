"""Supervised training: ``python -m flows.train CONFIG.toml``, or `train` from Python, the UI or a schedule."""

if __name__ == "__main__":
    import sys

    from flows.command import app
    from holdfast.terminal.command import run_app

    sys.exit(run_app(app))

import logging
from typing import Any

import tasks.untracked  # noqa: F401

from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled

from flows.attempt import attempt
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.keeping.retention import prune_run
from holdfast.ledger.standing import Outcome, TrainResult, read_standing
from holdfast.store import open_store
from holdfast.terminal import interrupt
from tasks import lost_runs, own_run, pool
from tasks.heartbeat import heartbeat
from tasks.hooks import cancelled_state
from tasks.reporting import make_summary
from tasks.served import served_flow
from tasks.server import check_configured, server
from tasks.supervisor import Supervisor

log = logging.getLogger("holdfast.train")


@served_flow(name="train", flow_run_name="{config.run}", retries=0, persist_result=False)
def train(config: RunConfig) -> TrainResult | State[Any]:
    """Train a run until its journal says that it is complete.

    Start it again after any interruption, and the run continues. If the run is complete, it trains nothing. On a work
    pool, this flow starts one attempt after the other, each as a separate flow run. If an attempt is already running,
    because this flow was killed or started twice, the flow watches that attempt.

    Args:
        config: The run's configuration.
    """
    own_run.outlive_worker()
    interrupt.send_ignored_again()
    with heartbeat():
        return train_run(config)


def train_run(config: RunConfig) -> TrainResult | State[Any]:
    """Train a run here or on a pool, as its configuration says. Show its state as an artifact."""
    journal = Journal(open_store(config.store), config.run)
    result: TrainResult | State[Any]
    try:
        result = _train(config, journal)
    except HoldfastError:
        if journal.exists():
            make_summary(journal)
        raise
    except (TerminationSignal, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or not own_run.is_being_cancelled():
            if config.where != "here":
                log.warning(
                    "told to stop: the run's attempt trains on; start the run again to watch it, or cancel the "
                    "attempt's flow run in Prefect's UI to end it"
                )
            raise
        result = cancelled_state(config, own_run.BY_A_PERSON)
    make_summary(journal)
    return result


def _train(config: RunConfig, journal: Journal) -> TrainResult | State[Any]:
    newest = journal.newest()
    pool.tag_run(config)
    lost_runs.name_process()
    lost_runs.end_lost(pool.tag_of(config))
    if config.where == "here":
        outcome = attempt(config, journal.next_attempt())
        assert isinstance(outcome, Outcome)
    else:
        ended = Supervisor(config, journal).run()
        if ended.reason != "completed":
            return Cancelled(message=f"{ended.message}; start the run again to continue it")
        report = prune_run(journal, dry_run=True)
        outcome = Outcome(complete=True, retention=report.model_dump(mode="json") if report else {})
    if outcome.complete and newest is not None and newest.number == journal.newest_number():
        log.info("run %s was complete already: nothing was trained", config.run)
    return TrainResult.of(read_standing(journal), outcome, newest.epoch if newest else None)


def train_with_server(config: RunConfig) -> TrainResult | State[Any]:
    """Call `train` with the configured Prefect server, or with a temporary one."""
    if config.where != "here":
        check_configured(f'where = "{config.where}"')
    with server():
        return train(config)

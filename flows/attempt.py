"""One attempt (the training of a run by one process, from its start to its end) as a separate flow run."""

import contextlib
from typing import Any

import tasks.untracked  # noqa: F401

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal

from holdfast.attempt import live, surrounded
from holdfast.attempt.progress import CommitLines, ProgressView
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError
from holdfast.ledger.standing import Outcome
from holdfast.terminal import interrupt
from tasks import lost_runs, own_run, pool
from tasks.chunks import ACTS
from tasks.heartbeat import heartbeat
from tasks.hooks import CommitEvents, final_state
from tasks.reporting import ArtifactReport


@flow(name="attempt", flow_run_name="{config.run} attempt {number}", retries=0, persist_result=False)
def attempt(config: RunConfig, number: int) -> Outcome | State[Any]:
    """Train a run, chunk by chunk, from the newest commit in its journal, until the run is complete.

    If the attempt is told to end (SIGTERM, Ctrl-C, a cloud's notice, a person who cancels or pauses it), it saves and
    commits the trained steps. On a work pool, the flow run ends in a state that names the reason; elsewhere the flow
    raises the error.

    Args:
        config: The run's configuration.
        number: The attempt's number. When an attempt with a higher number begins, this attempt can't commit any more.
    """
    own_run.outlive_worker()
    interrupt.send_ignored_again()
    asked = own_run.Asked(config.resume.stop_within_s)
    with contextlib.ExitStack() as here:
        here.enter_context(heartbeat())
        if not asked.is_on_pool:
            pool.tag_run(config)
        lost_runs.name_process()
        # On a pool, keep Prefect's signal handler, because only this handler lets a flow run know why it gets SIGTERM.
        # There the supervisor starts the next attempt, so don't queue the Slurm job again either.
        if not asked.is_on_pool:
            here.enter_context(interrupt.raised_once(config.resume.stop_within_s))
            # A Slurm job is queued again before Prefect reports to its server, because the signal that ends the job
            # ends the server, too.
            here.enter_context(surrounded(config))
        try:
            outcome = live(
                config,
                [CommitLines(), ArtifactReport(), CommitEvents(), ProgressView()],
                ACTS,
                number=pool.choose_number(config, number),
                sources=asked.sources,
                find_ending=asked.find_ending,
            )
        except (HoldfastError, TerminationSignal, KeyboardInterrupt) as error:
            ending = asked.ending or asked.find_ending(error)
            if not asked.is_on_pool:
                raise
            return final_state(ending, config)
        asked.raise_if_paused()
        return final_state(asked.ending or asked.find_ending(None), config) if asked.is_on_pool else outcome

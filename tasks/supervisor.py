"""The supervisor of a run on a work pool: start one attempt after the other until the run is complete.

After each attempt, `holdfast.attempt.supervision` decides whether to start another attempt, wait or stop. The
supervisor executes this decision on Prefect's server.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tasks.untracked  # noqa: F401

from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Pause, TerminationSignal
from prefect.utilities.urls import url_for

from holdfast.attempt.supervision import Supervised, choose_action
from holdfast.config import RunConfig
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.ledger.standing import is_finished
from holdfast.proof.differences import gives_others
from tasks import own_run, pool
from tasks.liveness import is_cancel
from tasks.states import describe_turned_away, ending_of_state

log = logging.getLogger("holdfast.train")


class Supervisor:
    """Trains a run by attempts on a work pool until it is complete or cancelled.

    If an attempt is already alive, because its supervisor was killed or started twice, watch that attempt first.
    """

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        choose_environment: Callable[[], dict[str, str]] = dict[str, str],
    ) -> None:
        """
        Args:
            choose_environment: returns environment variables for the next attempt, besides the variables of its pool.
        """
        self.config, self.journal = config, journal
        self._choose_environment = choose_environment
        self._others: list[Ending] = []  # endings that the journal lacks, since the last committed step
        self._furthest = 0
        self._refused = 0  # the total number of attempts that the server has refused to begin
        self._refusal = ""  # the last refusal, for a person
        self._is_judged = False  # whether an attempt has accepted this configuration
        self._seen = Supervised()

    def run(self) -> Ending:
        """Train the run; return its ending, completed or cancelled.

        Raises:
            NoProgress: the allowed number of attempts is used up; the message has the last error.
            WrongUse, Damage, Superseded: a further attempt can't help.
        """
        live = pool.find_live_attempt(self.config)
        if live is not None and gives_others(self.journal, self.config):
            log.warning(
                "the flow run %s trains the run with different settings; the next attempt checks the new settings",
                live.name,
            )
        while (action := choose_action(self._know(live), self.config.supervision)).ending is None:
            if self._seen.refusals:
                log.info("%s; the next try is in %.0f s", self._refusal, action.wait_s)
            time.sleep(action.wait_s)
            self._watch(live or self._start(), was_cancelled=live is not None and is_cancel(live.state))
            live = None
        return action.ending

    def _know(self, live: FlowRun | None) -> Supervised:
        """Return the facts from which the next action is chosen, with as few reads of the journal as possible."""
        if live is not None:
            return replace(self._seen, is_live=True)
        journal, config = self.journal, self.config
        finished = is_finished(journal, config.epochs)
        return replace(
            self._seen,
            is_finished=finished,
            is_disputed=finished and not self._is_judged and gives_others(journal, config),
            endings=[*journal.endings(), *self._others],
        )

    def _start(self) -> FlowRun:
        again = len(self._others) + self._refused
        return pool.start_attempt(self.config, self.journal.next_attempt(), again, self._choose_environment())

    def _watch(self, flow_run: FlowRun, *, was_cancelled: bool) -> None:
        """Wait until an attempt has ended, and record its ending for the next action."""
        number = flow_run.parameters["number"]
        log.info("attempt %d is running: %s", number, url_for(flow_run) or flow_run.name)
        flow_run = await_attempt(flow_run, self.config.resume.stop_within_s)
        is_dead = flow_run.state is not None and flow_run.state.is_crashed()
        if is_dead:
            pool.end_tasks(flow_run)
        if refusal := describe_turned_away(flow_run.state):
            self._refused += 1
            self._refusal = f"attempt {number} did not begin ({refusal})"
            self._seen = Supervised(is_dead=is_dead, refusals=self._seen.refusals + 1)
            return
        if pool.was_paused(self.journal, number):  # a person resumed the flow run, so it claimed a new attempt
            number = self.journal.attempts()
        ending = settle_ending(self.journal, number, flow_run.state)
        pool.add_tags(flow_run.id, ending.reason)
        log.info("attempt %d ended at step %d: %s", number, ending.step, ending)
        if ending.reason == "cancelled":
            ending = replace(ending, message=f"attempt {number} was cancelled")
        else:
            ending = self._note(number, ending, flow_run)
        self._seen = Supervised(is_dead=is_dead, last=ending, was_cancelled=was_cancelled)

    def _note(self, number: int, ending: Ending, flow_run: FlowRun) -> Ending:
        """Record the ending of an attempt that no person has cancelled, and return the ending.

        If the flow run ended as completed, but the run isn't complete by its journal, use the ending *stopped* instead.
        """
        if ending.step > self._furthest:
            self._others.clear()
        self._furthest = max(self._furthest, ending.step)
        if ending.reason == "completed":
            self._is_judged = RunConfig.model_validate(flow_run.parameters["config"]).identity == self.config.identity
        if ending.reason == "completed" and not is_finished(self.journal, self.config.epochs):
            message = f"attempt {number} completed, but the journal says that the run is not complete"
            ending = Ending("stopped", message, ending.step)
            self._others.append(ending)
        elif not self.journal.has_attempt(number) or pool.was_paused(self.journal, number):
            self._others.append(ending)
        return ending


def await_attempt(flow_run: FlowRun, stop_within_s: float) -> FlowRun:
    """Wait until an attempt's flow run has ended, and return it.

    If a person cancels or pauses the current flow run meanwhile, cancel the attempt. If a signal or Ctrl-C ends this
    process for another reason, the attempt continues.

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
            log.warning("Prefect's server does not say whether it cancels this flow run; %s continues", flow_run.name)
        raise
    except KeyboardInterrupt:
        log.info("attempt %d continues; the same command watches it again", flow_run.parameters["number"])
        raise


def settle_ending(journal: Journal, number: int, state: State[Any] | None) -> Ending:
    """Return an attempt's ending: its own record, or else an ending derived from the state of its flow run.

    The flow run's state replaces the attempt's own record in two cases:

    - The state says *cancelled*, and the record doesn't say *completed*: the attempt may not have reached the server,
      and so may have recorded *preempted*.
    - The record says *paused*: a person has resumed the flow run, which then ended before it claimed a new attempt.
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

"""The command ``holdfast train`` on nodes other than node 0: start the node's ranks for the attempt on node 0."""

import logging
import time
from pathlib import Path

from holdfast.attempt.admission import check_machine
from holdfast.attempt.attempt import FINISH_WITHIN_S
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, NodesMissing, RankDied, RunStopped
from holdfast.journal import Journal
from holdfast.ledger.standing import is_trained
from holdfast.machine.gpus.checks import check_gpus, settle_ranks
from holdfast.rank.launchers import refuse_launcher
from holdfast.rank.launching import Ranks, choose_ranks
from holdfast.rank.messages import Ready
from holdfast.rank.process import find_node
from holdfast.rank.rendezvous import describe_node_wait
from holdfast.store import open_store
from holdfast.terminal import interrupt

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # the seconds between two checks on the store whether the attempt has ended
MEET_AGAIN_AFTER_S = 1.0


def carry(config: RunConfig) -> None:
    """Run ranks on this node for the attempt on node 0, until that attempt ends.

    Replace ranks that end. The new ranks of all nodes then connect again. If a signal's handler raises an exception,
    the ranks of all nodes stop at the same step and save before they end.

    Raises:
        ConfigError: srun has started several commands on this node.
        NodesMissing: no attempt could be joined for ``compute.wait_s`` seconds.
        RunStopped: the attempt has ended before the run is complete; the same command on all nodes continues it.
        HoldfastError: the ranks of this node can't be started.
    """
    refuse_launcher(config.compute)
    carrier = _NodeCarrier(settle_ranks(config))
    log.info("node %d: %s", find_node(config.compute), describe_node_wait(config.compute))
    with interrupt.raised_once(config.resume.stop_within_s):
        while not carrier.is_over():
            try:
                carrier.join()
            except NodesMissing:
                if carrier.is_late():
                    raise
            time.sleep(MEET_AGAIN_AFTER_S)
    carrier.report()


def watch_attached(config: RunConfig) -> None:
    """Watch the ranks that a launcher has started on this node, until they and the attempt on node 0 have ended.

    Raises:
        RunStopped: the attempt has ended before the run is complete.
        HoldfastError: the ranks have died, or hang.
    """
    carrier = _NodeCarrier(config)
    carrier.join()
    deadline = time.monotonic() + config.resume.stop_within_s
    while not carrier.is_over() and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    carrier.report()


class _NodeCarrier:
    """Starts one node's ranks, and starts them again when the ranks of all nodes have to connect again."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._journal = Journal(open_store(config.store), config.run)
        self._node = find_node(config.compute)
        self._log_path = Path(config.log.folder) / config.run / f"node-{self._node:04d}.log"
        newest = self._journal.attempts()
        # The number of the last attempt that had ended when this command began. This node joins a later attempt.
        self._before = newest if not newest or self._journal.read_ending(newest) else newest - 1
        self._is_training = False  # whether this node's ranks are connected to the other nodes' ranks, and ready
        self._has_carried = False  # whether earlier ranks of this node were ready, and have ended
        self._alone_since = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the attempt has ended: with a recorded ending, or because its ranks ended before its claim."""
        newest = self._journal.attempts()
        if newest > self._before:
            return self._journal.read_ending(newest) is not None
        return self._has_carried

    def _is_complete(self) -> bool:
        """Return whether the attempt has ended because the run is complete."""
        ending = self._journal.read_ending(self._journal.attempts())
        return self._is_training and ending is not None and ending.reason == "completed"

    def is_late(self) -> bool:
        """Return whether this node has waited for an attempt for ``compute.wait_s`` seconds."""
        return time.monotonic() - self._alone_since > self._config.compute.wait_s

    def join(self) -> None:
        """Start ranks, and wait until they or the attempt end.

        Raises:
            NodesMissing: the ranks could not connect to the ranks of the other nodes.
            HoldfastError: this node's ranks have failed, and new ranks would fail, too.
        """
        check_machine(self._config)
        check_gpus(self._config.compute)
        ranks = choose_ranks(self._config.compute)(self._config, self._log_path)
        self._is_training = False
        try:
            self._follow(ranks)
        except HoldfastError as error:
            # the ranks died before they were connected: torchrun on node 0 has ended
            if isinstance(error, RankDied) and not self._is_training:
                raise NodesMissing(
                    "the ranks of this node didn't connect to the other nodes' ranks",
                    hint=f"see the end of {self._log_path}",
                ) from None
            if not error.is_retryable:
                raise
            if not error.data.get("is_ordered"):
                log.warning("node %d: %s", self._node, error)
        finally:
            # Ranks that train save before they end. A signal to this command raises an exception, so the ranks are
            # ended here, too.
            ranks.end(self._config.resume.stop_within_s if self._is_training else 0.0)
            if self._is_training:
                self._has_carried = True
                self._alone_since = time.monotonic()

    def _follow(self, ranks: Ranks) -> None:
        """Wait until the attempt ends. If the ranks end before that, raise their error.

        The ranks of a complete run end by themselves, when the code after a user's loop has run.
        """
        over_since: float | None = None
        while True:
            try:
                event = ranks.next_event(LOOK_EVERY_S)
            except RankDied as error:
                if not error.data.get("is_silent"):
                    raise
                if not self.is_over():
                    continue
                over_since = over_since or time.monotonic()
                if not self._is_complete() or time.monotonic() - over_since > FINISH_WITHIN_S:
                    return
                continue
            if isinstance(event, Ready):
                self._is_training = True
                log.info("node %d: training; the ranks write to %s", self._node, self._log_path)

    def report(self) -> None:
        """Log how the attempt has ended.

        Raises:
            RunStopped: the attempt has ended before the run is complete.
        """
        newest = self._journal.attempts()
        ending = self._journal.read_ending(newest) if newest > self._before else None
        if is_trained(self._journal, self._config.epochs):
            log.info("node %d: run %s is complete", self._node, self._config.run)
            return
        how = f"has ended ({ending.reason}): {ending.message}" if ending else "ended before it began to train"
        raise RunStopped(f"the attempt on node 0 {how}", hint="the same command on every node continues the run")

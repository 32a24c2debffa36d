"""One rank's communication with the ranks of other nodes.

The ranks agree on their numbers, tell each other the first cause of a failure, and send heartbeats. They use the
key-value store that torchrun on node 0 serves at ``compute.rendezvous``.
"""

import os
import signal
import socket
import sys
import time
from datetime import timedelta

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from holdfast.config import Compute
from holdfast.errors import HoldfastError, RankDied
from holdfast.machine import heartbeats
from holdfast.machine.processes import is_running
from holdfast.rank.alive import NodeWatch
from holdfast.rank.events import Events
from holdfast.rank.messages import Failed, decode_event, encode_message
from holdfast.rank.process import find_node, split_address

FIRST, CAUSE = "holdfast/first", "holdfast/cause"
STORE_WITHIN_S = 60.0
LOOK_EVERY_S = 0.02
# A rank writes its error to the key-value store before it closes its connections. So other ranks find the cause there
# when they lose their connections.
CAUSE_WITHIN_S = 1.0


def name_node(compute: Compute) -> str:
    """Return this node's name for messages: its number and its host."""
    return f"node {find_node(compute)} ({socket.gethostname()})"


class Nodes:
    """One rank's communication in a run of several nodes. The first rank of each node also sends heartbeats."""

    def __init__(self, compute: Compute, events: Events) -> None:
        """Set this rank's number, and begin to watch the other nodes.

        Args:
            events: reports a lost node. Then this process exits, because a collective with a lost node doesn't end.

        Raises:
            DistError: the key-value store can't be reached.
        """
        self._compute = compute
        self._is_zero = find_node(compute) == 0
        self._store = self._connect()
        self._watch: NodeWatch | None = None
        is_first = os.environ["LOCAL_RANK"] == "0"
        self._take_place(is_first)
        if is_first:

            def report(error: RankDied) -> None:
                print(error, file=sys.stderr, flush=True)
                events.send_error(error)
                os._exit(error.exit_code)

            own, count = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
            self._watch = NodeWatch(self._connect, own, count, name_node(compute), compute.lost_after_s, report)

    def _connect(self) -> TCPStore:
        host, port = split_address(self._compute)
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_WITHIN_S))

    def _take_place(self, is_first: bool) -> None:
        """Renumber the ranks so that rank 0 is the first rank of node 0, which talks to the attempt.

        torchrun numbers nodes in the order of their addresses. Renumbering rotates this order.
        """
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if is_first and self._is_zero:
            self._store.set(FIRST, str(rank))
        os.environ["RANK"] = str((rank - int(self._store.get(FIRST))) % size)

    def share(self, error: HoldfastError) -> HoldfastError:
        """Send the other nodes the error that ends this rank.

        If another rank's error caused this error, return that cause.
        """
        try:
            if not error.data.get("is_effect"):
                self._store.set(CAUSE, encode_message(Failed.of(error)))
            elif self._is_zero:
                self._store.wait([CAUSE], timedelta(seconds=CAUSE_WITHIN_S))
                cause = decode_event(self._store.get(CAUSE).decode())
                return cause.error if isinstance(cause, Failed) else error
        except (DistError, RuntimeError):
            pass  # the cause is unknown: no rank has sent an error, or the key-value store has ended
        return error

    def leave(self) -> None:
        """Tell the other nodes that this rank ends, so that they don't report its node as lost."""
        if self._watch is not None:
            self._watch.leave()


def end_torchrun() -> None:
    """Wait for the end of this node's other ranks, and end this node's torchrun. Call it if torchrun's parent has died.

    Without this call torchrun would wait 300 s for the ranks of other nodes, and would keep the rendezvous's port,
    which the next attempt needs. The main rank calls this after its save, when the checkpoint of all ranks is durable.
    """
    others = [beat.pid for beat in heartbeats.read_beats().values() if beat.pid != os.getpid()]
    while any(map(is_running, others)):
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getppid(), signal.SIGTERM)

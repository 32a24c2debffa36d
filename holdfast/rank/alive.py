"""Heartbeats between nodes ("signs of life"), by which a rank notices that another node is lost.

A node that vanishes closes no connection, so a collective with that node waits until the kernel stops retransmitting
packets: 15 minutes on Linux.
"""

import threading
import time
from collections.abc import Callable

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from holdfast.errors import RankDied
from holdfast.terminal import spell_s

# A node counts as lost after this many missing heartbeats in a row, because a busy node or network may lose a few.
SIGNS = 6
LEFT = "left"


class NodeWatch:
    """Sends this node's heartbeats, and watches the other nodes' heartbeats.

    A heartbeat is a count and a node's name.
    """

    def __init__(
        self,
        connect: Callable[[], TCPStore],
        own: int,
        count: int,
        name: str,
        lost_after_s: float,
        report: Callable[[RankDied], None],
    ) -> None:
        """Begin to send this node's heartbeats, and to watch the other nodes' heartbeats.

        Args:
            connect: a function that returns a connection to the key-value store that all nodes share.
            own: this node's number, as torchrun counts: from 0, below ``count``.
            name: this node's name for messages.
            report: a function that is called in another thread with the error that names the lost nodes. It has to end
                the process.
        """
        self._connect, self._name, self._lost_after_s, self._report = connect, name, lost_after_s, report
        self._own, self._others = _key(own), [_key(node) for node in range(count) if node != own]
        self._seen: dict[str, tuple[str, float]] = {}  # each node's last new heartbeat, and its arrival
        self._has_left = threading.Event()
        # Use two threads, because the thread that talks to the key-value store may wait for a node that has vanished.
        self._signer = threading.Thread(target=self._exchange, daemon=True)
        self._signer.start()
        threading.Thread(target=self._judge, daemon=True).start()

    def leave(self) -> None:
        """Tell the other nodes that this node ends as planned, so that they don't report it as lost."""
        self._has_left.set()
        self._signer.join(self._lost_after_s / SIGNS)

    def _exchange(self) -> None:
        try:
            store, count, has_left = self._connect(), 0, False
            while not has_left:
                count += 1
                store.set(self._own, f"{count} {self._name}")
                for key in self._others:
                    if store.check([key]):
                        self._note(key, store.get(key).decode())
                has_left = self._has_left.wait(self._lost_after_s / SIGNS)
            store.set(self._own, LEFT)
        except (DistError, RuntimeError):
            pass  # node 0 has ended or is lost; `_judge` decides which, from its missing heartbeats

    def _note(self, key: str, sign: str) -> None:
        if key not in self._seen or sign != self._seen[key][0]:
            self._seen[key] = sign, time.monotonic()

    def _judge(self) -> None:
        while not self._has_left.wait(self._lost_after_s / SIGNS):
            due = time.monotonic() - self._lost_after_s
            lost = [sign.partition(" ")[2] for sign, at in list(self._seen.values()) if sign != LEFT and at < due]
            if lost:
                names = ", ".join(sorted(lost))
                hint = (
                    "check that the node runs and that other nodes can reach it; compute.lost_after_s sets the time "
                    "limit"
                )
                self._report(RankDied(f"no heartbeat from {names} for {spell_s(self._lost_after_s)}", hint=hint))
                return


def _key(node: int) -> str:
    return f"holdfast/alive/{node}"

"""The carrier of one node's ranks: an actor in the bundle that Ray has reserved on the node."""

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import ray

import holdfast
from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, RankDied, RankHung
from holdfast.machine.gpus.checks import check_gpus
from holdfast.rank.claim import find_problem
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Failed, decode_order, encode_message
from holdfast.rank.process import NODE_VARIABLE

# The longest wait for events. It is longer than `LOOK_EVERY_S`, so that the watch checks the ranks' heartbeats during
# each wait.
TAKE_WITHIN_S = 2.5
LOG_BYTES = 1 << 16  # the largest number of the log's bytes in one answer


@dataclass(frozen=True)
class Host:
    """The machine of a carrier.

    Attributes:
        name: the machine's name, for messages.
        address: the machine's IP address, as the cluster knows it.
        node_id: the machine's id in the cluster.
        port: a free port on the machine.
        version: the version of Holdfast on the machine.
    """

    name: str
    address: str
    node_id: str
    port: int
    version: str


@dataclass(frozen=True)
class Start:
    """The order to a carrier to start its ranks.

    Attributes:
        config: the configuration as JSON, with the rendezvous of the nodes.
        node: the number of this node.
        commit: the number of the commit that the attempt will probably restore; 0 for none.
        patience: the factor for the time limits of the watches over the ranks.
        folder: the working directory of the attempt's process.
        paths: the folders in which the attempt searches for modules.
    """

    config: str
    node: int
    commit: int
    patience: float
    folder: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """The events and the log of a node's ranks since the last answer.

    Attributes:
        events: lines of JSON that `holdfast.rank.messages.encode_message` has written. If the ranks have ended, the
            last event is a `Failed`, even if an order ended the ranks.
        log: the bytes that the ranks have added to their log.
        is_over: whether the ranks have ended.
    """

    events: tuple[str, ...]
    log: bytes
    is_over: bool


class Carrier:
    """One node's ranks. `relaying` calls its methods from the attempt's machine, concurrently."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._failed: HoldfastError | None = None
        self._log_path = Path(os.devnull)
        self._read_to = 0

    def describe(self) -> Host:
        """Return this machine's name, address and version."""
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        node_id = ray.get_runtime_context().get_node_id()
        return Host(socket.gethostname(), ray.util.get_node_ip_address(), node_id, port, holdfast.__version__)

    def start(self, start: Start) -> None:
        """Start this node's ranks, in the attempt's working directory if this machine has it. `take` reports errors."""
        config = RunConfig.model_validate_json(start.config)
        os.environ[NODE_VARIABLE] = str(start.node)
        with contextlib.suppress(OSError):
            os.chdir(start.folder)
        own = Path(ray.__file__).parent  # this folder contains Ray's copies of packages, which ranks must not import
        sys.path[:] = [*start.paths, *(path for path in sys.path if not Path(path).is_relative_to(own))]
        self._log_path = Path(config.log.folder) / config.run / f"node-{start.node:04d}.log"
        self._read_to = self._log_path.stat().st_size if self._log_path.exists() else 0
        try:
            self._ranks = Ranks(config, self._log_path, start.commit, patience=start.patience)
            check_gpus(config.compute)  # checked while the ranks import torch, which takes seconds
        except HoldfastError as error:
            self._failed = error
            self.end()

    def find_problem(self, config: str, attempt: int, name: str) -> str:
        """Return why this node doesn't see an attempt's claim; see `holdfast.rank.claim`."""
        return find_problem(RunConfig.model_validate_json(config), attempt, name)

    def order(self, line: str) -> None:
        """Pass an order on to the ranks."""
        if self._ranks is not None:
            self._ranks.send(decode_order(line))

    def close(self) -> None:
        """Close the ranks' input. The ranks then save and end."""
        if self._ranks is not None:
            self._ranks.close_input()

    def take(self) -> Taken:
        """Wait up to `TAKE_WITHIN_S` for events of the ranks. Return the events and the log's new lines."""
        events: list[str] = []
        try:
            if self._failed is not None:
                raise self._failed
            assert self._ranks is not None
            within_s = TAKE_WITHIN_S
            while True:
                events.append(encode_message(self._ranks.next_event(within_s)))
                within_s = 0.0
        except HoldfastError as error:
            if is_silence(error):
                return Taken(tuple(events), self._read_log(), is_over=False)
            return Taken((*events, encode_message(Failed.of(error))), self._read_log(), is_over=True)

    def _read_log(self) -> bytes:
        with contextlib.suppress(OSError), self._log_path.open("rb") as log:
            log.seek(self._read_to)
            data = log.read(LOG_BYTES)
            self._read_to += len(data)
            return data
        return b""

    def end(self) -> None:
        """End this node's ranks at once."""
        if self._ranks is not None:
            self._ranks.end(within_s=0.0)


def is_silence(error: HoldfastError) -> bool:
    """Return whether an error only means that the ranks have reported nothing for a while."""
    return isinstance(error, RankDied) and not isinstance(error, RankHung) and bool(error.data.get("is_silent"))

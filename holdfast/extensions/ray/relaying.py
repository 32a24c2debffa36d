"""The relay between an attempt and the carriers of its ranks: orders to node 0, and events of node 0 back.

The first failure of any node ends the ranks of all nodes. If several failures arrive, one is reported as the cause, in
this order of precedence: a node that Ray has lost, an error of a rank, a lost connection.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import holdfast
from holdfast.config import RunConfig
from holdfast.errors import ConfigError, HoldfastError, RankDied, RankHung
from holdfast.extensions.ray.carrying import Carrier, Host, Start, Taken
from holdfast.extensions.ray.orders import OrderLines
from holdfast.extensions.ray.placing import (
    LOOK_EVERY_S,
    Bundle,
    Placement,
    connect,
    list_alive,
    list_nodes,
    reserve_nodes,
)
from holdfast.rank.claim import find_attempt, not_shared
from holdfast.rank.events import Events
from holdfast.rank.messages import Begin, Failed, Restore, Stop, Train, decode_event, decode_order, encode_message

# The longest wait for the start of the carriers. A carrier's process starts in 5 s on a busy machine, but may take
# minutes to load a working directory.
STARTS_WITHIN_S = 300.0
ENDS_WITHIN_S = 4.0
LOOK_FOR_NODES_EVERY_S = 5.0
# By default a Ray worker kills its child processes when it ends. Turn that off, because the ranks have to save before
# they end.
ORPHANS_LIVE = {"RAY_kill_child_processes_on_worker_exit": "0"}
# How many methods of a carrier may run at once. More than one, because other methods are called while `take` waits for
# events.
CALLS_AT_A_TIME = 4


def relay_ranks(config: RunConfig, commit: int, patience: float, events: Events) -> None:
    """Start the ranks of an attempt on Ray, and relay orders and events until the ranks have ended.

    Args:
        commit: the number of the commit that the attempt will probably restore; 0 for none.
        patience: the factor for the time limits of the watches over the ranks.

    Raises:
        HoldfastError: no nodes can be reserved, the ranks can't be started, or they ended without an order.
    """
    orders = OrderLines()
    connect()
    # Replace the handler that Ray has set: as long as no ranks run, SIGTERM can end this process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    placement = reserve_nodes(config.compute, lambda: not orders.has_ended)
    relay = Relay(config, placement, events)
    signal.signal(signal.SIGTERM, lambda *_: relay.stop())
    try:
        relay.start(commit, patience)
        orders.follow(relay.obey)
        relay.run()
    finally:
        relay.end()


@dataclass(frozen=True)
class Failure:
    """The end of one node's ranks.

    Attributes:
        is_loss: whether Ray has lost the node; False if the node's ranks have ended with an error.
    """

    error: HoldfastError
    is_loss: bool = False


class Relay:
    """The Ray actors (`Carrier`) that run an attempt's ranks, one actor on each node."""

    def __init__(self, config: RunConfig, placement: Placement, events: Events) -> None:
        self._config, self._placement, self._events = config, placement, events
        self._carriers: Sequence[Any] = [make_carrier(placement, node) for node in range(placement.count)]
        self._hosts: Sequence[Host] = ()
        self._is_checked = False  # whether `_check_store` has found that all nodes see the attempt's claim
        self._is_training = False
        self._has_closed = False  # whether the ranks' input is closed
        self._is_told = False  # whether the ranks were told to save and end
        self._is_stopped = False
        self._has_joined = False
        self._failures: list[Failure] = []
        self._failed_at = 0.0
        self._looked_at = time.monotonic()

    # ---- start

    def start(self, commit: int, patience: float) -> None:
        """Start the ranks on all nodes; see `relay_ranks`.

        Raises:
            ConfigError: a node has a different version of Holdfast, or none.
            RankDied: Ray has lost a node during the start.
        """
        hosts = self._hosts = self._call_all("describe")
        check_versions(hosts)
        first = hosts[0]
        address = f"[{first.address}]" if ":" in first.address else first.address
        config = self._config.placed(self._placement.count, f"{address}:{first.port}").model_dump_json()
        paths = tuple(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        starts = [Start(config, node, commit, patience, str(Path.cwd()), paths) for node in range(len(hosts))]
        self._call_all("start", *starts)

    def _call_all(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on all carriers, and return their answers.

        Args:
            arguments: one argument for each carrier, or none at all.
        """
        given: Sequence[Sequence[object]] = [[each] for each in arguments] or [[] for _ in self._carriers]
        asked = [getattr(carrier, method).remote(*each) for carrier, each in zip(self._carriers, given, strict=True)]
        try:
            answers: list[Any] = ray.get(asked, timeout=STARTS_WITHIN_S)
            return answers
        except RayError as error:
            if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
                raise ConfigError(
                    f"holdfast can't be imported on the nodes of the Ray cluster: {last_line(error)}",
                    hint="install the same packages on all machines, as in one image",
                ) from None
            raise RankDied(f"a node of the Ray cluster is gone: {last_line(error)}") from None

    # ---- orders

    def obey(self, line: str) -> None:
        """Pass an order on to node 0. An empty line says that no more orders come: close the ranks' input."""
        carrier = self._carriers[0]
        try:
            if not line:
                self._has_closed = True
                ray.get(carrier.close.remote())
                return
            order = decode_order(line)
            if not self._is_checked and isinstance(order, Restore | Begin | Train):
                self._check_store()
                self._is_checked = True
            self._is_training |= isinstance(order, Train)
            ray.get(carrier.order.remote(line))
        except HoldfastError as error:
            self._fail(Failure(error))
        except RayError:
            pass  # ignore the lost node here, because `run` handles it

    def _check_store(self) -> None:
        """Check that all nodes see the attempt's claim, which this machine sees.

        Raises:
            StoreError: a node doesn't see the claim.
        """
        attempt, config = find_attempt(self._config), self._config.model_dump_json()
        asked = [
            carrier.find_problem.remote(config, attempt, f"node {node} ({host.name})")
            for node, (carrier, host) in enumerate(zip(self._carriers, self._hosts, strict=True))
        ]
        if problem := next(filter(None, ray.get(asked)), ""):
            raise not_shared(problem)

    def stop(self) -> None:
        """Order the ranks to save and end, as torchrun does at SIGTERM. A second call ends them at once."""
        # a signal handler calls this, so only set flags here; `run` acts on them
        self._is_told, self._is_stopped = True, self._has_closed

    # ---- events

    def run(self) -> None:
        """Pass events and logs on until the ranks of all nodes have ended, or one node has failed.

        Raises:
            HoldfastError: the ranks have ended without an order.
        """
        asked = {carrier.take.remote(): node for node, carrier in enumerate(self._carriers)}
        while asked and not self._is_stopped and not self._has_cause():
            ready, _ = ray.wait([*asked], timeout=LOOK_EVERY_S)
            for each in ready:
                node = asked.pop(each)
                if self._take(node, each):
                    asked[self._carriers[node].take.remote()] = node
            self._look_for_nodes()
            if self._is_told and not self._has_closed:
                self.obey("")
        cause = self._find_cause()
        if cause is not None and not cause.data.get("is_ordered"):
            raise cause

    def _take(self, node: int, answer: "ray.ObjectRef[Taken]") -> bool:
        """Send a node's events to the attempt and write its log to stderr. Return whether the node has more to report.

        Only node 0's events are sent. An error of any node, or a lost node, is recorded as a failure.

        Args:
            answer: the answer of the node's actor (`Carrier`).
        """
        try:
            taken: Taken = ray.get(answer)
        except RayError as error:
            host = self._hosts[node]
            loss = RankDied(f"node {node} ({host.name}) is lost: {explain_loss(error, host)}")
            self._fail(Failure(loss, is_loss=True))
            return False
        sys.stderr.buffer.write(taken.log)
        sys.stderr.buffer.flush()
        for event in map(decode_event, taken.events):
            if isinstance(event, Failed):
                self._fail(Failure(event.error))
            elif node == 0:
                self._events.send(event)
        return not taken.is_over

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        self._failed_at = self._failed_at or time.monotonic()

    def _has_cause(self) -> bool:
        """Return whether the cause of a failure is known, or the time to find it is over.

        If a node's ranks have died without an error, other nodes get ``resume.stop_within_s`` seconds to save, or to
        report the error that led to the death.
        """
        is_late = self._failures and time.monotonic() > self._failed_at + self._config.resume.stop_within_s
        errors = [failure.error for failure in self._failures]
        return bool(is_late) or any(isinstance(each, RankHung) or not isinstance(each, RankDied) for each in errors)

    def _find_cause(self) -> HoldfastError | None:
        """Return the error with which the ranks ended; None if an order ended them."""
        if self._has_joined:
            return RankDied("a node has joined the Ray cluster, so the ranks start again")
        return choose_cause(self._failures) if self._failures else None

    def _look_for_nodes(self) -> None:
        """Order the ranks to save and stop if a node has joined the cluster and the run can use more nodes."""
        placement, now = self._placement, time.monotonic()
        is_whole = placement.count == self._config.compute.node_range[1]
        if is_whole or not self._is_training or self._has_joined or self._failures:
            return
        if now > self._looked_at + LOOK_FOR_NODES_EVERY_S:
            self._looked_at = now
            if list_nodes(placement.bundle) - placement.known:
                self._has_joined = True
                self.obey(encode_message(Stop()))

    # ---- end

    def end(self) -> None:
        """End the ranks of all nodes, and remove their placement group."""
        asked = [carrier.end.remote() for carrier in self._carriers]
        ray.wait(asked, num_returns=len(asked), timeout=ENDS_WITHIN_S)
        remove_placement_group(self._placement.group)


def check_versions(hosts: Sequence[Host]) -> None:
    """Check that all nodes have this machine's version of Holdfast, because messages may differ between versions.

    Raises:
        ConfigError: a node has a different version.
    """
    for node, host in enumerate(hosts):
        if host.version != holdfast.__version__:
            raise ConfigError(
                f"node {node} ({host.name}) has holdfast {host.version}, and this machine {holdfast.__version__}",
                hint="install the same version on all machines",
            )


def choose_cause(failures: Sequence[Failure]) -> HoldfastError:
    """Return the error of the failure that is most likely the cause; the earliest if several are equally likely."""

    def weigh(failure: Failure) -> tuple[bool, ...]:
        error = failure.error
        is_ordered, is_effect = (bool(error.data.get(name)) for name in ("is_ordered", "is_effect"))
        return not failure.is_loss, is_ordered, is_effect, isinstance(error, RankDied)

    return min(failures, key=weigh).error


def make_carrier(placement: Placement, node: int) -> Any:
    """Start the carrier of a node in the node's bundle. Return the actor's handle."""
    bundle: Bundle = placement.bundle
    return (
        ray.remote(Carrier)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=CALLS_AT_A_TIME,
            runtime_env={"env_vars": ORPHANS_LIVE},
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement.group, node),
        )
        .remote()
    )


def explain_loss(error: RayError, host: Host) -> str:
    """Return why a carrier doesn't answer."""
    if host.node_id not in list_alive():
        return "its machine has left the Ray cluster"
    if isinstance(error, ActorDiedError):
        return "the Ray actor that started its ranks has died"
    return last_line(error) if isinstance(error, RayTaskError) else "Ray can't reach it any more"


def last_line(error: BaseException) -> str:
    """Return the last line of one of Ray's errors, which names the cause."""
    return str(error).strip().rpartition("\n")[2].strip().rstrip(".")

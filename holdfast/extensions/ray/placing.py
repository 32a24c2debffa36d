"""The place of a run on a Ray cluster: a placement group with one bundle of CPUs and GPUs for each node."""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from holdfast.config import Compute
from holdfast.errors import ConfigError, NodesMissing, RunStopped
from holdfast.extensions.ray.launcher import ADDRESS_VARIABLE, find_cluster_address
from holdfast.rank.rendezvous import LAST_CALL_S
from holdfast.terminal import counted, spell_s

REACHED_WITHIN_S = 5.0
LOOK_EVERY_S = 1.0
# If Ray is asked for fewer nodes than the largest number: the longest wait until it has reserved them. Ray reserves
# bundles in milliseconds, or in a second on a busy cluster.
RESERVED_WITHIN_S = 5.0
SHOWN_LETTERS = 300

Bundle = dict[str, float]


@dataclass(frozen=True)
class Placement:
    """The nodes that Ray has reserved for a run.

    Attributes:
        bundle: the resources that are reserved on each node.
        count: the number of reserved nodes.
        known: the ids of all nodes of the cluster that had a bundle's resources at the reservation, whether in use or
            free.
    """

    group: PlacementGroup
    bundle: Bundle
    count: int
    known: frozenset[str]


def connect() -> None:
    """Connect this process to the Ray cluster.

    Raises:
        ConfigError: RAY_ADDRESS asks for Ray Client, which isn't supported.
        NodesMissing: no cluster can be reached.
    """
    address = find_cluster_address()
    if "://" in address:
        raise ConfigError(
            f"{ADDRESS_VARIABLE}={address} is an address for Ray Client, which Holdfast doesn't support",
            hint="run the command on a node of the cluster, such as its head, or as a Ray job",
        )
    try:
        if address != "auto":
            _reach(address)  # fail early: ray.init tries to connect for minutes, and may then end the process
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise NodesMissing(
            f"no Ray cluster can be reached at {address} from {socket.gethostname()}: "
            f"{shorten(str(error), SHOWN_LETTERS)}",
            hint="check that the cluster runs, that this machine belongs to it, and that RAY_ADDRESS is the address "
            "of the cluster's GCS",
        ) from None


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), REACHED_WITHIN_S).close()


def make_bundle(compute: Compute) -> Bundle:
    """Return the resources of one node: a CPU for each rank, and a GPU if the run takes GPUs.

    With ``compute.device = "auto"`` the run takes GPUs if the cluster has any.
    """
    has_gpus = compute.device == "cuda" or (compute.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    ranks = float(compute.rank_count)
    return {"CPU": ranks, "GPU": ranks} if has_gpus else {"CPU": ranks}


def reserve_nodes(compute: Compute, is_wanted: Callable[[], bool]) -> Placement:
    """Reserve the run's nodes. Wait up to ``compute.wait_s`` seconds until the cluster has room.

    If the number of nodes is a range, ask for the largest number first. After the time for which torchrun's rendezvous
    would wait for more nodes, ask for fewer.

    Args:
        is_wanted: a function that returns whether the attempt still needs the ranks.

    Raises:
        NodesMissing: the cluster has no room in time for the smallest allowed number of nodes.
        RunStopped: the attempt doesn't need the ranks any more.
    """
    bundle = make_bundle(compute)
    least, most = compute.node_range
    deadline = time.monotonic() + compute.wait_s
    count, within_s = most, min(LAST_CALL_S, compute.wait_s / 2)
    while True:
        until = deadline if count == least else time.monotonic() + within_s
        if (group := _reserve(bundle, count, until, is_wanted)) is not None:
            return Placement(group, bundle, count, list_nodes(bundle))
        if count == least:
            raise _make_no_room_error(compute, bundle)
        count, within_s = max(least, min(count - 1, len(list_nodes(bundle)))), RESERVED_WITHIN_S


def _reserve(bundle: Bundle, count: int, until: float, is_wanted: Callable[[], bool]) -> PlacementGroup | None:
    """Reserve and return a placement group on ``count`` nodes; None if the cluster has no room by ``until``."""
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
    while not group.wait(LOOK_EVERY_S):
        if not is_wanted():
            raise RunStopped("the attempt ended while it waited for free room in the Ray cluster for its ranks")
        if time.monotonic() > until:
            remove_placement_group(group)
            return None
    return group


def list_nodes(bundle: Bundle) -> frozenset[str]:
    """Return the ids of the cluster's nodes that have a bundle's resources, whether in use or free."""
    return frozenset(name for name, node in list_alive().items() if _fits(node, bundle))


def list_alive() -> dict[str, dict[str, Any]]:
    """Return the cluster's nodes that Ray believes to be alive, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _fits(node: dict[str, Any], bundle: Bundle) -> bool:
    return all(node["Resources"].get(name, 0.0) >= amount for name, amount in bundle.items())


def _make_no_room_error(compute: Compute, bundle: Bundle) -> NodesMissing:
    """Return the error for a cluster without room for the smallest allowed number of nodes."""
    least, _ = compute.node_range
    nodes = list_alive().values()
    found = "; ".join(f"{node['NodeManagerHostname']} has {_describe_resources(node['Resources'])}" for node in nodes)
    wanted = _describe_resources(bundle)
    return NodesMissing(
        f"compute.nodes = {compute.nodes}: the Ray cluster at {find_cluster_address()} did not have "
        f"{counted(least, 'node')} with {wanted} free on each within {spell_s(compute.wait_s)}; {found}",
        hint="ray status shows what is in use; --set compute.wait_s=... waits longer",
    )


def _describe_resources(resources: Bundle) -> str:
    """Return a text for numbers of CPUs and GPUs, such as ``8 CPUs and 1 GPU``."""
    return " and ".join(counted(int(resources.get(name, 0)), name) for name in ("CPU", "GPU") if name in resources) or (
        "neither CPU nor GPU"
    )

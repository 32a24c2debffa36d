"""The connection of several nodes through torchrun's c10d rendezvous. The command on each node uses this module.

torchrun on node 0 serves the rendezvous at ``compute.rendezvous``, and torchrun on every other node connects to it.
torchrun numbers the nodes by their addresses. So the ranks are renumbered later, so that rank 0 is on node 0; see
`holdfast.rank.nodes`. This module imports no torch.
"""

import contextlib
import fcntl
import math
import os
import socket
import struct
from ipaddress import ip_address

from holdfast.config import Compute, RunConfig
from holdfast.config.slurm import find_job
from holdfast.errors import ConfigError, HoldfastError, NodesMissing
from holdfast.rank.process import NODE_VARIABLE, find_node, split_address
from holdfast.terminal import counted, spell_s

# The environment variables with the network interface for gloo and for NCCL. By default gloo binds the address of the
# machine's host name, which other machines often can't reach; and NCCL takes the first interface of its own list,
# which may be a container's bridge.
INTERFACE_VARIABLES = GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# The ioctl request for an interface's address, and the offsets of the address in the answer. Source: netdevice(7).
SIOCGIFADDR, ADDRESS = 0x8915, slice(20, 24)
LAST_CALL_S = 30  # torchrun's default: how long more nodes may join after the smallest number has joined
KILLS_AFTER_S = 30  # torchrun's default: how long a rank that was told to end may take
READ_WITHIN_S = 60  # torchrun's default timeout for one answer of the rendezvous, and for the first connection
# The exceptions of torchrun to look for in the ranks' log.
PORT_TAKEN, TOO_FEW, NOT_REACHED = "EADDRINUSE", "RendezvousTimeoutError", "RendezvousConnectionError"


def find_address(compute: Compute) -> str:
    """Return the address of this machine on the network of the rendezvous.

    Raises:
        NodesMissing: the host of the rendezvous has no address yet, or no route leads to it.
        ConfigError: the host of the rendezvous has a loopback address, which other machines can't reach.
    """
    host, port = split_address(compute)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # connecting a UDP socket sends no packet, but chooses the local address
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise NodesMissing(
            f"{name_rendezvous(compute)}: {host} can't be reached from {socket.gethostname()}: {error.strerror}",
            hint=_hint_at_address(compute),
        ) from None
    if ip_address(own).is_loopback and not is_loopback(host):
        raise ConfigError(
            f"{name_rendezvous(compute)}: on this node the name {host} means the address {own}, which no other node "
            "can reach",
            hint="give the IP address of node 0 instead of its name, which /etc/hosts may map to this address",
        )
    return own


def _hint_at_address(compute: Compute) -> str:
    """Return a hint for setting node 0's address. In a Slurm job it names the variable MASTER_ADDR."""
    job = find_job()
    if job is not None and job.address == compute.rendezvous:
        return "Slurm gives this name to the job's first node: set MASTER_ADDR to an address that all nodes can reach"
    return "give an address of node 0 that all nodes can reach"


def is_loopback(host: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address, by which only nodes on one machine can connect."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address; None if no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as request:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # skip an interface without an address
                answer = fcntl.ioctl(request, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[ADDRESS]) == address:
                    return name
    return None


def make_torchrun_arguments(config: RunConfig) -> list[str]:
    """Return torchrun's arguments about the nodes.

    Raises:
        ConfigError, NodesMissing: see `find_node` and `find_address`.
    """
    compute = config.compute
    wait_s = int(compute.wait_s)
    settings = {
        "is_host": "true" if find_node(compute) == 0 else "false",
        "join_timeout": wait_s,
        "last_call_timeout": min(LAST_CALL_S, wait_s // 2),
        "read_timeout": min(READ_WITHIN_S, wait_s),
    }
    return [
        f"--nnodes={compute.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={compute.rendezvous}",
        f"--rdzv-id={config.run}", f"--local-addr={find_address(compute)}",
        f"--shutdown-timeout={choose_kill_s(config)}",
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip


def choose_kill_s(config: RunConfig) -> int:
    """Return the seconds after which a rank that was told to end is killed: the time that a stop has.

    torchrun's own 30 s would cut the save of a run that has more time.
    """
    return max(KILLS_AFTER_S, math.ceil(config.resume.stop_within_s))


def make_variables(compute: Compute) -> dict[str, str]:
    """Return the environment variables of a rank of several nodes: its node's number, and the network interface.

    gloo and NCCL get the interface that leads to the rendezvous, or the interface that the environment names for gloo.
    An interface that the environment names for NCCL stays. If a launcher has started the ranks, instead of the attempt,
    no interface is set, because the launcher chooses it.
    """
    if not compute.has_nodes:
        return {}
    node = {NODE_VARIABLE: str(find_node(compute))}
    if compute.is_attached or all(name in os.environ for name in INTERFACE_VARIABLES):
        return node
    chosen = os.environ.get(GLOO_INTERFACE) or find_interface(find_address(compute))
    # NCCL takes a name as a prefix, unless "=" comes first.
    values = {GLOO_INTERFACE: chosen, NCCL_INTERFACE: f"={chosen}"} if chosen else {}
    return node | {name: value for name, value in values.items() if name not in os.environ}


def name_rendezvous(compute: Compute) -> str:
    """Return the setting of the rendezvous with its value, for messages."""
    return f"compute.rendezvous = {compute.rendezvous}"


def describe_node_wait(compute: Compute) -> str:
    """Return a line that says for how many nodes this node waits, where and for how long."""
    nodes = spell_nodes(compute)
    return f"waiting at {compute.rendezvous} for {nodes}, this one included, for up to {spell_s(compute.wait_s)}"


def spell_nodes(compute: Compute) -> str:
    """Return the number of nodes as a text, such as ``1 node`` or ``2 to 4 nodes``."""
    least, most = compute.node_range
    return counted(least, "node") if least == most else f"{least} to {most} nodes"


def _make_too_few_error(compute: Compute) -> NodesMissing:
    """Return the error for too few nodes."""
    least, _ = compute.node_range
    return NodesMissing(
        f"compute.nodes = {compute.nodes}: fewer than {counted(least, 'node')} connected to {compute.rendezvous} "
        f"within {spell_s(compute.wait_s)}",
        hint="start the same command on every node; --set compute.wait_s=... waits longer",
    )


def explain_end(text: str, compute: Compute) -> HoldfastError | None:
    """Return the error for nodes that couldn't connect, so that no rank started; None if the log shows no such error.

    Args:
        text: the log of torchrun and the ranks.
    """
    if not compute.has_nodes:
        return None
    if PORT_TAKEN in text:
        port = split_address(compute)[1]
        hint = "if another run is trained on this machine, choose another port, the same on all nodes"
        return NodesMissing(f"{name_rendezvous(compute)}: port {port} is taken on {socket.gethostname()}", hint=hint)
    if TOO_FEW in text:
        return _make_too_few_error(compute)
    if NOT_REACHED in text:
        return NodesMissing(
            f"{name_rendezvous(compute)} can't be reached from {socket.gethostname()}",
            hint="check that this is an address of node 0, that node 0 runs, and that no firewall blocks this node",
        )
    return None

"""The place that another launcher gave this process: torchrun, accelerate launch, srun, or one with their variables.

`holdfast.attach` takes its ranks from such a launcher. Any other command that starts an attempt refuses to be one of
several processes, because each of them would start the same attempt. Nothing here imports torch.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config import Compute
from holdfast.errors import ConfigError

# srun sets this for its tasks alone: a batch script has a number of tasks and a number 0 of its own, too.
STEP_SIZE = "SLURM_STEP_NUM_TASKS"
# One number of tasks, on each of several nodes: 4(x2). Nodes with different numbers are listed: 4,3.
TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")
# The first of several hosts: node1 of node[1-3,7], and of node1,node2. Source: scontrol(1), show hostnames.
FIRST_HOST = re.compile(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)")
FIRST_PORT, PORTS = 15000, 15000  # below the ports that Linux gives to clients
DOCS = "docs/launchers.md says how"


@dataclass(frozen=True)
class Slot:
    """The place of this process among those that a launcher started.

    Attributes:
        launcher: its name for messages; empty without a launcher.
        rank, size: this process among all of them, from 0, and their number.
        local_rank, local_size: likewise among those of this machine.
        node: this machine's number, from 0.
        address: host:port at which the processes meet; None for a process alone.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    address: str | None = None

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables by which torch finds the other processes."""
        if self.address is None:
            return {}
        host, _, port = self.address.rpartition(":")
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": host, "MASTER_PORT": port}


def find_slot(environ: Mapping[str, str] = os.environ) -> Slot:
    """Return the place that a launcher gave this process, as its variables say.

    Raises:
        ConfigError: a variable is missing or makes no sense, or the nodes have different numbers of processes.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        slot = _read_torchs(environ)
    elif "SLURM_PROCID" in environ and STEP_SIZE in environ:
        slot = _read_slurms(environ)
    else:
        return Slot()
    if not (slot.rank < slot.size and slot.local_rank < slot.local_size):
        raise ConfigError(
            f"{slot.launcher} gave this process rank {slot.rank} of {slot.size}, and {slot.local_rank} of "
            f"{slot.local_size} on this machine: expected numbers from 0"
        )
    if slot.size % slot.local_size:
        raise ConfigError(
            f"{slot.launcher} started {slot.size} processes, {slot.local_size} of them on this machine: "
            "expected the same number on each machine"
        )
    return slot


def _read_torchs(environ: Mapping[str, str]) -> Slot:
    """Return the place by the variables that torch reads."""
    launcher = name_launcher(environ)
    rank, size = _read_number(environ, "RANK"), _read_number(environ, "WORLD_SIZE")
    local_rank, local_size = 0, 1
    if "LOCAL_RANK" in environ:
        local_rank, local_size = _read_number(environ, "LOCAL_RANK"), _read_number(environ, "LOCAL_WORLD_SIZE")
    node = _read_number(environ, "GROUP_RANK") if "GROUP_RANK" in environ else rank // max(1, local_size)
    if size == 1 and "MASTER_ADDR" not in environ:
        return Slot(launcher)
    address = f"{_read(environ, 'MASTER_ADDR')}:{_read_number(environ, 'MASTER_PORT')}"
    return Slot(launcher, rank, size, local_rank, local_size, node, address)


def _read_slurms(environ: Mapping[str, str]) -> Slot:
    """Return the place by the variables of a task of srun."""
    tasks = TASKS.fullmatch(text := _read(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if tasks is None:
        raise ConfigError(
            f"srun started {text} processes on its nodes: expected the same number on each",
            hint="srun --ntasks-per-node=... with as many nodes",
        )
    host = FIRST_HOST.match(_read(environ, "SLURM_STEP_NODELIST"))
    assert host is not None
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    size = _read_number(environ, STEP_SIZE)
    first = "127.0.0.1" if size == int(tasks[1]) else "".join(part or "" for part in host.groups())
    port = environ.get("MASTER_PORT") or FIRST_PORT + (31 * job + step) % PORTS
    return Slot(
        "srun",
        _read_number(environ, "SLURM_PROCID"),
        size,
        _read_number(environ, "SLURM_LOCALID"),
        int(tasks[1]),
        _read_number(environ, "SLURM_NODEID"),
        f"{environ.get('MASTER_ADDR') or first}:{port}",
    )


def _read(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(
            f"{name_launcher(environ)} started this process without {name}", hint="start it with torchrun or srun"
        )
    return environ[name]


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = _read(environ, name)
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}: expected a number, as a launcher sets it")
    return int(text)


def name_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the launcher for messages."""
    if any(name.startswith("ACCELERATE_") for name in environ):
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    return "srun" if "SLURM_PROCID" in environ else "a launcher"


def count_processes(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher has started of this command; 1 if none has, or its variables say nothing."""
    sizes = [environ.get("WORLD_SIZE", "")] if "RANK" in environ else []
    sizes += [environ.get("LOCAL_WORLD_SIZE", "")] if "LOCAL_RANK" in environ else []
    sizes += [environ.get(STEP_SIZE, "")] if "SLURM_PROCID" in environ else []
    return max([1, *(int(size) for size in sizes if size.isdecimal())])


def refuse_launcher(compute: Compute, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to start an attempt as one of several processes of a launcher: each of them would start it.

    With several nodes in the configuration one command on each is expected; see `holdfast.rank.rendezvous`.

    Raises:
        ConfigError: a launcher has started several processes.
    """
    count, launcher = count_processes(environ), name_launcher(environ)
    if count > 1 and not compute.has_nodes:
        raise ConfigError(
            f"{launcher} has started {count} processes of this command, and each would train the run: the command "
            "starts its ranks itself",
            hint=f"start it once, with --set compute.ranks={count}; or let {launcher} start a script that calls "
            f"holdfast.attach; {DOCS}",
        )

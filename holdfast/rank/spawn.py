"""The process of a single rank, or of the launcher of several: its command, environment and start."""

import os
import subprocess
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import IO, BinaryIO, Protocol, cast

from holdfast.config import Compute, RunConfig
from holdfast.extending import load_launcher
from holdfast.machine import determinism
from holdfast.machine.processes import MEETING_VARIABLE, RANK_MODULE
from holdfast.rank import rendezvous
from holdfast.rank.local import make_local_command
from holdfast.rank.process import COMMIT_VARIABLE, CONFIG_VARIABLE
from holdfast.store.modules import python_command, spell_module_path

# The environment variables in which torchrun, accelerate, MPI and Slurm tell a process its rank. In a pod, a training
# operator sets them, too. A rank must not inherit them, because it would wait for processes that don't exist, or train
# in another precision.
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "PET_*", "ACCELERATE_*", "FSDP_*", "FORK_LAUNCHED", "PMI_*",
    "PMIX_*", "MPI_LOCAL*", "OMPI_COMM_WORLD_*", "MV2_COMM_WORLD_*", MEETING_VARIABLE,
)  # fmt: skip


class Process(Protocol):
    """The part of the interface of `subprocess.Popen` that `Ranks` uses, with two text pipes."""

    stdin: IO[str]
    stdout: IO[str]

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Spawn(Protocol):
    """A function that starts a process in a new session, with text pipes as standard input and output.

    Args:
        command: the program and its arguments.
        environment: all environment variables of the process.
        log: the open file for the process's standard error.
    """

    def __call__(self, command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process: ...


class ClusterLauncher(Protocol):
    """A launcher of an extension, which takes torchrun's place and starts the ranks on the nodes of a cluster.

    Its process gets an attempt's orders as standard input. Standard output is for the ranks' events, and standard error
    is the attempt's log. The environment has the configuration; see `make_environment`.
    """

    def make_command(self, config: RunConfig) -> list[str]:
        """Return the command of the process.

        Raises:
            ConfigError: the launcher's packages aren't installed.
        """
        ...

    def describe_wait(self, compute: Compute) -> str:
        """Return a line that says for what the process waits before it starts the ranks, where and for how long."""
        ...


def start_process(command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process:
    """Start a process; see `Spawn`."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        encoding="utf-8",
        bufsize=1,
        start_new_session=True,
    )
    return cast(Process, process)  # Popen's type allows None for the pipes, but here they are set


def make_command(config: RunConfig) -> list[str]:
    """Return the command that starts the ranks: one rank directly, several through `holdfast.rank.local`.

    torchrun starts the ranks of several nodes, or an extension's launcher does.

    Raises:
        ConfigError, NodesMissing: several nodes can't connect; see `holdfast.rank.rendezvous`.
        ConfigError: no extension has the launcher, or the launcher can't start the ranks.
    """
    if config.compute.has_cluster:
        launcher: ClusterLauncher = load_launcher(config.compute.launcher)
        return launcher.make_command(config)
    rank = python_command("-m", RANK_MODULE)
    if not config.compute.has_several:
        return rank
    if not config.compute.has_nodes:
        return make_local_command(config.compute.rank_count, rendezvous.choose_kill_s(config), rank)
    meeting = rendezvous.make_torchrun_arguments(config)
    torchrun = python_command("-m", "torch.distributed.run", *meeting, "--no-python")
    return [*torchrun, f"--nproc-per-node={config.compute.rank_count}", *rank]


def describe_rank_wait(compute: Compute) -> str:
    """Return a line that says for which nodes the ranks wait, where and for how long."""
    if compute.has_cluster:
        launcher: ClusterLauncher = load_launcher(compute.launcher)
        return launcher.describe_wait(compute)
    return rendezvous.describe_node_wait(compute)


def is_launchers(name: str) -> bool:
    """Return whether a launcher sets the environment variable of this name for its processes."""
    return any(fnmatchcase(name, pattern) for pattern in LAUNCHER_VARIABLES)


def make_environment(config: RunConfig, commit: int) -> dict[str, str]:
    """Return the environment variables of the ranks' processes.

    Args:
        commit: the number of the commit that the attempt will probably restore; 0 for none.
    """
    kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    return {
        **determinism.choose_collectives(config.determinism),
        **determinism.choose_spins(os.environ),
        **kept,
        **determinism.preamble(config.determinism),
        **rendezvous.make_variables(config.compute),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        "PYTHONUTF8": "1",  # so that a recipe's open() decodes text equally on every machine, whatever the locale
        "PYTHONPATH": spell_module_path(),
        CONFIG_VARIABLE: config.model_dump_json(),
        COMMIT_VARIABLE: str(commit),
    }

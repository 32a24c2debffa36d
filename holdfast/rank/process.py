"""The process of a rank, or of the torchrun that starts several: its command, its environment, and its start."""

import os
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from holdfast import determinism
from holdfast.config import RunConfig
from holdfast.processes import RANK_MODULE
from holdfast.rank.prefetch import COMMIT_VARIABLE, CONFIG_VARIABLE

# How torchrun, accelerate, MPI and Slurm tell a process its place among others. Inherited, as in a pod of a training
# operator, they would make a rank of ours wait for processes that never come, or choose another precision.
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "PET_*", "ACCELERATE_*", "FSDP_*", "FORK_LAUNCHED", "PMI_*",
    "PMIX_*", "MPI_LOCAL*", "OMPI_COMM_WORLD_*", "MV2_COMM_WORLD_*",
)  # fmt: skip


class Process(Protocol):
    """What `Ranks` needs of a process: what `subprocess.Popen` has with two pipes of text."""

    stdin: IO[str]
    stdout: IO[str]

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class Spawn(Protocol):
    """Starts a process in a session of its own, with pipes of text as its standard input and output.

    Args:
        command: the program and its arguments.
        environment: all of the process's variables.
        log: the open file that takes its standard error.
    """

    def __call__(self, command: Sequence[str], environment: dict[str, str], log: BinaryIO) -> Process: ...


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
    return cast(Process, process)  # whose pipes are never None here


def make_command(config: RunConfig) -> list[str]:
    """Return the command that starts a configuration's ranks."""
    rank = ["-m", RANK_MODULE]
    if config.compute.ranks == 1:
        return [sys.executable, *rank]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.compute.ranks}"]
    return [sys.executable, *torchrun, *rank]


def is_launchers(name: str) -> bool:
    """Return whether another launcher tells a process its place by the environment variable of this name."""
    return any(fnmatchcase(name, pattern) for pattern in LAUNCHER_VARIABLES)


def make_environment(config: RunConfig, commit: int) -> dict[str, str]:
    """Return the environment of ranks that will probably restore a commit, 0 for none."""
    # The recipe is imported by the ranks: what the attempt can import, they can.
    paths = [str(Path(path).absolute()) for path in sys.path]
    kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    return {
        **kept,
        **determinism.preamble(config.determinism),
        "PYTHONUTF8": "1",  # a recipe's open() reads the same text on every machine, whatever the locale
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        CONFIG_VARIABLE: config.model_dump_json(),
        COMMIT_VARIABLE: str(commit),
    }

"""The diagnosis of ranks that ended without reporting an error, from exit code, log and the kernel's counters."""

import contextlib
import itertools
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import ConfigError, OutOfMemory, RankDied
from holdfast.provenance.ownership import is_own_file

# How many lines of the log an error shows.
LAST_LINES = 3
# Each line that torchrun, or `holdfast.rank.local`, itself writes to the ranks' log contains one of these texts.
STARTERS = ("torch/distributed/elastic", "holdfast.rank.local: ")
# A warning of Python, with its line of code: libraries print some in each rank, and none is the cause of an end.
WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:  .*\n)?", re.M)
_FRAME = re.compile(r'^ *File "(.+)", line (\d+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
# faulthandler writes this line above the stacks of a process that crashes.
CRASH = "Fatal Python error: "
# The files in which the kernel counts the processes that it killed because memory ran out. The first one that exists is
# read: of this container (cgroup 2, or 1), or of the machine.
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


class RankLog:
    """The log of one set of ranks, in the file `path`, from the byte at which the log of earlier ranks ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begins = path.stat().st_size if path.exists() else 0
        self._oom_kills = count_oom_kills()

    def open(self) -> BinaryIO:
        """Open the log for the ranks to append to.

        Raises:
            ConfigError: the file or its folder can't be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self.path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"the log {self.path} of the ranks' output can't be written: {error.strerror}",
                hint='--set log.folder="..."',
            ) from None

    def describe_end(self, known: int | str) -> RankDied | OutOfMemory:
        """Return the error for ranks that ended without reporting one.

        Args:
            known: the return code of the rank, or of the process that started several ranks; if the code is unknown, a
                text about the end.
        """
        lines = self.read().splitlines()
        crash = list(itertools.dropwhile(lambda line: not line.startswith(CRASH), lines))
        place = find_user_line(crash)
        told = known if isinstance(known, str) else _name_ending(known)
        ending = (_find_first_failure(lines) or told) + (f" at {place}" if place else "")
        lines = list(itertools.takewhile(lambda line: not line.startswith(CRASH) and not _is_starters(line), lines))
        lines = WARNING.sub("", "\n".join([*lines, ""])).splitlines()[-LAST_LINES:]
        last = f" (last lines of {self.path}: {' | '.join(line.strip() for line in lines)})" if lines else ""
        if count_oom_kills() > self._oom_kills:
            return OutOfMemory(f"the kernel killed a rank because memory ran out ({ending}){last}")
        return RankDied(f"the ranks ended: {ending}{last}")

    def read(self) -> str:
        """Return the output of these ranks; empty if the file can't be read."""
        with contextlib.suppress(OSError), self.path.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")
        return ""


def find_user_line(lines: Sequence[str]) -> str:
    """Return the innermost line of the user's code in the stacks that faulthandler wrote, as ``file:line``.

    Search the current thread first, then the other threads, oldest first. Return an empty text if no thread has such a
    line.
    """
    threads: list[list[str]] = [[]]
    for line in lines:
        if _THREAD.match(line):
            threads.append([])
        threads[-1].append(line)
    current = [thread for thread in threads[1:] if thread[0].startswith("Current")]
    for thread in (*current, *reversed(threads)):
        for frame in filter(None, map(_FRAME.match, thread)):
            if is_own_file(frame[1]):
                return f"{frame[1]}:{frame[2]}"
    return ""


def _is_starters(line: str) -> bool:
    return any(text in line for text in STARTERS)


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out, in this container or on this machine."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            return sum(
                int(line.split()[1])
                for line in Path(path).read_text("utf-8").splitlines()
                if line.startswith("oom_kill ")
            )
    return 0


def _find_first_failure(lines: Sequence[str]) -> str:
    """Return how the first failed rank ended; empty if the process that started the ranks has logged no failure.

    A rank that a signal has killed counts as the first, even if another rank was seen to end earlier: a rank that
    loses its connection to a dead rank ends with an exit code, or aborts (SIGABRT) under NCCL. SIGTERM doesn't count,
    because that process itself sends it to the remaining ranks.
    """
    text = "\n".join(lines)
    first = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
    listed = re.findall(r"\(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+)", text)
    found = [(int(rank), int(code)) for code, rank in first] + [(int(rank), int(code)) for rank, code in listed]
    killed = [(rank, code) for rank, code in found if code < 0 and -code != signal.SIGTERM]
    killed.sort(key=lambda each: -each[1] == signal.SIGABRT)
    return next((f"rank {rank}: {_name_ending(code)}" for rank, code in [*killed, *found]), "")


def _name_ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    return f"signal {-returncode}{names.get(-returncode, '')}"

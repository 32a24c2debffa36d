"""The processes of an attempt's ranks, found by a marker (an environment variable) that only they have."""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

# Every process of an attempt's ranks has this variable, with a value that is unique to the attempt's ranks.
MARK_VARIABLE = "HOLDFAST_RANKS"
# The environment variable of ranks with the process id of the attempt that has started them.
ATTEMPT_VARIABLE = "HOLDFAST_ATTEMPT"
# The environment variable with the largest number of steps of an epoch; 0 for no limit. `holdfast prove` sets it to
# shorten the epochs.
LONGEST_EPOCH_VARIABLE = "HOLDFAST_LONGEST_EPOCH"
# The environment variable with the path of the file through which the ranks of one machine find each other.
MEETING_VARIABLE = "HOLDFAST_MEETING"
RANK_MODULE = "holdfast.rank"
# The files with this container's memory limit and its memory in use, in bytes (cgroup 2, then 1).
CGROUP_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
AUTOGRAD = "pt_autograd"  # the names that torch gives the threads of its backward passes
STOPPED = "T"  # the state of a process after SIGSTOP
# Indices of fields in /proc/PID/stat, counted from the field of the state.
UTIME, STIME, NUM_THREADS, STARTED = 11, 12, 17, 19


def find_processes(mark: str) -> list[int]:
    """Return the ids of the processes with this marker: ranks, a process that started ranks, and loaders' workers.

    Other programs that a recipe has started inherit the marker; they are recognized by their command line and excluded.
    The search works only on Linux.
    """
    names = os.listdir("/proc") if Path("/proc/self/environ").exists() else []
    return [int(name) for name in names if name.isdecimal() and _has_mark(Path("/proc", name), mark)]


def _has_mark(process: Path, mark: str) -> bool:
    with contextlib.suppress(OSError):  # ignore a process that has ended, or that belongs to another user
        variables = (process / "environ").read_bytes().split(b"\0")
        return f"{MARK_VARIABLE}={mark}".encode() in variables and is_rank(int(process.name))
    return False


def is_rank(pid: int) -> bool:
    """Return whether a process is a rank, or started several ranks, by its command line."""
    return RANK_MODULE.encode() in read_command(pid)


def read_command(pid: int) -> list[bytes]:
    """Return the words of a process's command line; an empty list if it can't be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def leads_session(pid: int) -> bool:
    """Return whether a process leads a session.

    The ranks, and the process that started several, lead sessions. A loader worker doesn't; it ends when its rank has
    ended.
    """
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended. A zombie without other threads has ended.

    A killed process becomes a zombie when its main thread has ended. Until its other threads have ended, too, the
    process still occupies memory, GPU and ports.
    """
    fields = _read_stat(pid)
    return fields[0] not in ("", "Z", "X") or int(fields[NUM_THREADS]) > 1


def read_process(pid: int) -> tuple[str, float]:
    """Return the state of a process as one letter, and the seconds of processor time that it has used.

    The state is the main thread's state; empty if it can't be read.
    """
    fields = _read_stat(pid)
    return fields[0], (int(fields[UTIME]) + int(fields[STIME])) / os.sysconf("SC_CLK_TCK")


def read_training_s(pid: int) -> float:
    """Return the seconds of processor time that the training threads of a process have used.

    These are the main thread and autograd's threads. The threads of CUDA and NCCL, which may poll while the others
    wait, don't count.

    Source: Linux's Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat, whose first field is nanoseconds.
    """
    used_ns = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError, ValueError):  # ignore a thread that has just ended
            if task.name == str(pid) or (task / "comm").read_text("utf-8", "replace").startswith(AUTOGRAD):
                used_ns += int((task / "schedstat").read_text("utf-8").split()[0])
    return used_ns / 1e9


def read_age(pid: int) -> float:
    """Return the seconds since a process began; 0 if that can't be read.

    Source: proc(5), /proc/PID/stat, starttime: the clock ticks since the machine's start.
    """
    fields = _read_stat(pid)
    if len(fields) <= STARTED:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty state and zeros if the file can't be read.

    Source: proc(5), /proc/PID/stat, whose third field is the state.
    """
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        if len(fields) > NUM_THREADS:
            return fields
    return ["", *["0"] * NUM_THREADS]


def measure_memory(pids: Iterable[int]) -> int:
    """Return the bytes of memory that some processes use. A process that can't be read counts as 0."""
    return sum(_read_number(Path(f"/proc/{pid}/status"), "VmRSS:") for pid in pids) * 1024


def find_free_memory() -> int:
    """Return the bytes of memory that a new process can have on this machine, or in this container; 0 if unknown."""
    free = [_read_number(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for limit, used in CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):  # ignore the text "max", which means no limit
            cached = Path(used).with_name("memory.stat")
            left = int(Path(limit).read_text("utf-8")) - int(Path(used).read_text("utf-8"))
            # the container's memory in use includes files in the page cache, which the kernel frees on demand
            free.append(left + _read_number(cached, "inactive_file "))
    return max(0, min(free))


def _read_number(path: Path, name: str) -> int:
    """Return the number after a name in a kernel's file, such as 5120 in ``VmRSS: 5120 kB``; 0 without this name."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0

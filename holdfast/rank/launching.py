"""Start, watch, command and end the ranks of an attempt."""

import contextlib
import itertools
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, BinaryIO, Self, TypeVar

from pydantic import BaseModel

from holdfast import determinism
from holdfast.config import RunConfig
from holdfast.errors import ConfigError, HoldfastError, OutOfMemory, RankDied, RunStopped
from holdfast.journal import Commit
from holdfast.probe import Gate
from holdfast.processes import LONGEST_EPOCH_VARIABLE, MARK_VARIABLE, RANK_MODULE, find_processes, leads_session
from holdfast.rank.messages import (
    Begin,
    Begun,
    End,
    Evaluate,
    Evaluated,
    Event,
    Examine,
    Examined,
    Failed,
    Order,
    Problem,
    Restore,
    Restored,
    Save,
    Skipped,
    Stop,
    Train,
    Woken,
    decode_event,
    encode,
)
from holdfast.rank.prefetch import COMMIT_VARIABLE, CONFIG_VARIABLE

log = logging.getLogger(__name__)

LAST_LINES = 3
END_WITHIN_S = 5.0
# How torchrun, accelerate, MPI and Slurm tell a process its place among others. Inherited, as in a pod of a training
# operator, they would make a rank of ours wait for processes that never come, or choose another precision.
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "PET_*", "ACCELERATE_*", "FSDP_*", "FORK_LAUNCHED", "PMI_*",
    "PMIX_*", "MPI_LOCAL*", "OMPI_COMM_WORLD_*", "MV2_COMM_WORLD_*",
)  # fmt: skip
# Where torchrun's own lines in the ranks' log come from.
TORCHRUN = "torch/distributed/elastic"
# The container's own by cgroup 2 and 1, then the machine's.
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


E = TypeVar("E", bound=BaseModel)
F = TypeVar("F", bound=BaseModel)
Events = queue.SimpleQueue[Event | None]


class Ranks:
    """The ranks of one attempt, as processes of their own session.

    A signal to the attempt's process group (Ctrl-C in a terminal) doesn't reach them: they learn of it through the
    command pipe, whose end also tells them of the attempt's death.

    Attributes:
        began: when they were started, as `time.monotonic` has it.
    """

    def __init__(self, config: RunConfig, log_path: Path, commit: int = 0, longest_epoch: int = 0) -> None:
        """
        Args:
            commit: the number of the run's commit that will probably be restored; it is read at once.
            longest_epoch: the steps to which an epoch is cut, for a proof; 0 for no cut.
        """
        self.log_path = log_path
        self.began = time.monotonic()
        self._oom_kills = count_oom_kills()
        self._has_several = config.compute.ranks > 1
        self._mark = uuid.uuid4().hex
        self._log_begins = log_path.stat().st_size if log_path.exists() else 0
        with _open_log(log_path) as log:
            self._process = subprocess.Popen(
                _command(config),
                env=_environment(config, commit)
                | {MARK_VARIABLE: self._mark, LONGEST_EPOCH_VARIABLE: str(longest_epoch)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                bufsize=1,
                start_new_session=True,
            )
        self._events: Events = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Ranks whose last owner is gone end: a signal may have come between their start and whoever is to own them.
        weakref.finalize(self, self._process.stdin.close)
        # A thread, since a signal in the midst of a read would lose the line. It keeps the pipe alone, not this object.
        threading.Thread(target=_read, args=(self._process.stdout, self._events), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to every process of the ranks, loader workers included.

        A process group isn't enough: torchrun starts each rank in a session of its own, and a rank outlives it.
        """
        with contextlib.suppress(ProcessLookupError):  # torchrun comes first: it would answer a rank's death
            os.killpg(self.pid, number)
        for pid in self._find_others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _find_others(self) -> list[int]:
        """Return the processes outside of our child's group; a rank that is alone has none. The search takes 0.1 s."""
        return find_processes(self._mark) if self._has_several else []

    # ---- events

    def next_event(self, within_s: float | None = None) -> Event:
        """Return the next event, which is no `Failed`.

        Raises:
            HoldfastError: a rank reported this error.
            RankDied: the ranks ended without a report, or sent nothing for ``within_s`` seconds.
            OutOfMemory: the kernel has killed a rank because memory ran out.
        """
        try:
            event = self._events.get(timeout=within_s)
        except queue.Empty:
            raise RankDied(f"the ranks said nothing for {within_s:.0f} s", is_silent=True) from None
        if event is None:
            raise self._describe_end()
        if isinstance(event, Failed):
            error = event.error
            raise self._find_cause() or error if error.data.get("is_effect") else error
        return event

    def expect(self, kind: type[E], *others: type[F]) -> E | F:
        """Return the next event, which has to be of one of these classes; log on the way what is skipped of a stream.

        Raises:
            HoldfastError: as `next_event`.
            RunStopped: it is of another class.
        """
        while isinstance(event := self.next_event(), Skipped | Woken):  # a caller that waits for progress asks later
            if isinstance(event, Skipped):
                log.info("reading the data again from its head: micro-batch %d of %d", event.done, event.total)
        if isinstance(event, kind):
            return event
        for other in others:
            if isinstance(event, other):
                return event
        raise RunStopped(f"a rank reported {type(event).__name__} where {kind.__name__} was expected")

    def wake(self) -> None:
        """Give whoever waits for the next event a `Woken`; from any thread."""
        self._events.put(Woken())

    def _find_cause(self) -> HoldfastError | None:
        """Return what the ranks ended by, after one of them has lost another; None if they don't end."""
        with contextlib.suppress(queue.Empty):
            while event := self._events.get(timeout=END_WITHIN_S):
                if isinstance(event, Failed) and not event.data.get("is_effect"):
                    return event.error
            return self._describe_end()
        return None

    def _describe_end(self) -> HoldfastError:
        """Return the error that the ranks have ended by without reporting one."""
        self._events.put(None)  # the end stays the end
        returncode = self._process.wait()
        lines = self._read_log().splitlines()
        ending = _find_ending(lines) or _ending(returncode)
        lines = list(itertools.takewhile(lambda line: TORCHRUN not in line, lines))[-LAST_LINES:]
        last = f" (last lines of {self.log_path}: {' | '.join(line.strip() for line in lines)})" if lines else ""
        if count_oom_kills() > self._oom_kills:
            return OutOfMemory(f"the kernel killed a rank for want of memory ({ending}){last}")
        return RankDied(f"the ranks ended: {ending}{last}")

    def _read_log(self) -> str:
        """Return what these ranks have written to their log, which earlier ones may have begun."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(self._log_begins)
            return log.read().decode(errors="replace")
        return ""

    # ---- orders

    def _order(self, order: Order) -> None:
        """Send an order. If the ranks are dead, the next call for an event says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: they were ended before
            self._process.stdin.write(encode(order))
            self._process.stdin.flush()

    def restore(self, commit: Commit, gate: Gate) -> Restored | Problem:
        """Restore a commit's state and pass the gate; return the event that came of it.

        Raises:
            HoldfastError: as `next_event`.
        """
        self._order(Restore(commit=commit, gate=gate))
        return self.expect(Restored, Problem)

    def begin(self, store: str, run: str, commit: Commit) -> Begun | Problem:
        """Load the weights of another run's checkpoint; return the event that came of it.

        Raises:
            HoldfastError: as `next_event`.
        """
        self._order(Begin(store=store, run=run, commit=commit))
        return self.expect(Begun, Problem)

    def train(self, stop: int, fingerprint: str, into: str = "", *, is_detailed: bool = False) -> None:
        """Order the steps until ``stop``, and a checkpoint of it; see `Train`."""
        self._order(Train(stop=stop, fingerprint=fingerprint, into=into, is_detailed=is_detailed))

    def save(self) -> None:
        """Order a checkpoint after the current step; training goes on."""
        self._order(Save())

    def stop(self, within_s: float | None = None) -> None:
        """Order a checkpoint and the end: after the step in hand, or in the last moment that is safe."""
        self._order(Stop(within_s=within_s))

    def evaluate(self) -> Evaluated:
        """Return what the model evaluates to."""
        self._order(Evaluate())
        return self.expect(Evaluated)

    def examine(self) -> Examined:
        """Return the unregistered state, and what happens at which step."""
        self._order(Examine())
        return self.expect(Examined)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self, within_s: float = END_WITHIN_S) -> None:
        """End every process of the ranks: order it, then send SIGTERM, then SIGKILL.

        Args:
            within_s: how long each of the first two may take.
        """
        self._order(End())
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._has_ended(within_s):
                return
            self.signal(number)
        self._process.wait()
        self._has_ended(within_s)

    def _has_ended(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while is_left := self.is_alive() or any(map(leads_session, self._find_others())):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return not is_left


def _read(pipe: IO[str], events: Events) -> None:
    """Put the events that arrive into a queue, and None at their end."""
    try:
        with pipe as lines:
            for line in lines:
                events.put(decode_event(line))
    except RunStopped as error:
        events.put(Failed.of(error))
    finally:
        events.put(None)


# Ranks that nobody commands yet, and what they were started with.
_ahead: list[tuple[tuple[RunConfig, Path, int], Ranks]] = []


@contextlib.contextmanager
def started_ahead(config: RunConfig, log_path: Path, commit: int) -> Iterator[None]:
    """Start ranks for whoever calls `start` inside the block; those that nobody took over end with it."""
    _ahead.append(((config, log_path, commit), Ranks(config, log_path, commit)))
    try:
        yield
    finally:
        while _ahead:
            _ahead[-1][1].end()
            _ahead.pop()


def start(config: RunConfig, log_path: Path, commit: int) -> Ranks:
    """Return ranks: those that were started ahead with the same arguments, or new ones."""
    while _ahead:
        arguments, ranks = _ahead[-1]
        if arguments == (config, log_path, commit):
            _ahead.pop()
            return ranks
        ranks.end()
        _ahead.pop()
    return Ranks(config, log_path, commit)


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory: in this container, or else on this machine."""
    for path in OOM_COUNTERS:
        with contextlib.suppress(OSError, ValueError):
            return sum(
                int(line.split()[1])
                for line in Path(path).read_text("utf-8").splitlines()
                if line.startswith("oom_kill ")
            )
    return 0


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ConfigError(
            f"the ranks' output can't be written to {path}: {error.strerror}", hint='--set log.folder="..."'
        ) from None


def _command(config: RunConfig) -> list[str]:
    rank = ["-m", RANK_MODULE]
    if config.compute.ranks == 1:
        return [sys.executable, *rank]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.compute.ranks}"]
    return [sys.executable, *torchrun, *rank]


def is_launchers(name: str) -> bool:
    """Return whether another launcher tells a process its place by the environment variable of this name."""
    return any(fnmatchcase(name, pattern) for pattern in LAUNCHER_VARIABLES)


def _environment(config: RunConfig, commit: int) -> dict[str, str]:
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


def _find_ending(lines: Sequence[str]) -> str:
    """Return how the first rank ended, as torchrun says in the log: by a signal, if one did; empty if it doesn't say.

    A rank that has lost another ends with an exit code, and torchrun may see that first; it lists all failures at the
    end. SIGTERM is what it sends to the rest itself.
    """
    text = "\n".join(lines)
    first = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", text)
    listed = re.findall(r"\(local_rank: (\d+)\)\s+exitcode\s*: (-?\d+)", text)
    found = [(int(rank), int(code)) for code, rank in first] + [(int(rank), int(code)) for rank, code in listed]
    killed = [(rank, code) for rank, code in found if code < 0 and -code != signal.SIGTERM]
    return next((f"rank {rank}: {_ending(code)}" for rank, code in [*killed, *found]), "")


def _ending(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"

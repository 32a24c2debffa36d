"""The heartbeat of each rank: a few numbers about the rank's activity, in memory shared with the attempt.

A rank writes the numbers while it trains, which costs four microseconds a step, and never waits for a reader.
The watches over the ranks read the numbers once a second. Nothing here imports torch.
"""

import contextlib
import enum
import faulthandler
import math
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.machine.host import name_host

# The environment variable with the path of the file that the ranks of this machine share with their attempt.
HEARTBEATS_VARIABLE = "HOLDFAST_HEARTBEATS"
# A rank that gets this signal writes the stacks of its threads to its standard error. The signal isn't SIGUSR1, because
# batch systems announce the end of a job with SIGUSR1, and a user's loop may handle it.
STACKS_SIGNAL = signal.SIGUSR2
GPU = ", GPU "
RECORD_BYTES = 256
NUMBERS = 8  # the integers of a rank's record: process, phases, phase, place, marks, step, rank, standing


class Phase(enum.IntEnum):
    """The work that a rank is doing. A watch may have a time limit for each phase."""

    BUILDING = 0
    WAITING = 1
    """The rank waits for an order."""
    RESTORING = 2
    STEP = 3
    EVALUATING = 4
    SAVING = 5


# The phases whose durations are measured.
MEASURED = (Phase.STEP, Phase.EVALUATING)
SUMS = 2  # two numbers of a record: the seconds in whole steps, and how many of these seconds were spent at SYNCING
TEXT_AT = 8 * (NUMBERS + len(MEASURED) + SUMS)


class Place(enum.IntEnum):
    """The activity of a rank within its phase."""

    COMPUTING = 0
    LOADING = 1
    SYNCING = 2
    """The rank waits for the other ranks, or is about to wait."""
    DEVICE = 3
    """The rank waits for its own GPU to complete the steps in its queue."""


class RankStanding(enum.IntEnum):
    """A rank's relation to the other ranks: it trains with them, or is about to end."""

    TRAINING = 0
    LEAVING = 1
    """The rank trains no further, and may still save."""
    SAVED = 2
    """The rank has lost another rank, and has saved the last completed step."""
    REFUSED = 3
    """The rank ends because of its own error. That may mean that the last completed step must not be saved."""


@dataclass(frozen=True)
class Beat:
    """A rank's heartbeat, as read at one moment.

    Attributes:
        pid: the rank's process id.
        phases: the number of phases that the rank has begun.
        marks: how many times the rank's place has changed.
        step: the step that the rank trains; in phases without training, the step that it trained last.
        standing: whether the rank still trains with the others.
        longest_s: the longest step and the longest evaluation so far, in seconds; 0 if there was none. The process's
            first step doesn't count, because it also compiles, starts loader workers and connects the ranks.
        steps_s: the seconds that the rank has spent in whole steps; the process's first step doesn't count.
        syncing_s: the part of these seconds that the rank has spent at the place SYNCING.
        where: the rank's host, and its GPU if it has one.
    """

    pid: int
    phases: int
    phase: Phase
    place: Place
    marks: int
    step: int
    standing: RankStanding
    longest_s: Mapping[Phase, float]
    steps_s: float
    syncing_s: float
    where: str

    @property
    def has_gpu(self) -> bool:
        """Return whether the rank trains on a GPU."""
        return GPU in self.where

    @property
    def position(self) -> tuple[int, bool, int]:
        """Return the rank's progress as a tuple; the rank that is behind has the smaller tuple.

        `marks` comes last, because ranks may pass different numbers of places before they wait for each other.
        """
        return self.phases, self.place is Place.SYNCING, self.marks


class Heartbeats:
    """The heartbeats of the ranks on this machine, for their attempt.

    Attributes:
        path: the file that the ranks share with their attempt; `close` deletes it.
    """

    def __init__(self, ranks: int) -> None:
        """
        Raises:
            ConfigError: the file can't be written.
        """
        try:
            number, name = tempfile.mkstemp(prefix="holdfast-")
            os.close(number)
            self.path = Path(name)
            self.path.write_bytes(bytes(RECORD_BYTES * ranks))
        except OSError as error:
            raise ConfigError(
                f"the ranks can't write their heartbeats into the folder for temporary files: {error.strerror}",
                hint="set TMPDIR to a folder that can be written",
            ) from None
        self._memory = _map(self.path)

    def read(self) -> dict[int, Beat]:
        """Return the heartbeat of each rank that has one, by rank."""
        return _read_all(self._memory)

    def close(self) -> None:
        """Delete the file. Ranks that have joined keep the shared memory, and no other rank can join any more."""
        self.path.unlink(missing_ok=True)


class Heartbeat:
    """The heartbeat of this process, a rank."""

    def __init__(self, path: Path, rank: int, number: int | None = None) -> None:
        """
        Args:
            number: the rank's number on this machine; by default the rank's number among all ranks.

        Raises:
            OSError, ValueError, IndexError: there is no such file, or it has no record of this number.
        """
        number = rank if number is None else number
        self._memory = _map(path)
        record = memoryview(self._memory)[number * RECORD_BYTES : (number + 1) * RECORD_BYTES]
        self._numbers = record[:TEXT_AT].cast("q")
        self._longest = record[:TEXT_AT].cast("d")[NUMBERS:-SUMS]
        self._sums = record[:TEXT_AT].cast("d")[-SUMS:]
        self._text = record[TEXT_AT:]
        self._phase, self._step, self._began = Phase.BUILDING, 0, 0.0
        self._syncing_since = 0.0  # when the rank came to the place SYNCING; 0 while the rank is at another place
        self._steps_s, self._syncing_s = 0.0, 0.0
        self._has_trained = False
        self.note_device("cpu")
        faulthandler.register(STACKS_SIGNAL, file=2)
        self._numbers[6] = rank
        self._numbers[0] = os.getpid()

    def begin(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase. Without a step, the phase belongs to the previous phase's step."""
        now = time.monotonic()
        if self._syncing_since:
            self._end_syncing(now)
        if self._phase is Phase.STEP and self._has_trained and self._began < math.inf:
            self._steps_s += now - self._began
            self._sums[0], self._sums[1] = self._steps_s, self._syncing_s
        if self._phase in MEASURED and (self._has_trained or self._phase is not Phase.STEP):
            index = MEASURED.index(self._phase)
            self._longest[index] = max(self._longest[index], now - self._began)
        self._has_trained |= self._phase is Phase.STEP
        self._phase, self._began = phase, now
        self._step = self._step if step is None else step
        self._numbers[2], self._numbers[3], self._numbers[5] = phase, Place.COMPUTING, self._step
        self._numbers[1] += 1

    def mark(self, place: Place) -> None:
        """Record that the rank has reached a place in the present phase."""
        if place is Place.SYNCING:
            self._syncing_since = self._syncing_since or time.monotonic()
        elif self._syncing_since:
            self._end_syncing(time.monotonic())
        self._numbers[3] = place
        self._numbers[4] += 1

    def _end_syncing(self, now: float) -> None:
        if self._phase is Phase.STEP and self._has_trained and self._began < math.inf:
            self._syncing_s += now - self._syncing_since
        self._syncing_since = 0.0

    def stand(self, standing: RankStanding) -> None:
        """Change the rank's standing; see `RankStanding`."""
        self._numbers[7] = standing

    def read_all(self) -> dict[int, Beat]:
        """Return the heartbeats of this machine's ranks, by rank."""
        return _read_all(self._memory)

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Begin a phase for the block. After the block, begin the present phase again."""
        outer = self._phase
        self.begin(phase)
        yield
        self.begin(outer)
        self._began = math.inf  # don't measure the rest of the phase, because its beginning was interrupted

    def note_device(self, device: str) -> None:
        """Note the device that this rank trains on, as torch names it."""
        text = name_device(device).encode()[: len(self._text)]
        self._text[:] = text.ljust(len(self._text), b"\0")


def name_device(device: str) -> str:
    """Return a name for a device of this machine, given torch's name: the host, and for a GPU its number."""
    place, listed = "", os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device.startswith("cuda"):
        number = int(device.partition(":")[2] or 0)
        gpu = listed[number].strip() if number < len(listed) else ""
        place = f"{GPU}{gpu or number}"
    return f"{name_host()}{place}"


def _read_all(memory: mmap.mmap) -> dict[int, Beat]:
    """Return the heartbeat of each rank that has one, by rank."""
    starts = range(0, len(memory), RECORD_BYTES)
    return dict(filter(None, (_read(memoryview(memory)[start : start + RECORD_BYTES]) for start in starts)))


def _read(record: memoryview) -> tuple[int, Beat] | None:
    pid, phases, phase, place, marks, step, rank, standing, *_ = record[:TEXT_AT].cast("q")
    *longest, steps_s, syncing_s = record[:TEXT_AT].cast("d")[NUMBERS:]
    longest_s = dict(zip(MEASURED, longest, strict=True))
    where = bytes(record[TEXT_AT:]).rstrip(b"\0").decode(errors="replace")
    if not pid:
        return None
    phase, place, standing = Phase(phase), Place(place), RankStanding(standing)
    return rank, Beat(pid, phases, phase, place, marks, step, standing, longest_s, steps_s, syncing_s, where)


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


# ---- the heartbeat of this process, if it is a rank of an attempt on this machine

_own: Heartbeat | None = None


def join() -> None:
    """Begin this rank's heartbeat. Do nothing in a process whose attempt has no file for it on this machine."""
    global _own
    with contextlib.suppress(KeyError, OSError, ValueError, IndexError):
        rank = int(os.environ.get("RANK", "0"))
        number = int(os.environ.get("LOCAL_RANK", rank))
        _own = Heartbeat(Path(os.environ[HEARTBEATS_VARIABLE]), rank, number)


def begin(phase: Phase, step: int | None = None) -> None:
    """Begin a phase; see `Heartbeat.begin`."""
    if _own is not None:
        _own.begin(phase, step)


def mark(place: Place) -> None:
    """Record that this rank has reached a place in the present phase."""
    if _own is not None:
        _own.mark(place)


def stand(standing: RankStanding) -> None:
    """Change this rank's standing; see `RankStanding`."""
    if _own is not None:
        _own.stand(standing)


def read_beats() -> dict[int, Beat]:
    """Return the heartbeats of this machine's ranks, by rank; empty if this rank has no heartbeat."""
    return _own.read_all() if _own is not None else {}


def read_beats_of(path: Path) -> dict[int, Beat]:
    """Return, by rank, the heartbeats in a file that ranks share with their attempt; any process may call it.

    Raises:
        OSError, ValueError: there is no such file.
    """
    return _read_all(_map(path))


def within(phase: Phase) -> contextlib.AbstractContextManager[None]:
    """Begin a phase for the block. After the block, begin the present phase again."""
    return _own.within(phase) if _own is not None else contextlib.nullcontext()


def note_device(device: str) -> None:
    """Note the device that this rank trains on, as torch names it."""
    if _own is not None:
        _own.note_device(device)

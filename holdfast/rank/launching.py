"""Start, watch, command and end the ranks of an attempt."""

import contextlib
import logging
import os
import queue
import signal
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, ClassVar, Self, TypeVar

from pydantic import BaseModel

from holdfast.config import RunConfig
from holdfast.errors import HoldfastError, RankDied, RunStopped
from holdfast.journal import Commit
from holdfast.probe import Gate
from holdfast.processes import LONGEST_EPOCH_VARIABLE, MARK_VARIABLE, find_processes, leads_session
from holdfast.rank.ending import RankLog
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
from holdfast.rank.process import Spawn, make_command, make_environment, start_process

log = logging.getLogger(__name__)

END_WITHIN_S = 5.0

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

    # Starts the processes of all ranks that aren't given another `spawn`.
    spawn: ClassVar[Spawn] = staticmethod(start_process)

    def __init__(
        self,
        config: RunConfig,
        log_path: Path,
        commit: int = 0,
        longest_epoch: int = 0,
        spawn: Spawn | None = None,
    ) -> None:
        """
        Args:
            commit: the number of the run's commit that will probably be restored; it is read at once.
            longest_epoch: the steps to which an epoch is cut, for a proof; 0 for no cut.
            spawn: starts the process; by default `Ranks.spawn`.
        """
        self.began = time.monotonic()
        self._has_several = config.compute.ranks > 1
        self._mark = uuid.uuid4().hex
        self._log = RankLog(log_path)
        environment = make_environment(config, commit)
        environment |= {MARK_VARIABLE: self._mark, LONGEST_EPOCH_VARIABLE: str(longest_epoch)}
        with self._log.open() as log:
            self._process = (spawn or self.spawn)(make_command(config), environment, log)
        self._events: Events = queue.SimpleQueue()
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
        return self._log.describe_end(self._process.wait())

    # ---- orders

    def _order(self, order: Order) -> None:
        """Send an order. If the ranks are dead, the next call for an event says so."""
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

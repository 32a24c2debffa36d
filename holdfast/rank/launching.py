"""The ranks of an attempt, seen from the attempt: start, watch, command and end them."""

import contextlib
import logging
import math
import os
import pkgutil
import queue
import signal
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel

from holdfast.checkpoint import Saved
from holdfast.config import Compute, RunConfig
from holdfast.errors import HoldfastError, RankDied, RunStopped
from holdfast.extending import call_all
from holdfast.journal import Commit, Origin
from holdfast.machine.heartbeats import HEARTBEATS_VARIABLE, Heartbeats, Phase
from holdfast.machine.processes import (
    ATTEMPT_VARIABLE,
    LONGEST_EPOCH_VARIABLE,
    MARK_VARIABLE,
    find_processes,
    is_running,
    leads_session,
)
from holdfast.machine.slow_ranks import SlowRank, SlowRanks
from holdfast.provenance.imports import claim_recipe
from holdfast.rank.ending import RankLog
from holdfast.rank.first_order import HELD_VARIABLE
from holdfast.rank.lived_steps import LIVED_VARIABLE
from holdfast.rank.messages import (
    Begin,
    Begun,
    Call,
    Called,
    End,
    Evaluate,
    Evaluated,
    Event,
    Examine,
    Examined,
    Failed,
    Finished,
    Keep,
    Observe,
    Observed,
    Order,
    Problem,
    Proceed,
    Ready,
    Rehearse,
    Rehearsed,
    Restore,
    Restored,
    Save,
    Skipped,
    Stop,
    Train,
    Woken,
    decode_event,
    encode_message,
)
from holdfast.rank.rendezvous import explain_end
from holdfast.rank.spawn import Spawn, make_command, make_environment, start_process
from holdfast.rank.watches import LOOK_EVERY_S, PATIENCE_VARIABLE, RankWatch
from holdfast.recipe.probe import Gate

log = logging.getLogger(__name__)

# named as text and imported late, because launchers start the ranks of few runs
ATTACHED = "holdfast.rank.attached:AttachedRanks"
END_WITHIN_S = 5.0
KILLED_WITHIN_S = 60.0  # the longest wait after SIGKILL; a process with much memory takes seconds to end
MOST_SAVED = 8  # reports of checkpoints that are kept; ranks report few before the first is committed
CAUSE_WITHIN_S = 45.0  # longer than the 30 s that torchrun takes to end the other ranks after one has died

E = TypeVar("E", bound=BaseModel)
F = TypeVar("F", bound=BaseModel)
Events = queue.SimpleQueue[Event | None]


class Ranks:
    """The ranks of one attempt, as processes in a separate session.

    A signal to the attempt's process group (Ctrl-C in a terminal) doesn't reach the ranks. The attempt commands them
    through a pipe, and the end of the pipe tells them that the attempt has died.

    Attributes:
        began: when the ranks were started, on the clock of `time.monotonic`.
        heartbeats: the heartbeats of this machine's ranks.
        saved: the last reports of checkpoints, also those that have left the queue of events: a signal between
            `next_event` and its caller loses an event.
        gives_up: asked at each `wake`: whether `expect` ends its wait with RankDied.
    """

    # The default of the argument `spawn`; tests replace this attribute.
    spawn: ClassVar[Spawn] = staticmethod(start_process)

    def __init__(
        self,
        config: RunConfig,
        log_path: Path,
        commit: int = 0,
        longest_epoch: int = 0,
        spawn: Spawn | None = None,
        patience: float = 1.0,
        lived: Path | None = None,
        is_held: bool = False,
    ) -> None:
        """
        Args:
            commit: the number of the commit that will probably be restored: the ranks begin to read it at once.
            longest_epoch: the number of steps to which epochs are shortened, for a proof; 0 for complete epochs.
            spawn: the function that starts the process; by default `Ranks.spawn`.
            patience: the factor for the time limits of the watches over the ranks.
            lived: the file for the steps that no commit contains yet; see `holdfast.rank.lived_steps`.
            is_held: whether the ranks wait for `proceed` after they have imported torch.
        """
        self.began = time.monotonic()
        self.gives_up: Callable[[], bool] = lambda: False
        self._compute, self._skip = config.compute, config.skip
        # register the user's folders, to find the user's line in the stack of a rank
        claim_recipe(config.recipe)
        self._is_built = False  # whether the ranks have connected and built the recipe
        self._within_s = self._answer_at = math.inf  # see `answer_within`
        self._mark = uuid.uuid4().hex
        self._log = RankLog(log_path)
        self.heartbeats = Heartbeats(config.compute.rank_count)
        self._delete_heartbeats = weakref.finalize(self, self.heartbeats.close)
        found = call_all("watch", config, self.heartbeats, patience)
        self._watches: list[RankWatch] = [watch for _, watch in found]
        self._slow_ranks = SlowRanks()
        environment = make_environment(config, commit) | {HEARTBEATS_VARIABLE: str(self.heartbeats.path)}
        environment |= {MARK_VARIABLE: self._mark, ATTEMPT_VARIABLE: str(os.getpid())}
        environment |= {LONGEST_EPOCH_VARIABLE: str(longest_epoch)}
        environment |= {PATIENCE_VARIABLE: str(patience)}  # read by the watches on a cluster's nodes
        environment |= {LIVED_VARIABLE: str(lived.absolute()) if lived else "", HELD_VARIABLE: "1" if is_held else ""}
        with self._log.open() as log:
            self._process = (spawn or self.spawn)(make_command(config), environment, log)
        self._events: Events = queue.SimpleQueue()
        self.saved: deque[Saved] = deque(maxlen=MOST_SAVED)
        # If a signal raises an error before the caller has stored this object, nobody can end the ranks. So close their
        # input, which ends them, when this object is garbage-collected.
        weakref.finalize(self, self._process.stdin.close)
        # Read events in a thread, because a signal during a read would lose the line. The thread must not refer to this
        # object, or this object would never be garbage-collected.
        threading.Thread(target=_read, args=(self._process.stdout, self._events, self.saved), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to every process of the ranks, loader workers included.

        A signal to the process group isn't enough: torchrun starts each rank in its own session, and a rank may
        outlive torchrun.
        """
        with contextlib.suppress(ProcessLookupError):  # signal torchrun first, so that it can't react to a rank's death
            os.killpg(self.pid, number)
        for pid in self._find_others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _find_others(self) -> list[int]:
        """Return the ranks' processes that are not in the process group of the process that this object has started.

        For a single rank, return an empty list without a search, because a search takes 0.1 s.
        """
        return find_processes(self._mark) if self._compute.has_several else []

    # ---- heartbeats

    def find_slow(self) -> SlowRank | None:
        """Return the rank that was slower than the others since the last call; see `SlowRanks`.

        Return None if no rank was slow, or if too few steps were trained since then.
        """
        return self._slow_ranks.find(self.heartbeats.read())

    def count_steps(self) -> int:
        """Return the newest step that all ranks of this machine have trained, saved or not; 0 if none is known."""
        return min((beat.step - (beat.phase is Phase.STEP) for beat in self.heartbeats.read().values()), default=0)

    # ---- events

    def next_event(self, within_s: float | None = None) -> Event:
        """Return the next event; raise the error of a `Failed`.

        Raises:
            HoldfastError: a rank reported this error.
            RankDied: the ranks ended without a report, or sent nothing for ``within_s`` seconds.
            RankDied: a watch has found a rank that makes no progress; all ranks have been killed.
            OutOfMemory: the kernel has killed a rank because memory ran out.
        """
        event = self._await_event(within_s)
        if event is None:
            raise self._describe_end()
        if isinstance(event, Failed):
            error = event.error
            raise self._find_cause() or error if error.data.get("is_effect") else error
        if isinstance(event, Ready):
            # All ranks have opened the file of heartbeats. Delete it now, because an attempt that is killed can't
            # delete it later.
            self._delete_heartbeats()
            self._check_first()
        return event

    def answer_within(self, within_s: float | None) -> None:
        """Expect each event up to this number of seconds from now; after it `next_event` raises RankDied.

        None for no limit.
        """
        self._within_s = within_s or math.inf
        self._answer_at = time.monotonic() + self._within_s

    def _await_event(self, within_s: float | None) -> Event | None:
        """Return the next event; None if the ranks have ended. Check the heartbeats while no event arrives."""
        deadline = self._answer_at if within_s is None else time.monotonic() + within_s
        within_s = within_s or self._within_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return self._events.get(timeout=min(LOOK_EVERY_S, left_s))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    raise RankDied(f"the ranks reported nothing for {within_s:.0f} s", is_silent=True) from None
            for watch in self._watches:
                if error := watch.look(self._log.path):
                    self.signal(signal.SIGKILL)
                    raise error

    def _check_first(self) -> None:
        """Record that the ranks are ready; raise RankDied if torchrun has restarted them because a node joined.

        Restarted ranks have restored no checkpoint, so the attempt has to start new ranks itself.
        """
        if self._is_built:
            raise RankDied("another node has joined, so the ranks start again")
        self._is_built = True

    def expect(self, kind: type[E], *others: type[F]) -> E | F:
        """Return the next event, which has to be of one of these classes. Log earlier `Skipped`, ignore `Woken` events.

        Raises:
            HoldfastError: see `next_event`.
            RunStopped: the event is of another class.
        """
        while isinstance(event := self.next_event(), Skipped | Woken):
            if isinstance(event, Woken) and self.gives_up():
                raise RankDied("this machine will be taken away, so the ranks are stopping", is_given_up=True)
            if isinstance(event, Skipped):
                log.info("reading the data again from its beginning: micro-batch %d of %d", event.done, event.total)
        if isinstance(event, kind):
            return event
        for other in others:
            if isinstance(event, other):
                return event
        raise RunStopped(
            f"a rank reported {type(event).__name__} where {kind.__name__} was expected",
            hint="start the run again; if this happens again, it is an error in Holdfast: please report it",
        )

    def wake(self) -> None:
        """Queue a `Woken` event, to interrupt a caller of `next_event`. May be called from any thread."""
        self._events.put(Woken())

    def _find_cause(self) -> HoldfastError | None:
        """Return the error that a lost rank itself reports; None if no report arrives for `CAUSE_WITHIN_S`."""
        with contextlib.suppress(queue.Empty):
            while event := self._events.get(timeout=CAUSE_WITHIN_S):
                if isinstance(event, Failed) and not event.data.get("is_effect"):
                    return event.error
            return self._describe_end()
        return None

    def _describe_end(self) -> HoldfastError:
        """Return the error for ranks that ended without reporting one."""
        self._events.put(None)  # mark the end of the events again, so that the next `next_event` raises the error, too
        code = self._process.wait()
        if code == 0 and self._is_built and self._compute.has_rendezvous:
            return RankDied("the ranks have ended, because they were told to", is_ordered=True)
        never_met = None if self._is_built else explain_end(self._log.read(), self._compute)
        return never_met or self._log.describe_end(code)

    # ---- orders

    def send(self, order: Order) -> None:
        """Send an order. If the ranks are dead, raise nothing: the next call of `next_event` raises the cause."""
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: `end` has closed the pipe
            self._process.stdin.write(encode_message(order))
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the ranks' input.

        The ranks then save the trained steps and end; if they got an `End` before, they don't save.
        """
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def restore(self, commit: Commit, gate: Gate, aside: str = "") -> Restored | Problem:
        """Order the ranks to restore a commit's state and to check it with the gate; see `Restore` for ``aside``.

        Returns:
            `Restored`, or a `Damaged` or `Tripped` with the reason why the commit can't be restored.

        Raises:
            HoldfastError: see `next_event`.
        """
        self.send(Restore(commit=commit, gate=gate, aside=aside))
        return self.expect(Restored, Problem)

    def begin(self, store: str, run: str, commit: Commit | None) -> Begun | Problem:
        """Order the ranks to load the weights of another run's checkpoint, or of a folder; see `Begin`.

        Returns:
            `Begun`, or a `Damaged` that says how the checkpoint is damaged.

        Raises:
            HoldfastError: see `next_event`.
        """
        self.send(Begin(store=store, run=run, commit=commit))
        return self.expect(Begun, Problem)

    def call(self, function: str, **arguments: Any) -> dict[str, Any]:
        """Call a function of an extension on all ranks, and return the main rank's values; see `Call`.

        Raises:
            HoldfastError: see `next_event`.
        """
        self.send(Call(function=function, arguments=arguments))
        return self.expect(Called).values

    def keep(self, fingerprint: str, origin: Origin) -> Saved:
        """Save the state that a called function has loaded. Return the checkpoint once it is durable.

        Raises:
            HoldfastError: see `next_event`.
        """
        self.send(Keep(fingerprint=fingerprint, origin=origin))
        return self.expect(Saved)

    def train(
        self,
        stop: int,
        fingerprint: str,
        into: str = "",
        *,
        aside: str = "",
        is_detailed: bool = False,
        saves_first: bool = False,
    ) -> None:
        """Order the ranks to train until step ``stop`` and to save; see `Train`."""
        where = {"into": into, "aside": aside, "skip": self._skip}
        self.send(Train(stop=stop, fingerprint=fingerprint, is_detailed=is_detailed, saves_first=saves_first, **where))

    def proceed(self) -> None:
        """Order ranks that were started ahead to build the recipe. Set `began` to this moment."""
        self.began = time.monotonic()
        self.send(Proceed())

    def rehearse(
        self,
        stop: int,
        fingerprint: str,
        *,
        is_kept: bool,
        is_repeated: bool = False,
        is_detailed: bool = True,
        committed: str = "",
    ) -> None:
        """Order the ranks to train until step ``stop`` without a save; see `Rehearse`."""
        self.send(
            Rehearse(
                stop=stop, fingerprint=fingerprint, is_kept=is_kept, is_repeated=is_repeated, is_detailed=is_detailed,
                committed=committed, skip=self._skip,
            )
        )  # fmt: skip

    def await_rehearsed(self) -> Rehearsed:
        """Return the result of the steps that `rehearse` has ordered.

        Raises:
            HoldfastError: see `next_event`.
        """
        return self.expect(Rehearsed)

    def observe(self, step: int, most: int) -> Observed:
        """Order the ranks to train until a step, and return the observations of that step; see `Observe`.

        Raises:
            HoldfastError: see `next_event`.
        """
        self.send(Observe(step=step, most=most, skip=self._skip))
        return self.expect(Observed)

    def list_pids(self) -> list[int]:
        """Return the process ids of the ranks on this machine."""
        return [self.pid, *self._find_others()]

    def save(self) -> None:
        """Order a save after the current step; training continues."""
        self.send(Save())

    def stop(self, within_s: float | None = None) -> None:
        """Order the ranks to save and end.

        Args:
            within_s: the seconds in which the save has to be durable; the ranks train on until the last safe moment.
                None to save after the current step.
        """
        self.send(Stop(within_s=within_s))

    def evaluate(self) -> Evaluated:
        """Evaluate the model. Return its metrics, and the numbers of its probe (see `Recipe`)."""
        self.send(Evaluate())
        return self.expect(Evaluated)

    def examine(self) -> Examined:
        """Return the state that no checkpoint contains, and the step of each event, such as the end of a schedule."""
        self.send(Examine())
        return self.expect(Examined)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def finish(self, within_s: float) -> None:
        """Order the ranks of a complete run to end. Wait until the code after the user's own loop has run.

        Raises:
            HoldfastError: that code raised this error.
            RankDied: the ranks ended without a report, or that code still runs after ``within_s`` seconds.
        """
        self.send(End())
        while not isinstance(self.next_event(within_s), Finished):
            pass

    def end(self, within_s: float = END_WITHIN_S) -> None:
        """End every process of the ranks: send an `End`, then SIGTERM, then SIGKILL.

        Args:
            within_s: seconds to wait after the `End`, and again after SIGTERM.
        """
        # Find the processes now, because an exiting process can't be found any more while it still frees its memory and
        # its GPU.
        found = {*filter(leads_session, self._find_others())}
        self.send(End())
        self.close_input()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._has_ended(found, within_s):
                return
            self.signal(number)
        if not self._has_ended(found, KILLED_WITHIN_S):
            log.warning("the ranks can't be killed: they are inside the kernel, as with a GPU that has failed")

    def _has_ended(self, found: set[int], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while True:
            found.update(filter(leads_session, self._find_others()))
            if not self.is_alive() and not any(map(is_running, found)):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def choose_ranks(compute: Compute) -> type[Ranks]:
    """Return the class for a run's ranks: `Ranks` if the attempt starts them; `AttachedRanks` if a launcher does."""
    return cast(type[Ranks], pkgutil.resolve_name(ATTACHED)) if compute.is_attached else Ranks


def _read(pipe: IO[str], events: Events, saved: deque[Saved]) -> None:
    """Read events from a pipe into a queue; put None into the queue when the pipe ends.

    Args:
        saved: gets the reports of checkpoints, too.
    """
    try:
        with pipe as lines:
            for line in lines:
                event = decode_event(line)
                if isinstance(event, Saved):
                    saved.append(event)
                events.put(event)
    except RunStopped as error:
        events.put(Failed.of(error))
    finally:
        events.put(None)

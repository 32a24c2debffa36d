"""The search for ranks that hang, from their heartbeats: which rank hangs, at which place, and each rank's stack.

A rank hangs if its heartbeat stays at one place (phase and step) for longer than a bound, and no other rank is behind
it.

==========================  ========================================================================================
phase                       bound
==========================  ========================================================================================
a step, an evaluation, a    ``hung_after_s``: "auto" is 20 times the longest duration so far, 30 s at least and
wait for the own GPU        60 s at most. In any case the bound is at least 3 times the longest duration so far
the process's first step    10 minutes: it compiles, starts loader workers and connects the ranks
building, restoring,        an hour: the times depend on data and storage, and past times say little about the next
saving, first evaluation
waiting for an order        none
==========================  ========================================================================================

Besides the time, these facts decide:

- A stopped process (SIGSTOP) counts as hung, in any phase, if it stays stopped for longer than a step may take.
- A rank that uses its processor is computing: an evaluation inside a loop, a compilation, a long step. Its bound is an
  hour.
- A rank on a GPU sleeps while it waits for the GPU (`holdfast.machine.gpus.waits`). So only its training threads count,
  not those of CUDA and NCCL, which may poll; and each time that it wakes, one wait has ended and the next begins. While
  the rank is known to wait for a GPU, its processor time doesn't count at all, because an old driver may let it spin.
- A rank on a GPU whose training has ranks on other machines may wait for them in any step: its bound is an hour.
- Time counts only while the attempt itself is running, so that ranks of a suspended machine don't count as hung.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.config import RunConfig
from holdfast.errors import RankHung
from holdfast.extensions.hangs.stacks import write_stacks
from holdfast.extensions.hangs.table import Hangs
from holdfast.machine.heartbeats import Beat, Heartbeats, Phase, Place
from holdfast.machine.processes import STOPPED, read_process, read_training_s
from holdfast.rank.watches import LOOK_EVERY_S

LEAST_S, MOST_S = 30.0, 60.0
TIMES, LEAST_TIMES = 20.0, 3.0
FIRST_STEP_S = 600.0
UNKNOWN_S = 3600.0
# the share of a core above which a rank counts as computing; a rank that waits for a lock or a socket uses 0.01
BUSY_CORES = 0.05
# if a rank's training threads have used more processor time than this between two looks, the rank hasn't waited for its
# GPU all the time; a sleeping thread uses none
WAKES_S = 0.001


@dataclass
class _Seen:
    """The state of one rank when its heartbeat was last read.

    Attributes:
        cpu_s: the processor time that its process has used; on a GPU, that its training threads have used.
        still_s: the seconds for which the rank has made no progress.
        idle_s: the seconds for which the rank has made no progress and has not computed.
        stopped_s: the seconds for which its process has been stopped.
    """

    beat: Beat
    cpu_s: float = 0.0
    still_s: float = 0.0
    idle_s: float = 0.0
    stopped_s: float = 0.0


def make_watch(config: RunConfig, settings: Hangs, heartbeats: Heartbeats, patience: float) -> "Watch":
    """Return the watch over the ranks that have these heartbeats."""
    return Watch(heartbeats, settings.hung_after_s, patience, has_others=config.compute.has_nodes)


class Watch:
    """The watch over the ranks of this machine, which finds ranks that hang."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        hung_after_s: float | Literal["auto"],
        patience: float = 1.0,
        *,
        has_others: bool = False,
    ) -> None:
        """
        Args:
            patience: a factor for all bounds, which grows after each hang, because the ranks may only have been slow.
            has_others: whether the training also has ranks on other machines, which other watches observe.
        """
        self._patience = patience
        self._has_others = has_others
        self._heartbeats, self._hung_after_s = heartbeats, hung_after_s
        self._seen: dict[int, _Seen] = {}
        self._looked_at = time.monotonic()

    def look(self, log: Path) -> RankHung | None:
        """Return the error for the ranks that hang, and make each rank write its stack into the log."""
        hung = self.find_hung()
        return self.diagnose(hung, log) if hung else None

    def find_hung(self) -> dict[int, Beat]:
        """Return the heartbeats of the ranks that hang, by rank. Call it every `LOOK_EVERY_S`."""
        now = time.monotonic()
        elapsed_s, self._looked_at = now - self._looked_at, now
        for rank, beat in self._heartbeats.read().items():
            self._note(rank, beat, elapsed_s)
        hung = [rank for rank, seen in self._seen.items() if seen.stopped_s > self._bound(Phase.STEP, first_s=MOST_S)]
        return {rank: self._seen[rank].beat for rank in hung or self._find_behind()}

    def _note(self, rank: int, beat: Beat, elapsed_s: float) -> None:
        state, cpu_s = read_process(beat.pid)
        cpu_s = read_training_s(beat.pid) if beat.has_gpu else cpu_s
        last = self._seen.get(rank)
        if last is None:
            self._seen[rank] = _Seen(beat, cpu_s)
            return
        # Count at most two intervals: if more time has passed, the attempt or the machine was paused.
        counted_s = min(elapsed_s, 2 * LOOK_EVERY_S)
        # A rank that waits for a free core (state R) counts as computing, too.
        least_s = WAKES_S if beat.has_gpu else BUSY_CORES * elapsed_s
        is_busy = state in ("R", "") or cpu_s - last.cpu_s > least_s
        is_same = beat.position == last.beat.position
        last.still_s = last.still_s + counted_s if is_same else 0.0
        last.idle_s = last.idle_s + counted_s if is_same and not is_busy else 0.0
        last.stopped_s = last.stopped_s + counted_s if state == STOPPED else 0.0
        last.beat, last.cpu_s = beat, cpu_s

    def _find_behind(self) -> list[int]:
        """Return the ranks that have progressed least, if each has exceeded its bound; otherwise an empty list."""
        first = min((seen.beat.position for seen in self._seen.values()), default=None)
        behind = {rank: seen for rank, seen in self._seen.items() if seen.beat.position == first}
        return [*behind] if all(map(self._is_late, behind.values())) else []

    def _is_late(self, seen: _Seen) -> bool:
        phase, place = seen.beat.phase, seen.beat.place
        if phase is Phase.WAITING or (self._has_others and place in (Place.SYNCING, Place.DEVICE)):
            return False
        is_step = phase is Phase.STEP or place is Place.DEVICE
        bound_s = self._bound(Phase.STEP if is_step else phase, FIRST_STEP_S if is_step else UNKNOWN_S)
        waits = place is Place.DEVICE or (place is Place.SYNCING and seen.beat.has_gpu and len(self._seen) > 1)
        quiet_s = seen.still_s if waits else seen.idle_s
        if self._has_others and seen.beat.has_gpu and place is Place.COMPUTING:
            quiet_s = 0.0  # the rank may wait for a different machine
        return quiet_s > bound_s or seen.still_s > max(bound_s, UNKNOWN_S * self._patience)

    def _bound(self, phase: Phase, first_s: float) -> float:
        """Return how long a rank may stay at one place in a phase, in seconds.

        Args:
            first_s: the smallest bound, in seconds, until one duration of this phase has been measured.
        """
        longest_s = max(seen.beat.longest_s.get(phase, 0.0) for seen in self._seen.values())
        chosen_s = min(MOST_S, max(LEAST_S, TIMES * longest_s)) if self._hung_after_s == "auto" else self._hung_after_s
        if not longest_s:
            chosen_s = max(chosen_s, first_s)
        return max(chosen_s, LEAST_TIMES * longest_s) * self._patience

    def diagnose(self, hung: Mapping[int, Beat], log: Path) -> RankHung:
        """Make each rank write its Python stack into the log, and return the error for the ranks that hang."""
        lines = self._write_stacks(log)
        rank, beat = min(hung.items())
        seen = self._seen[rank]
        who = " and ".join(f"rank {rank} ({_name(beat)})" for rank, beat in sorted(hung.items()))
        line = next((f" at {lines[beat.pid]}" for _, beat in sorted(hung.items()) if lines.get(beat.pid)), "")
        if seen.stopped_s:
            reason = "its process is stopped"
        elif beat.phase is Phase.STEP and (longest_s := beat.longest_s[Phase.STEP]):
            reason = f"no progress for {seen.still_s:.0f} s, and the longest step took {longest_s:.2g} s"
        else:
            reason = f"no progress for {seen.still_s:.0f} s"
        return RankHung(
            f"{who} {'hangs' if len(hung) == 1 else 'hang'} {_describe_place(beat)}{line}: {reason}",
            hint=f"{log} has the stack of each rank; extensions.hangs.hung_after_s sets the time limit",
            is_silent=True,
        )

    def _write_stacks(self, log: Path) -> dict[int, str]:
        titles = {
            seen.beat.pid: f"rank {rank} ({_name(seen.beat)}) {_describe_place(seen.beat)}, "
            f"{seen.still_s:.0f} s without progress; its stack:"
            for rank, seen in sorted(self._seen.items())
        }
        return write_stacks(log, titles)


def _name(beat: Beat) -> str:
    return f"process {beat.pid} on {beat.where}"


def _describe_place(beat: Beat) -> str:
    phases = {
        Phase.BUILDING: "while it builds the recipe",
        Phase.WAITING: "while it waits for an order",
        Phase.RESTORING: "while it restores a checkpoint",
        Phase.STEP: f"in step {beat.step}",
        Phase.EVALUATING: f"in an evaluation after step {beat.step}",
        Phase.SAVING: f"while it saves step {beat.step}",
    }
    places = {
        Place.COMPUTING: "",
        Place.LOADING: ", loading data",
        Place.SYNCING: ", waiting for other ranks",
        Place.DEVICE: ", waiting for its GPU",
    }
    return phases[beat.phase] + places[beat.place]

"""Commands that are stopped once after a chosen step, by a real signal to a real process or by a notice."""

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast.attempt import AttemptView, Observer, life
from holdfast.checkpoint import Saved
from holdfast.rank.launching import Ranks
from holdfast.rank.messages import Event, Progress
from holdfast.rank.orders import Orders
from tests.support import forked

# The variable with the way to stop, the step, and the file that is made at the stop.
STOP = "STOPPED_AFTER"
DRAIN_FILE = "drain"  # in the folder of the file that is made at the stop
WITHIN_S = 3.0  # the deadline of a notice
SLOW_S = 0.25  # of each step after a notice, so that the deadline comes before the run's end
SOON_S = 0.3  # in which an order reaches the ranks


def train(path: str, settings: list[str]) -> int:
    """Run ``holdfast train``, which answers SIGTERM as a person's command does, and stop it as `STOP` says."""
    life.watch = functools.partial(life.watch, every_s=0.02)  # type: ignore[attr-defined]
    Orders.is_pausing = watch_steps(Orders.is_pausing)  # type: ignore[method-assign]
    return forked.main("train", path, *(option for setting in settings for option in ("--set", setting)))


def train_until_saved(path: str, settings: list[str]) -> int:
    """Run ``holdfast train`` in slow steps; SIGTERM comes as the attempt reads the second report of a checkpoint."""
    next_event, is_pausing, seen = Ranks.next_event, Orders.is_pausing, []

    def slowed(orders: Orders) -> bool:
        time.sleep(SOON_S / 6)
        return is_pausing(orders)

    def watched(ranks: Ranks, within_s: float | None = None) -> Event:
        event = next_event(ranks, within_s)
        if isinstance(event, Saved):
            seen.append(event.step)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return event

    Ranks.next_event, Orders.is_pausing = watched, slowed  # type: ignore[method-assign]
    return forked.main("train", path, *(option for setting in settings for option in ("--set", setting)))


def watch_steps(is_pausing: Any) -> Any:
    """Return the function that a rank calls after each step, with the stop before it."""

    def watched(orders: Orders) -> bool:
        strike(orders._training.progress.step)
        return bool(is_pausing(orders))

    return watched


class StopAttempt(Observer):
    """Stop the attempt's process, and not its ranks, once a step is reported; see `STOP`."""

    def __init__(self) -> None:
        how, _, step = os.environ.get(STOP, "").partition(":")
        self._signal, self._step = (signal.Signals[how], int(step)) if how else (None, 0)

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        if self._signal and progress.step >= self._step:
            number, self._signal = self._signal, None
            os.kill(os.getpid(), number)


def strike(step: int) -> None:
    """Stop the command if `STOP` says so after this step, which may be one of a rehearsal. Do that only once."""
    how, _, place = os.environ.get(STOP, "").partition(":")
    after, _, struck = place.partition(":")
    if how == "notice" and Path(struck).exists():
        time.sleep(SLOW_S)
    if not how or step != int(after) or Path(struck).exists():
        return
    Path(struck).touch()
    command = os.getppid()
    if how == "SIGKILL":
        os.kill(command, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "notice":
        written = Path(struck).with_name("writing")
        written.write_text(str(WITHIN_S))
        written.rename(Path(struck).with_name(DRAIN_FILE))
    else:
        os.kill(command, signal.Signals[how])
    time.sleep(SOON_S)

"""The live view on a terminal: a thread polls the store, and the screen is redrawn twice a second and at each key."""

import contextlib
import logging
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from holdfast.errors import HoldfastError
from holdfast.extensions.watch.drawing import Poll, draw_run, draw_store
from holdfast.extensions.watch.reading import RunReader, StoreReader

DRAWN_EVERY_S = 0.5
# If a poll takes this many seconds, the view says that the store is silent. The store's own retries may take a minute.
SILENT_AFTER_S = 5.0
SHOWN_NOTES = 3


class Poller:
    """Polls the store in a separate thread, so that keys and the screen never wait for the store."""

    def __init__(self, poll: Callable[[], bool], every_s: float) -> None:
        """
        Args:
            every_s: seconds between two polls.
        """
        self._poll, self._every_s = poll, every_s
        self._answered_at = time.monotonic()
        self._trouble = ""
        self._notes: deque[str] = deque(maxlen=SHOWN_NOTES)
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, text: str) -> None:
        """Keep a warning, so that the view shows it."""
        self._notes.append(text)

    def describe(self) -> Poll:
        """Return the state of the polls: how long the store has been silent, its last error, and the warnings."""
        now = time.monotonic()
        silent_s = now - self._answered_at - self._every_s
        is_silent = bool(self._trouble) or silent_s > SILENT_AFTER_S
        return Poll(now, self._trouble, silent_s if is_silent else 0.0, tuple(self._notes))

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            try:
                self._poll()
            except HoldfastError as error:
                self._trouble = str(error)
            except Exception as error:  # a thread's traceback would overwrite the view
                self._trouble = f"{type(error).__name__}: {error}"
            else:
                self._answered_at, self._trouble = time.monotonic(), ""


class _Notes(logging.Handler):
    """Passes the engine's warnings to the view, because printed warnings would overwrite the view."""

    def __init__(self, poller: Poller) -> None:
        super().__init__(logging.WARNING)
        self._poller = poller

    def emit(self, record: logging.LogRecord) -> None:
        self._poller.note(record.getMessage())


def show_live(reader: RunReader | StoreReader, console: Console, every_s: float) -> None:
    """Show a live view until the user presses q.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    poller = Poller(reader.poll, every_s)
    is_plain = not console.encoding.startswith("utf")

    def draw() -> RenderableType:
        poll, size = poller.describe(), console.size
        if isinstance(reader, RunReader):
            return draw_run(reader.seen, poll, size, is_plain=is_plain)
        return draw_store(reader.store.url, reader.seen, poll, size, is_plain=is_plain)

    poller.start()
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with _noting(poller), _keys() as pressed, contextlib.closing(_Started(live)):
        live.update(draw(), refresh=True)
        while "q" not in pressed(DRAWN_EVERY_S).lower():
            live.update(draw(), refresh=True)


class _Started:
    """A live display that `close` ends. If Ctrl-C interrupts the start, the terminal is restored, too."""

    def __init__(self, live: Live) -> None:
        self.close = live.stop
        try:
            live.start()
        except BaseException:
            live.stop()
            raise


@contextlib.contextmanager
def _noting(poller: Poller) -> Iterator[None]:
    log, handler = logging.getLogger("holdfast"), _Notes(poller)
    propagates = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagates


def _wait_without_keys(within_s: float) -> str:
    time.sleep(within_s)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Inside the block, read keys without Enter; yield a function that waits for keys and returns them.

    If standard input is no terminal, no key can be read, and the function only waits.
    """
    if not sys.stdin.isatty():
        yield _wait_without_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def wait(within_s: float) -> str:
        if not select.select([descriptor], [], [], within_s)[0]:
            return ""
        data = os.read(descriptor, 1024)
        return data.decode("ascii", errors="ignore") if data else "q"  # end of file: the terminal is closed

    try:
        tty.setcbreak(descriptor)
        yield wait
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

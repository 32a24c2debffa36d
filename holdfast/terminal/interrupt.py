"""The signals that tell a command to end: Ctrl-C during imports, and signals that schedulers send instead of SIGTERM.

The handler of Ctrl-C during imports ends a command at once, with exit code 130 and no traceback. It doesn't raise an
exception, because libraries turn a KeyboardInterrupt inside them into their own errors. `holdfast` imports this module
first; `holdfast.terminal.command.run_app` calls `catch` after all imports.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Signals that are handled like SIGTERM. Slurm's --signal, Grid Engine and LSF send the first two some time before they
# end a job. A terminal that closes sends the third. By default each of these signals ends a process silently.
LIKE_SIGTERM = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
COMMANDS = ("flows.", "deployments.", "holdfast.cli.")
SENT_AGAIN_AFTER_S = 0.05
_came: list[int] = []  # the signals for which `end` was called, in order


def is_command() -> bool:
    """Return whether this process runs a command of Holdfast, and isn't the user's program that imports Holdfast."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).startswith(COMMANDS)
    return bool(sys.argv) and Path(sys.argv[0]).name == "holdfast"


def end_at_once(number: int, frame: object) -> None:
    """End this process immediately, because it has nothing to save yet."""
    os._exit(128 + number)


def catch(handle: Callable[[int, Any], object] = signal.default_int_handler) -> None:
    """Replace the handler `end_at_once` of Ctrl-C, by default with Python's, which raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, handle)


def end(number: int, frame: object) -> NoReturn:
    """Handle SIGINT or SIGTERM: raise an exception that ends this command after a save.

    Raises:
        KeyboardInterrupt: for SIGINT.
        SystemExit: otherwise, with exit code 128 + ``number``.
    """
    _came.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def raise_if_lost() -> None:
    """Raise the exception of `end` again if `end` was called.

    The first exception may be lost: Python ignores an exception in a destructor, and a library may raise another error.

    Raises:
        KeyboardInterrupt, SystemExit: as `end` does.
    """
    if _came:
        if _guards.depth:  # the signal that `send_ignored_again` sends now must not end the save
            _guards.told_at = _guards.told_at or time.monotonic()
        end(_came[0], None)


def send_ignored_again() -> None:
    """Send a signal again if Python ignored the exception of the signal's handler.

    Python prints and ignores an exception in a destructor or in the callback of a weak reference. If a signal arrives
    while such code runs, the exception of the signal's handler (`end`, or Prefect's SIGTERM handler) is lost, and the
    process would continue. Source: `sys.unraisablehook`.
    """
    before = sys.unraisablehook
    if getattr(before, "sends_again", False):
        return

    def hook(ignored: "sys.UnraisableHookArgs") -> None:
        number = _find_signal(ignored.exc_value)
        if number is None:
            before(ignored)
            return
        _guards.told_at = None  # so that `raised_once` doesn't ignore the signal when it comes again
        # Send the signal later and from another thread, because this function still runs inside the destructor.
        again = threading.Timer(SENT_AGAIN_AFTER_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    hook.sends_again = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def _find_signal(told: BaseException | None) -> int | None:
    """Return the number of the signal whose handler has raised an exception; None if no handler has raised it."""
    if told is None or isinstance(told, Exception):
        return None
    if isinstance(told, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(told, SystemExit):
        return next((number for number in _came if told.code == 128 + number), None)
    number: int | None = getattr(told, "signal", None)
    return number


class _Guards:
    """The active `raised_once` blocks of this process.

    Attributes:
        depth: the number of nested blocks.
        handlers: the handlers that the blocks have set. An inner block leaves these handlers as they are.
        told_at: the `time.monotonic` of the first signal inside the outermost block; None before this signal.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.handlers: list[object] = []
        self.told_at: float | None = None

    def guard(self, handle: Callable[[int, Any], object], within_s: float) -> Callable[[int, Any], None]:
        """Return a handler that calls ``handle``, but ignores signals within ``within_s`` seconds of the first one."""

        def handle_first(number: int, frame: Any) -> None:
            now = time.monotonic()
            if self.told_at is None or now - self.told_at >= within_s:
                self.told_at = self.told_at or now
                handle(number, frame)

        self.handlers.append(handle_first)
        return handle_first


_guards = _Guards()


@contextlib.contextmanager
def raised_once(within_s: float) -> Iterator[None]:
    """During the block, let the first SIGTERM or Ctrl-C raise its handler's exception, and ignore further signals.

    A scheduler may send several signals: Slurm sends two SIGTERMs within 0.1 s to a job under srun. Without this block,
    the exception of the second signal would end the save that the first signal began. Blocks may be nested. Outside the
    main thread the block has no effect.

    Args:
        within_s: the number of seconds after the first signal during which further signals are ignored.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    found = {each: handle for each, handle in before.items() if callable(handle) and handle not in _guards.handlers}
    guards = {each: _guards.guard(handle, within_s) for each, handle in found.items()}
    _guards.depth += 1
    try:
        with contextlib.suppress(ValueError):  # this is not the main thread
            for each, guard in guards.items():
                signal.signal(each, guard)
        yield
    finally:
        for each, guard in guards.items():
            if signal.getsignal(each) is guard:
                signal.signal(each, before[each])
        _guards.depth -= 1
        if not _guards.depth:
            _guards.told_at = None
            _guards.handlers.clear()


def take_like_sigterm(handle: Callable[[int, Any], object], but: signal.Signals | None = None) -> None:
    """Set ``handle`` as the handler of each signal of `LIKE_SIGTERM` that is neither ignored nor handled already.

    Args:
        but: a signal to leave out, because it has another use in this process that `signal.getsignal` doesn't show.
    """
    for each in LIKE_SIGTERM:
        if each is not but and signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, handle)


def pass_on(number: int, frame: object) -> None:
    """Handle a signal of `LIKE_SIGTERM`: print the signal's name, and send SIGTERM to this process."""
    with contextlib.suppress(OSError):  # the terminal is closed
        os.write(2, f"told to end by {signal.Signals(number).name}\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)


# A background process of a shell ignores SIGINT, and must continue to ignore it. So set the handler only in other
# processes.
if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)

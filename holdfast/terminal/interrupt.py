"""The signals that tell a command to end: Ctrl-C during imports, and those that schedulers send in place of SIGTERM.

The handler of Ctrl-C during imports ends a command at once, with exit code 130 and no traceback. It raises no
exception, because libraries wrap a KeyboardInterrupt from their code in errors of their own. `holdfast` imports this
module first; `holdfast.terminal.command.run_app` calls `catch` after all imports.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Slurm's --signal, Grid Engine and LSF send the first two some time before they end a job; a terminal that closes sends
# the third. By default each ends a process without a word.
LIKE_SIGTERM = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
COMMANDS = ("flows.", "deployments.", "holdfast.cli.")
_came: list[int] = []  # the signals that `end` has had


def is_command() -> bool:
    """Return whether this process is one of Holdfast's commands, rather than a program that imports Holdfast."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).startswith(COMMANDS)
    return bool(sys.argv) and Path(sys.argv[0]).name == "holdfast"


def end_at_once(number: int, frame: object) -> None:
    """End this process: it has nothing to save yet."""
    os._exit(128 + number)


def catch(handle: Callable[[int, Any], object] = signal.default_int_handler) -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, handle)


def end(number: int, frame: object) -> NoReturn:
    """End this command by an exception, so that it saves: a handler of SIGINT and SIGTERM.

    Raises:
        KeyboardInterrupt: for SIGINT.
        SystemExit: otherwise, with exit code 128 + ``number``.
    """
    _came.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def raise_if_lost() -> None:
    """Raise the exception of `end` again if it was lost: in a destructor, or where code raised another in its place.

    Raises:
        KeyboardInterrupt, SystemExit: as `end` does.
    """
    if _came:
        end(_came[0], None)


def take_like_sigterm(handle: Callable[[int, Any], object]) -> None:
    """Handle the other signals, too, from now on. One that is ignored, or that the user's code handles, stays so."""
    for each in LIKE_SIGTERM:
        if signal.getsignal(each) is signal.SIG_DFL:
            signal.signal(each, handle)


def pass_on(number: int, frame: object) -> None:
    """Say which signal came, and do what SIGTERM does: a handler."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"told to end by {signal.Signals(number).name}\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)


# A shell's background process ignores SIGINT. Leave it so.
if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)

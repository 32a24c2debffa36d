"""The behaviour that all commands share: one line for an error, one line for its hint, and documented exit codes."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from holdfast.errors import ConfigError, HoldfastError, choose_hint
from holdfast.memory.switches import check_names
from holdfast.terminal import interrupt, printing, stamp

EXIT_CODES = """\
Exit codes: 0 good; 1 wrong use: a setting, a name or an option is wrong; 2 damage found; 3 the run stopped early, and \
the same command continues it; 130 and 143 it was told to stop, by Ctrl-C or SIGTERM (or SIGUSR1, SIGUSR2, SIGHUP), \
and has saved."""


def run_app(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Print an error in one line, and its hint in another line."""
    _escape_unknown_characters()
    interrupt.catch()
    interrupt.send_ignored_again()
    with contextlib.suppress(ValueError):  # this is not the main thread
        interrupt.take_like_sigterm(interrupt.pass_on)
    with printing():
        return _run_app(app, arguments)


def _run_app(app: App, arguments: Sequence[str] | None) -> int:
    try:
        check_names()
        _show_whole_help(app, next(iter(sys.argv[1:] if arguments is None else arguments), ""))
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        return complain(str(error), hint="--help shows the commands and options", exit_code=1)
    except HoldfastError as error:
        return complain(error.message, choose_hint(error), error.exit_code)
    except KeyboardInterrupt:
        with contextlib.suppress(ValueError):  # this is not the main thread
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C during the exit must not print a traceback
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _show_whole_help(app: App, name: str) -> None:
    """Let a command's help show its function's docstring, instead of the summary for the list of commands.

    Raises:
        ConfigError: the command's module can't be imported.
    """
    if name not in app or name.startswith("-"):
        return
    try:
        app[name].help = None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the command {name} can't be imported: {error.__cause__ or error}") from error


def _escape_unknown_characters() -> None:
    """Make the output streams escape characters that their encoding lacks, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def complain(message: str, hint: str, exit_code: int) -> int:
    """Print an error in one line, and its hint in another line. Return the exit code."""
    time = stamp(sys.stderr)
    print(f"{time}error: {message}", file=sys.stderr)
    if hint:
        print(f"{time}hint: {hint}", file=sys.stderr)
    return exit_code

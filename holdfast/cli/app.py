"""The command and its manners: one clear line for an error, and documented exit codes."""

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from holdfast import __version__, interrupt
from holdfast.config import DEFAULT_STORE
from holdfast.errors import HoldfastError, NameMissing, RunUnknown, WrongUse
from holdfast.journal import Commit, Journal
from holdfast.store import open_store
from holdfast.terminal import printing

EXIT_CODES = """\
Exit codes: 0 good; 1 wrong use: a setting, a name or an option is wrong; 2 damage found; 3 the run stopped early, and \
the same command continues it; 130 and 143 it was told to stop, by Ctrl-C or SIGTERM, and has saved."""

app = App(
    name="holdfast",
    help=f"Train runs, look at them, check them and keep them. RUN is <store>/<run>, or the name of a run in "
    f"{DEFAULT_STORE}/, where runs lie by default.",
    help_epilogue=EXIT_CODES,
    help_format="plaintext",
    version=__version__,
)

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Set = Annotated[list[str] | None, Parameter(name="--set", negative="", consume_multiple=False)]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False)]


def open_journal(run: str) -> Journal:
    """Open the journal of the run that ``<store>/<run>`` names; a name alone is that of a run in the default store.

    Raises:
        RunUnknown: it names none.
    """
    store, slash, name = run.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or name.endswith(":"):
        raise RunUnknown(f"{run!r} is not a run", hint="give it as <store>/<run>, for example runs/language")
    return Journal(open_store(store or ("/" if slash else DEFAULT_STORE)), name)


def find_commit(journal: Journal, text: str = "") -> Commit:
    """The commit that a number or the name of a folder means; the newest for an empty text.

    Raises:
        WrongUse: there is none, or its checkpoint was pruned.
    """
    found = None
    if text.isdecimal():
        with contextlib.suppress(NameMissing):
            found = journal.read_commit(int(text))
    else:
        found = next((commit for commit in journal.candidates() if text in ("", commit.path)), None)
    if found is None and not text:
        raise WrongUse(f"run {journal.run!r} has no commit that counts")
    if found is None:
        raise WrongUse(f"run {journal.run!r} has no commit {text}", hint="give its number, or the name of its folder")
    if journal.is_pruned(found.number):
        raise WrongUse(
            f"the checkpoint of commit {found.number} of run {journal.run!r} was pruned",
            hint="holdfast verify lists what there is",
        )
    return found


def counted(number: int, what: str) -> str:
    """``1 run``, ``2 runs``"""
    return f"{number} {what}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    """The value, as a program reads it."""
    print(json.dumps(value, indent=2))


def run_app(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code. An error is one clear line and, where there is one, a hint."""
    _escape_unknown_characters()
    interrupt.catch()
    with printing():
        return _run_app(app, arguments)


def _run_app(app: App, arguments: Sequence[str] | None) -> int:
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        return _complain(str(error), hint="--help shows what there is", exit_code=1)
    except HoldfastError as error:
        return _complain(error.message, error.hint, error.exit_code)
    except KeyboardInterrupt:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C needs no traceback of what is being ended
        return 130
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _escape_unknown_characters() -> None:
    """Print characters that the locale's encoding lacks as escapes, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(message: str, hint: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return exit_code


def main() -> None:
    """The console script. Told to end, it ends its ranks and removes its scratch folders first."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    sys.exit(run_app(app))

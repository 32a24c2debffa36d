"""The program ``holdfast``, with the commands of the core and of the extensions."""

import signal
import sys
from collections.abc import Sequence

from cyclopts import App

from holdfast import __version__
from holdfast.cli.commands import COMMANDS
from holdfast.config import DEFAULT_STORE
from holdfast.errors import ConfigError
from holdfast.extending import Command, find_extensions
from holdfast.terminal import interrupt
from holdfast.terminal.command import EXIT_CODES, run_app


def make_app(commands: Sequence[Command]) -> App:
    """Return the program with these commands. It imports a command's module when the command is called."""
    program = App(
        name="holdfast",
        help=f"Train runs, look at them, check them and keep them. RUN is <store>/<run>, or the name of a run in "
        f"the default store, {DEFAULT_STORE}/.",
        help_epilogue=EXIT_CODES,
        help_format="plaintext",
        version=__version__,
    )
    for each in commands:
        usage = {"usage": f"Usage: {each.usage}"} if each.usage else {}
        program.command(each.function, name=each.name, help=each.summary, show=each.is_shown, **usage)
    return program


def list_commands() -> list[Command]:
    """Return all commands by name.

    Raises:
        ConfigError: an extension can't be imported, or its command has the name of another one.
    """
    commands = {each.name: each for each in COMMANDS}
    for extension in find_extensions():
        for command in extension.commands:
            if command.name in commands:
                raise ConfigError(f"the extension {extension.name} has a command {command.name}, which exists already")
            commands[command.name] = command
    return [commands[name] for name in sorted(commands)]


def list_usable_commands() -> list[Command]:
    """Return all commands. If an extension is broken, print a warning, and return only the commands of the core.

    So the core's commands still work. Training is refused, because the extension may have a rule for machines.
    """
    try:
        return list_commands()
    except ConfigError as error:
        print(f"warning: {error.message}; extensions' commands are left out", file=sys.stderr)
        return list(COMMANDS)


app = make_app(list_usable_commands())


def main() -> None:
    """Run the console script. On SIGTERM or Ctrl-C, end the ranks and remove scratch folders before exiting."""
    signal.signal(signal.SIGTERM, interrupt.end)
    interrupt.catch(interrupt.end)
    sys.exit(run_app(app))

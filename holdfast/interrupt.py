"""The handler of Ctrl-C during imports: it ends a command at once, with exit code 130 and no traceback.

It raises no exception, because libraries wrap a KeyboardInterrupt from their code in errors of their own. `holdfast`
imports this module first; `holdfast.command.run_app` calls `catch` after all imports.
"""

import os
import signal
import sys
from pathlib import Path

COMMANDS = ("flows.", "deployments.", "holdfast.cli.")


def is_command() -> bool:
    """Return whether this process is one of Holdfast's commands, rather than a program that imports Holdfast."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return str(spec.name).startswith(COMMANDS)
    return bool(sys.argv) and Path(sys.argv[0]).name == "holdfast"


def end_at_once(number: int, frame: object) -> None:
    """End this process: it has nothing to save yet."""
    os._exit(128 + number)


def catch() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# A shell's background process ignores SIGINT. Leave it so.
if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)

"""Progress bars on standard error, and the console that prints the bars and the lines above them."""

import sys
from typing import Any, TextIO, cast

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import Progress, ProgressColumn

from holdfast.terminal import Printable


class _Terminal:
    """Standard error itself, without the streams that `Printable` and rich put in its place.

    While a bar is shown, rich replaces ``sys.stderr`` by a stream that writes to a `Printable`. To draw the bar, rich
    bypasses only its own stream. So the bar would pass through `Printable`, which would escape the control characters
    that move and colour the bar.
    """

    def __getattr__(self, name: str) -> Any:
        stream: Any = sys.stderr
        while isinstance(stream, FileProxy | Printable):
            stream = stream.rich_proxied_file
        return getattr(stream, name)


def open_console(*, soft_wrap: bool = False) -> Console:
    """Return a console on standard error that writes its colours and bars to the terminal without escaping them."""
    return Console(file=cast(TextIO, _Terminal()), highlight=False, soft_wrap=soft_wrap)


class Bar(Progress):
    """A progress bar, shown only on a terminal, that disappears at its end.

    While the bar is shown, other output appears above the bar, after `printable` has escaped control characters.
    """

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        super().__init__(
            *columns,
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # what is printed to a file or a pipe must not go to the terminal
            disable=not console.is_terminal,
        )

    def start(self) -> None:
        super().start()
        for name in ("stdout", "stderr"):
            stream: Any = getattr(sys, name)
            if isinstance(stream, FileProxy):
                setattr(sys, name, Printable(cast(TextIO, stream)))

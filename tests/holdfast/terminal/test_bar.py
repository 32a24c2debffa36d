"""Progress bars in a real terminal with colours: the bar is drawn, and what others print can't control the terminal."""

import re
import sys
from pathlib import Path

from holdfast.store import open_store
from tests.support.makers import make_line, train
from tests.support.terminals import Terminal

COLOURS = {"TERM": "xterm-256color", "COLUMNS": "100", "NO_COLOR": ""}

# A command that shows a bar while its recipe prints and warns.
SHOW = """
import logging, sys
from rich.progress import BarColumn, TextColumn
from holdfast.terminal.bar import Bar
from holdfast.attempt.progress import console, log_plain_lines
from holdfast.terminal import printing
with printing():
    log_plain_lines()
    with Bar(BarColumn(bar_width=24), TextColumn("{task.completed}"), console=console) as bar:
        task = bar.add_task("", total=4)
        print("out \\x9b2J \\x1b[2J \\u202e")
        print("err \\x9b2J \\x1b[2J \\u202e", file=sys.stderr)
        logging.getLogger("holdfast").warning("log \\x9b2J \\x1b[2J \\u202e")
        bar.update(task, completed=2, refresh=True)
    print("after \\x1b[2J")
"""


def show(*arguments: str) -> str:
    """Return all that a program writes to its terminal."""
    terminal = Terminal(sys.executable, *arguments, **COLOURS)
    assert terminal.finish() == 0, terminal.screen
    return terminal.screen


def test_a_bar_is_drawn_and_printed_control_characters_are_escaped() -> None:
    screen = show("-c", SHOW)
    assert "\x1b[2K" in screen, "the bar clears its line"
    for stream in ("out", "err", "warning: log"):
        assert rf"{stream} \x9b2J \x1b[2J \u202e" in screen
    assert r"after \x1b[2J" in screen
    assert not re.search(r"\\x1b\[(?!2J)", screen), "a character of the bar's own was escaped"


def test_the_output_of_a_pipe_stays_out_of_the_terminal(tmp_path: Path) -> None:
    screen = show("-c", f"import sys; sys.stdout = open({str(tmp_path / 'out')!r}, 'w')\n{SHOW}")
    assert "out " not in screen
    assert "out " in (tmp_path / "out").read_text()


def test_verify_draws_its_bar(tmp_path: Path) -> None:
    train(make_line(open_store(str(tmp_path))))
    screen = show("-m", "holdfast.cli", "verify", f"{tmp_path}/run")
    assert "\x1b[2K" in screen
    assert r"\x1b" not in screen

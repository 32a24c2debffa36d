"""The picture of README: a run that is killed and continues, ``python -m tests.support.cast``.

The picture is an animated SVG of a real terminal: it shows what two commands have printed, and when. Pauses are cut
to a second. A viewer without animations, and a reader who wants less motion, sees the last screen.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tests.conftest import ROOT, kill_tree
from tests.support.terminals import Terminal

PICTURE = ROOT / "docs" / "killed.svg"
EPOCHS, CHUNK, KILLED_AFTER = 6, "[chunk]\nepochs = 2\n", 170  # steps
COLUMNS, FONT, LINE = 100, 8.4, 18  # one character's width and one line's height, in units of the picture
EVERY_S, PAUSE_S, LAST_S = 0.2, 1.0, 5.0
# The colors of a terminal, by the code that a program writes.
COLORS = {"90": "#6e7681", "91": "#ff7b72", "92": "#7ee787", "36": "#79c0ff"}
CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")
HOLDFAST = str(Path(sys.executable).with_name("holdfast"))

Cells = tuple[tuple[str, str], ...]  # of a line: each character with its color; an empty color is the usual one


@dataclass
class Screen:
    """The lines of a terminal, and the times at which each of them changed.

    Args:
        versions: (line, time, cells), in the order of time.
    """

    lines: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    versions: list[tuple[int, float, Cells]] = field(default_factory=list)
    _row: int = 0
    _column: int = 0
    _color: str = ""

    def write(self, text: str, at: float) -> None:
        """Show what a program has printed at a time."""
        position = 0
        for code in CODE.finditer(text):
            self._put(text[position : code.start()])
            self._obey(code[1], code[2])
            position = code.end()
        self._put(text[position:])
        shown = {row: cells for row, _, cells in self.versions}
        for row, line in enumerate(self.lines):
            if shown.get(row, ()) != tuple(line):
                self.versions.append((row, at, tuple(line)))

    def _obey(self, numbers: str, letter: str) -> None:
        if letter == "m":
            self._color = COLORS.get(numbers, "")
        if letter == "K":
            self.lines[self._row].clear()
        if letter == "A":
            self._row -= int(numbers or 1)

    def _put(self, text: str) -> None:
        for character in text:
            if self._column == COLUMNS and character not in "\r\n":
                self._put("\r\n")
            if character == "\r":
                self._column = 0
            elif character == "\n":
                self._row += 1
                self._column = 0
                if self._row == len(self.lines):
                    self.lines.append([])
            else:
                line = self.lines[self._row]
                line += [(" ", "")] * (self._column + 1 - len(line))
                line[self._column] = character, self._color
                self._column += 1


class Recorder:
    """A screen with a clock that stands while nothing happens."""

    def __init__(self) -> None:
        self.screen, self.now = Screen(), 0.5

    def say(self, text: str) -> None:
        """Show a line of the person's."""
        self.screen.write(text + "\r\n", self.now)
        self.now += 1.0

    def run(self, folder: Path, *arguments: str, kill_after: int = 0) -> None:
        """Run ``holdfast`` and show what it prints.

        Args:
            kill_after: the step after which the command and its ranks are killed.
        """
        command = f"stty cols {COLUMNS}; cd {folder}; exec {HOLDFAST} {' '.join(arguments)}"
        terminal = Terminal("/bin/sh", "-c", command, HOLDFAST_SERVER_LINGERS_S="0")
        seen, changed = 0, time.monotonic()
        while True:
            has_ended = terminal.process.poll() is not None
            terminal.read(EVERY_S)
            if len(terminal.screen) > seen:
                self.now += min(time.monotonic() - changed, PAUSE_S)
                changed = time.monotonic()
                self.screen.write(terminal.screen[seen:], self.now)
                seen = len(terminal.screen)
            if kill_after and int((re.findall(r"step (\d+)/", terminal.screen) or [0])[-1]) >= kill_after:
                kill_after = 0
                kill_tree(terminal.process.pid)
                self.screen.write("\r\n", self.now)
            if has_ended:
                return


def record() -> Screen:
    """Train README's example, kill it, continue it, and compare it with a run that nobody killed."""
    code, settings = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[:2]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_model.py").write_text(code)
        (folder / "my_model.toml").write_text(re.sub(r"epochs = \d+", f"epochs = {EPOCHS}", settings) + CHUNK)
        straight = [HOLDFAST, "train", "my_model.toml", "--set", "run=straight"]
        subprocess.run(straight, cwd=folder, capture_output=True, check=True)
        recorder = Recorder()
        recorder.say("$ holdfast train my_model.toml")
        recorder.run(folder, "train", "my_model.toml", kill_after=KILLED_AFTER)
        recorder.say(f"\x1b[91m{'Killed':40}\x1b[0m\x1b[90m# kill -9, of the command and its rank\x1b[0m")
        recorder.say("$ holdfast train my_model.toml")
        recorder.run(folder, "train", "my_model.toml")
        recorder.say("$ holdfast compare spirals straight      \x1b[90m# straight: the same run, never killed\x1b[0m")
        recorder.run(folder, "compare", "spirals", "straight")
        return recorder.screen


def draw(screen: Screen) -> str:
    """Return the animated picture of a screen."""
    length = screen.versions[-1][1] + LAST_S
    height = LINE * (len(screen.lines) + 1)
    rules, texts = [], []
    for number, (row, begin, end, cells) in enumerate(_spans(screen, length)):
        name = ""
        if end < length:
            name = f" class='o' style='animation-name:f{number}'"
        elif begin:
            name = f" style='animation-name:f{number}'"
        first, last = 100 * begin / length, 100 * end / length
        shown = (
            f"{first:.2f}%{{opacity:1}}"
            if end >= length
            else f"{first:.2f}%,{last - 0.01:.2f}%{{opacity:1}}{last:.2f}%{{opacity:0}}"
        )
        rules.append(f"@keyframes f{number}{{0%,{max(first - 0.01, 0):.2f}%{{opacity:0}}{shown}}}")
        texts.append(f"<text y='{LINE * (row + 1)}'{name}>{''.join(_runs(cells))}</text>")
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre;"
        f"animation:{length:.1f}s step-end infinite}}.o{{opacity:0}}"
        "@media(prefers-reduced-motion){text{animation:none}}"
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {COLUMNS * FONT + 24:.0f} {height + 8}' role='img'>",
            "<title>A run is killed, continues, and ends on the same bytes as a run that nobody killed</title>",
            f"<style>{style}{''.join(rules)}</style>",
            "<rect width='100%' height='100%' rx='8' fill='#0d1117'/><g transform='translate(12 4)'>",
            *texts,
            "</g></svg>\n",
        ]
    )


def _spans(screen: Screen, length: float) -> Iterator[tuple[int, float, float, Cells]]:
    """Yield each version of a line that is not empty: line, begin and end in seconds, and its cells."""
    for index, (row, begin, cells) in enumerate(screen.versions):
        end = next((at for later, at, _ in screen.versions[index + 1 :] if later == row), length)
        if "".join(character for character, _ in cells).strip() and end > begin:
            yield row, begin, end, cells


def _runs(cells: Cells) -> Iterator[str]:
    """Yield the parts of a line that have one color."""
    text = "".join(character for character, _ in cells)
    start = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end][1] != cells[start][1]:
            part, color = escape(text[start:end]), cells[start][1]
            yield f"<tspan fill='{color}'>{part}</tspan>" if color else part
            start = end


if __name__ == "__main__":
    PICTURE.write_text(draw(record()), "utf-8")

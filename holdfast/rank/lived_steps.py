"""A file with the steps that ranks have trained and that no commit contains yet, on the disk of the ranks' machine.

If the ranks die, new ranks continue the run and train the same steps again, and `holdfast.attempt` compares the two
trails. So each death of ranks is as good a check as a rehearsal, without a rehearsal's cost. The file survives the
death of a process. It isn't flushed to the disk, so it may be lost if the machine fails.

The file contains the lines of the trail, each a JSON object. ``{"after": 60}`` begins a section: the lines that follow
are the steps after step 60, trained by one process. Nothing here imports torch.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.provenance.canonical import spell_floats

# The environment variable with the path of the file that the main rank writes; unset if it writes no file.
LIVED_VARIABLE = "HOLDFAST_LIVED"
SUFFIX = ".steps.jsonl"
# The size in bytes at which no further steps are written to the file.
MOST_BYTES = 2**24

Line = dict[str, Any]


class LivedSteps:
    """The file with the uncommitted steps of a set of ranks, which the main rank writes.

    Without a path, nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[Line] = []
        self._after = self._saved = 0
        self._is_full = False
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin a section of the file: the ranks have the state of ``step`` now, and train the steps after it."""
        self._lines, self._after, self._saved = [], step, step
        self._append([{"after": step}])

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add the lines of a trail that weren't added before."""
        known = self._lines[-1]["step"] if self._lines else self._after
        if self._path is None:
            return
        # Begin at the newest line: `lines` has all steps since the last save, which may be many thousands.
        found = itertools.takewhile(lambda line: line["step"] > known, reversed(lines))
        new = [spell_floats(dict(line)) for line in found][::-1]
        if new:
            self._lines += new
            self._append(new)

    def note_save(self, step: int) -> None:
        """Record that a save of this step has begun. The previous save is durable now, so remove that save's steps."""
        done, self._saved = self._saved, step
        self._lines = [line for line in self._lines if line["step"] > done]
        self._after, self._is_full = max(self._after, done), False
        if self._path is not None:
            beside = self._path.with_name(f"{self._path.name}.new")
            with contextlib.suppress(OSError):
                beside.write_text(_spell([{"after": self._after}, *self._lines]), "utf-8")
                beside.replace(self._path)

    def _append(self, lines: Sequence[Line]) -> None:
        if self._path is None or self._is_full:
            return
        # ignore an error: without these lines only a check of the run is lost
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            self._is_full = file.tell() > MOST_BYTES
            file.write(_spell(lines))


def open_lived() -> LivedSteps:
    """Return the object that writes this rank's file. In ranks other than the main rank, it writes nothing."""
    path = os.environ.get(LIVED_VARIABLE, "")
    return LivedSteps(Path(path) if path and os.environ.get("RANK", "0") == "0" else None)


def find_lived(folder: Path, first: int, step: int) -> list[Line]:
    """Return the trail's lines after ``step`` from the first process that trained these steps; empty if there is none.

    Args:
        folder: the run's folder for logs.
        first: the number of the attempt that committed ``step``. Earlier attempts have trained no later steps.
    """
    for path in sorted(folder.glob(f"attempt-*{SUFFIX}")):
        if _number_of(path) < first:
            continue
        for after, lines in _read_sections(path):
            found = [line for line in lines if line["step"] > step]
            if after <= step and found and found[0]["step"] == step + 1:
                return found
    return []


def delete_lived(folder: Path, first: int, step: int) -> None:
    """Delete the files of the attempts before ``first``, and of all attempts that trained nothing after ``step``."""
    for path in folder.glob(f"attempt-*{SUFFIX}"):
        if _number_of(path) < first or all(lines[-1]["step"] <= step for _, lines in _read_sections(path)):
            path.unlink(missing_ok=True)


def name_lived(folder: Path, attempt: int) -> Path:
    """Return the path of an attempt's file of uncommitted steps."""
    return folder / f"attempt-{attempt:08d}{SUFFIX}"


def _number_of(path: Path) -> int:
    return int(path.name.removeprefix("attempt-").removesuffix(SUFFIX))


def _read_sections(path: Path) -> Iterator[tuple[int, list[Line]]]:
    """Yield each section of a file: the step after which it begins, and its readable lines."""
    after, lines = -1, list[Line]()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # ignore a last line that is cut short
        for text in path.read_text("utf-8").splitlines():
            line = json.loads(text)
            if "after" in line:
                if lines:
                    yield after, lines
                after, lines = int(line["after"]), []
            elif after >= 0 and type(line["step"]) is int:
                lines.append(line)
    if lines:
        yield after, lines


def _spell(lines: Sequence[Line]) -> str:
    return "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)

"""Trials of the grid's programs: train straight, stop and continue, and compare the bytes."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.testing.faults import fault
from tests.programs.grid import Case, Timing, write_program
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, By, Program, judge
from tests.support.stopped import DRAIN_FILE, STOP

COMMAND = "tests.support.stopped:train"
# What came of a case: the ``same`` bytes; an end by a rehearsal, a gate or the steps of earlier ranks (``stopped``);
# ``different`` bytes with exit code 0; or any other ``failure``.
End = Literal["same", "stopped", "different", "failure"]
ENDS: dict[By, End] = {"same": "same", "rehearsal": "stopped", "death": "stopped", "gate": "stopped"}
# Words of warnings that say how a run was stopped.
OF_A_STOP = ("is drained", "latest.json", "could not be saved", "no checkpoint could be saved")


def list_warnings(said: Iterable[str]) -> list[str]:
    """Return the warnings among the errors of commands, apart from those of a stop."""
    warnings = [line for text in said for line in text.splitlines() if line.startswith("warning")]
    return [line for line in warnings if not any(words in line for words in OF_A_STOP)]


@dataclass(frozen=True)
class Result:
    """The outcome of a case.

    Args:
        said: the errors of all commands.
        shown: what ``holdfast show`` says of a run that has ended on different bytes.
        has_struck: whether the run was stopped, rather than complete or refused before.
    """

    case: Case
    end: End
    said: str
    shown: str = ""
    has_struck: bool = True

    @property
    def warnings(self) -> list[str]:
        """Return the warnings, apart from those of the stop itself."""
        return list_warnings([self.said])


@dataclass
class Trials:
    """Tries cases in a folder, with one straight run for all cases of the same program and lengths."""

    nursery: Lives
    folder: Path
    _straight: dict[tuple[str, Timing], str] = field(default_factory=dict)

    def attempt(self, case: Case) -> Result:
        """Stop a case's program, continue it and return what came of it."""
        program = self._make(case, str(case))
        straight = self.find_straight(case)
        settings, said, struck = ["proof.rehearse=on"], [], program.folder / "struck"
        if case.is_often_rehearsed:
            settings = [*REHEARSED]
        variables: dict[str, str] = {}
        if case.how == "alone":
            settings.append("proof.beside=false")
        elif case.how == "commit":
            variables = fault("commit-recorded", case.step, "both", struck)
        else:
            variables = {STOP: f"{case.how}:{case.step}:{struck}"}
        if case.how == "notice":
            settings.append(f"resume.drain_file={program.folder / DRAIN_FILE}")
        done = program.train(*settings, **variables)
        said.append(done.stderr)
        (program.folder / DRAIN_FILE).unlink(missing_ok=True)
        has_struck = struck.exists()
        if has_struck and done.returncode not in (0, 2):
            done = program.train(*settings)
            said.append(done.stderr)
        by, shown = judge(done), ""
        end = ENDS.get(by, "failure")
        if by == "same" and program.find_content() != straight:
            shown = self.nursery.call("tests.support.forked:command", "show", str(program.folder / "program")).stdout
            end = "different"
        shutil.rmtree(program.folder)
        return Result(case, end, "\n".join(said), shown, has_struck)

    def find_straight(self, case: Case) -> str:
        """Return the content id of a case's program that nobody stops."""
        key = (case.program, case.timing)
        if key not in self._straight:
            program = self._make(case, f"straight-{case.program}-{case.timing}")
            done = program.train("proof.rehearse=off")
            assert done.returncode == 0, done.stderr
            self._straight[key] = program.find_content()
            shutil.rmtree(program.folder)
        return self._straight[key]

    def _make(self, case: Case, name: str) -> Program:
        folder = self.folder / re.sub(r"[^\w-]", "_", name)
        folder.mkdir(parents=True)
        file = folder / f"{re.sub(r'[^a-z]', '_', case.shape)}.py"
        file.write_text(write_program(case))
        return Program(self.nursery, folder, f"{file}:train", {}, case.timing.epochs, case.timing.chunk, COMMAND)

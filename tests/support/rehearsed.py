"""Programs that are trained straight, rehearsed and killed, and what came of it."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import ROOT
from tests.support.lives import Lives

# Rehearse at every commit, also in a run that is over within a minute.
REHEARSED = ("proof.rehearse=on", "proof.share=1.0")
By = Literal["same", "other", "rehearsal", "death", "gate", "refusal", "failure"]


def list_functions(file: Path) -> Iterator[tuple[str, Literal["recipe", "loop"], str]]:
    """Yield each public function of a module that builds a recipe or is a loop: its name, kind and docstring."""
    for each in ast.parse(file.read_text("utf-8")).body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and each.returns:
            annotations = {ast.unparse(part.annotation) for part in each.args.args if part.annotation}
            if "Run" in annotations or ast.unparse(each.returns) == "Recipe":
                kind: Literal["recipe", "loop"] = "loop" if "Run" in annotations else "recipe"
                yield each.name, kind, (ast.get_docstring(each) or "").partition("\n")[0]


@dataclass(frozen=True)
class Outcome:
    """The end of a command that trained.

    Args:
        by: what stopped the run: a ``rehearsal``, the steps of a ``death``, the ``gate``, or a ``refusal`` of its
            settings, its code or a value; a ``failure`` is an error in a step. A completed run ended on the ``same``
            bytes as a straight one, or on ``other`` bytes.
        step: the step of the newest commit.
        said: the last lines of the command's errors.
    """

    by: By
    step: int
    said: str

    def __str__(self) -> str:
        return {"same": "the same bytes", "refusal": "refused"}.get(self.by, f"{self.by}, step {self.step}")


@dataclass
class Program:
    """One run of a program, trained by commands that a nursery forks.

    Args:
        recipe: ``module:function`` below tests/, or ``path:function``.
        settings: those of the recipe, and others of the configuration by dotted name.
        command: the function that a process of its own calls; see `tests.support.forked`.
    """

    nursery: Lives
    folder: Path
    recipe: str
    settings: dict[str, Any]
    epochs: int
    chunk: str = "epochs = 1"
    command: str = "tests.support.forked:train"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in self.settings.items())
        recipe = self.recipe if self.recipe.startswith("/") else f"tests.{self.recipe}"
        self.config = self.folder / "program.toml"
        self.config.write_text(
            f'recipe = "{recipe}"\nrun = "program"\nepochs = {self.epochs}\nstore = "{self.folder}"\n'
            f'{settings}[chunk]\n{self.chunk}\n[log]\nfolder = "{self.folder}/logs"\n'
        )

    @property
    def journal(self) -> Journal:
        return Journal(open_store(str(self.folder)), "program")

    def train(self, *settings: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run ``holdfast train`` to its end."""
        variables = {"PROGRAM_FILES": str(self.folder), "OUTPUT": str(self.folder / "output")} | environment
        return self.nursery.call(self.command, str(self.config), settings, **variables)

    def kill_at(self, commit: int, *settings: str, point: str = "commit-recorded") -> bool:
        """Train until a commit, and kill the command and its ranks with SIGKILL there; return whether that happened.

        Args:
            commit: counted from the first one of this command.
            point: see `holdfast.machine.faults.POINTS`.
        """
        struck = self.folder / f"struck-{self.journal.attempts()}"
        self.train(*settings, **fault(point, commit, "both", struck))
        return struck.exists()

    def find_step(self) -> int:
        """Return the step of the newest commit; 0 for none."""
        newest = self.journal.newest()
        return newest.step if newest else 0

    def find_content(self) -> str:
        """Return the content id of the newest commit."""
        newest = self.journal.newest()
        assert newest is not None
        return newest.checkpoint_sha256

    def finish(self, straight: str, *settings: str) -> Outcome:
        """Train to the end.

        Args:
            straight: the content id of the program's run that nobody interrupted.
        """
        done = self.train(*settings)
        by = judge(done)
        if by == "same" and self.find_content() != straight:
            by = "other"
        return Outcome(by, self.find_step(), "\n".join(done.stderr.splitlines()[-4:]))


def judge(done: "subprocess.CompletedProcess[str]") -> By:
    """Return what ended a command, by its exit code and its words; ``same`` if the run is complete."""
    if done.returncode == 0:
        return "same"
    if done.returncode != 2:
        return "failure" if "training failed" in done.stderr else "refusal"
    if re.search(r"^error: .*would not continue", done.stderr, re.MULTILINE):
        return "rehearsal"
    return "death" if re.search(r"^error: .*does not continue", done.stderr, re.MULTILINE) else "gate"


def find_straight(nursery: Lives, folder: Path, program: Program) -> str:
    """Train a program straight, without rehearsals; return its content id."""
    straight = Program(nursery, folder, program.recipe, program.settings, program.epochs, program.chunk)
    done = straight.train("proof.rehearse=off")
    assert done.returncode == 0, done.stderr
    return straight.find_content()


PROGRAMS = ROOT / "tests" / "programs"

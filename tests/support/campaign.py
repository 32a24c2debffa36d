"""The rate of detection: flips of single bits, and ordinary programs, whose chunks other machines audit.

``python -m tests.support.campaign --flips 200 --chunks 1000 --seed 1`` prints the tables of docs/trust.md.
"""

import dataclasses
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App

from holdfast.config import RunConfig, load_config
from holdfast.errors import HoldfastError
from holdfast.journal import Journal
from holdfast.journal.judgement import read_verdict
from holdfast.journal.verdict import Ask
from holdfast.machine.host import VARIABLE
from holdfast.store import open_store
from tests.support.lives import Lives, lives
from tests.support.rehearsed import Program
from tests.support.struck import FLIP, PLACES, STRUCK, Flip

TRAINER, AUDITORS = "node-1", ("node-2", "node-3")
CHUNK, CHUNKS = 3, 3
STRUCK_COMMIT = 2  # the flips are in its steps, or begin there
MOST_AUDITS = 8
# The outcomes of a case: `Found.judge`.
COLUMNS = (
    "named", "no byte", "trained again", "stopped", "undecided", "missed", "wrong host", "wrong verdict", "failed",
    "not planted",
)  # fmt: skip
# Those that aren't a fault of Holdfast's: besides a verdict, no byte changed, or the run refused to save the state.
FINE = COLUMNS[:4]
# Ranks, and virtual ranks.
RANKS = ((1, 0), (2, 0), (4, 0), (1, 4), (2, 4), (4, 4))


@dataclass(frozen=True)
class Case:
    """A planted flip, and the ranks of its run.

    Args:
        virtual: the number of virtual ranks; 0 for none.
    """

    flip: Flip
    ranks: int
    virtual: int

    def __str__(self) -> str:
        flip = self.flip
        how = "sticky" if flip.is_sticky else "once"
        return (
            f"{flip.place}-{how}-on-{flip.host}-step-{flip.step}-bit-{flip.bit}-element-{flip.element}"
            f"-rank-{flip.rank}-of-{self.ranks}-virtual-{self.virtual}"
        )


@dataclass(frozen=True)
class Found:
    """The outcome of a case.

    Args:
        flipped: whether the bit did flip.
        stopped: the error that ended the run or an audit; empty if there was none.
        changed: the commits of the run whose bytes aren't those of a healthy run.
        replays: the commits whose audit ended on different bytes, or that the gate refused to begin with.
        is_repeated: whether new ranks have trained a chunk of the run again.
        kind, host: of the last verdict.
        commits: the content ids of the run's commits.
    """

    flipped: bool
    stopped: str
    changed: list[int]
    replays: list[int]
    is_repeated: bool
    kind: str
    host: str
    commits: list[str]

    def judge(self, case: Case) -> str:
        """Return the column of the table."""
        if not self.flipped:
            return "not planted"
        if self.stopped:
            return "stopped" if "nothing was saved" in self.stopped else "failed"
        if self.kind == "machine":
            return "named" if self.host == case.flip.host else "wrong host"
        if self.kind == "certified":
            if self.changed or self.replays:
                return "missed"
            return "trained again" if self.is_repeated else "no byte"
        return "undecided" if self.kind == "undecided" else "wrong verdict"


def draw(seed: int, number: int) -> list[Case]:
    """Return cases in which each place, number of ranks and duration is as frequent as the others."""
    chosen = random.Random(seed)
    cases = []
    for count in range(number):
        place = PLACES[count % len(PLACES)]
        some = [each for each in RANKS if each[0] > 1] if place == "reduction" else RANKS
        ranks, virtual = some[count // len(PLACES) % len(some)]
        flip = Flip(
            place=place,
            host=chosen.choice((TRAINER, TRAINER, AUDITORS[0])),
            step=chosen.choice((5, 6)),
            rank=chosen.randrange(ranks),
            bit=chosen.randrange(32),
            element=chosen.randrange(10_000),
            is_sticky=chosen.random() < 0.5,
        )
        cases.append(Case(flip, ranks, virtual))
    return cases


# ---- in the process that trains and audits


def make_config(folder: Path, ranks: int, virtual: int) -> RunConfig:
    """Return the configuration of a run of `struck`."""
    known = {
        "recipe": "tests.support.struck:struck", "run": "struck", "store": str(folder), "epochs": 1,
        "chunk": {"steps": CHUNK}, "retention": {"keep_last": 99}, "log": {"folder": str(folder / "logs")},
        "compute": {"ranks": ranks, "virtual_ranks": virtual, "device": "cpu"}, "proof": {"rehearse": "off"},
    }  # fmt: skip
    return RunConfig.model_validate(known)


def run_case(folder: str, ranks: int, virtual: int, right: list[str]) -> int:
    """Train a run on one machine, and audit it on others until a verdict; print what was `Found`.

    Args:
        right: the content ids of a healthy run's commits; empty to train that run.
    """
    from holdfast.attempt import live
    from tests.support.forked import fork_ranks

    fork_ranks()
    config = make_config(Path(folder), ranks, virtual)
    journal = Journal(open_store(config.store), config.run)
    kind, host, replays, stopped = "", "", list[int](), ""
    try:
        os.environ[VARIABLE] = TRAINER
        live(config)
        if right:
            kind, host = _audit_in_turn(journal, replays)
    except HoldfastError as error:
        stopped = f"{type(error).__name__}: {error}"
    made = [journal.read_commit(number) for number in journal.numbers("commits")]
    commits, is_repeated = [each.checkpoint_sha256 for each in made], len({each.restart_s for each in made}) > 1
    changed = [n for n, (own, healthy) in enumerate(zip(commits, right, strict=False), 1) if own != healthy]
    flipped = Path(os.environ.get(STRUCK, os.devnull + "/none")).exists()
    print(json.dumps(dataclasses.asdict(Found(flipped, stopped, changed, replays, is_repeated, kind, host, commits))))
    return 0


def _audit_in_turn(journal: Journal, replays: list[int]) -> tuple[str, str]:
    """Audit the commits from the struck one on, until a verdict names somebody; return its kind and host."""
    kind = host = ""
    for number in range(STRUCK_COMMIT, CHUNKS + 1):
        kind, host = _audit_until_decided(journal, number, replays)
        if kind != "certified":
            break
    return kind, host


def _audit_until_decided(journal: Journal, number: int, replays: list[int]) -> tuple[str, str]:
    """Audit a commit, and then what each verdict asks for, as the flow `audit` does on a pool."""
    from holdfast.proof.audit import audit_commit, keep_audit

    ask = Ask(number)
    for _ in range(MOST_AUDITS):
        answered = ask.answered or (TRAINER,)
        free = [each for each in (*AUDITORS, TRAINER) if each not in answered] or [*ask.repeat]
        if not free:
            break
        os.environ[VARIABLE] = free[0]
        audit = audit_commit(journal, journal.read_commit(ask.commit), ask.from_commit)
        keep_audit(journal, audit)
        if not audit.is_identical:
            replays.append(ask.commit)
        verdict = read_verdict(journal, journal.read_commit(ask.commit))
        if verdict and verdict.kind == "certified":  # as a parent, perhaps
            verdict = read_verdict(journal, journal.read_commit(number))
        assert verdict is not None
        if verdict.ask is None:
            return verdict.kind, verdict.host
        ask = verdict.ask
    return "undecided", ""


def certify(path: str, settings: list[str], most: int) -> int:
    """Train an ordinary run on one machine, and audit its chunks on another; print the verdicts' kinds as JSON.

    Args:
        most: how many chunks to audit, the newest first.
    """
    from holdfast.attempt import live
    from holdfast.proof.audit import audit_commit, keep_audit
    from tests.support.forked import fork_ranks

    fork_ranks()
    config = load_config(Path(path), settings)
    os.environ[VARIABLE] = TRAINER
    live(config)
    journal = Journal(open_store(config.store), config.run)
    kinds = []
    os.environ[VARIABLE] = AUDITORS[0]
    for number in journal.numbers("commits")[::-1][:most]:
        commit = journal.read_commit(number)
        keep_audit(journal, audit_commit(journal, commit))
        verdict = read_verdict(journal, commit)
        assert verdict is not None
        kinds.append(verdict.kind if verdict.kind == "certified" else str(verdict))
    print(json.dumps(kinds))
    return 0


# ---- in the process that draws


class Campaign:
    """Cases, each in a process of its own, and the bytes of healthy runs to compare them with."""

    def __init__(self, nursery: Lives, folder: Path) -> None:
        self._nursery, self._folder = nursery, folder
        self._right: dict[tuple[int, int], list[str]] = {}
        self._number = 0

    def find(self, case: Case) -> Found:
        """Train and audit a case's run."""
        ranks = case.ranks, case.virtual
        if ranks not in self._right:
            self._right[ranks] = self._run(ranks, [], {}).commits
        with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
            return self._run(ranks, self._right[ranks], case.flip.variables(Path(scratch) / "struck"))

    def _run(self, ranks: tuple[int, int], right: list[str], variables: dict[str, str]) -> Found:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            own = {FLIP: "", STRUCK: ""} | variables
            done = self._nursery.call("tests.support.campaign:run_case", folder, *ranks, right, **own)
        assert done.returncode == 0, done.stderr
        return Found(**json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True)
class Ordinary:
    """An ordinary program's run.

    Args:
        recipe: ``module:function`` below tests/.
        settings: those of the recipe, and others of the configuration by dotted name.
    """

    recipe: str
    epochs: int
    chunk: str
    settings: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.recipe, *(f"{name}={value}" for name, value in self.settings)])

    def judge(self, nursery: Lives, most: int) -> list[str]:
        """Train it on one machine and audit its chunks on another; return the verdicts, see `certify`."""
        with tempfile.TemporaryDirectory() as folder:
            program = Program(nursery, Path(folder), self.recipe, dict(self.settings), self.epochs, self.chunk)
            variables = {"PROGRAM_FILES": folder, "OUTPUT": f"{folder}/output"}
            options = ["retention.keep_last=99", "proof.rehearse=off"]
            done = nursery.call("tests.support.campaign:certify", str(program.config), options, most, **variables)
        assert done.returncode == 0, f"{self}: {done.stderr}"
        return list(json.loads(done.stdout.splitlines()[-1]))


VARIANTS: tuple[tuple[tuple[str, object], ...], ...] = (
    (("compute.mixed_precision", "bf16"),),
    (("compute.loader_workers", 2),),
    (("settings.compiles", True),),
    (("compute.ranks", 2), ("compute.mixed_precision", "bf16")),
    (("compute.ranks", 2), ("compute.loader_workers", 1)),
    (("compute.ranks", 2), ("compute.virtual_ranks", 4)),
    (("compute.virtual_ranks", 4), ("compute.mixed_precision", "bf16"), ("settings.compiles", True)),
)


def list_ordinary() -> list[Ordinary]:
    """Return the ordinary programs of tests/programs/, and a recipe with bf16, loader workers, torch.compile, ranks."""
    from tests.programs.kinds import KINDS

    found = [Ordinary(each.recipe, each.epochs, each.chunk, each.settings) for each in KINDS if not each.needs]
    return [Ordinary("support.struck:struck", 5, "steps = 3", each) for each in VARIANTS] + found


app = App(name="python -m tests.support.campaign", help=__doc__.partition("\n")[0], version_flags=[])


@app.default
def main(*, flips: int = 0, chunks: int = 0, seed: int = 1, only: list[int] | None = None) -> None:
    """Print each case, each ordinary program, and the tables.

    Args:
        flips: how many flips to plant.
        chunks: how many chunks of ordinary programs to audit.
        only: the numbers of the flips to plant, of those that are drawn; by default all.
    """
    with tempfile.TemporaryDirectory() as folder, lives() as nursery:
        if flips:
            cases = [*enumerate(draw(seed, flips))]
            print(plant(Campaign(nursery, Path(folder)), [cases[each] for each in only] if only else cases))
        if chunks:
            print(judge_ordinary(nursery, chunks, seed))


def plant(campaign: Campaign, cases: Sequence[tuple[int, Case]]) -> str:
    """Plant flips, each with its number, and print each; return a table of their places."""
    counts = {place: Counter[str]() for place in PLACES}
    for number, case in cases:
        found = campaign.find(case)
        column = found.judge(case)
        counts[case.flip.place][column] += 1
        print(f"{number} {case}: {column}", found.stopped, found.changed, found.replays, flush=True)
    columns = sorted({column for row in counts.values() for column in row}, key=COLUMNS.index)
    lines = ["| place | planted | " + " | ".join(columns) + " |", "|---|" + "---|" * (len(columns) + 1)]
    for place, row in counts.items():
        lines.append(f"| {place} | {row.total()} | " + " | ".join(str(row[each]) for each in columns) + " |")
    return "\n".join(lines)


def judge_ordinary(nursery: Lives, chunks: int, seed: int) -> str:
    """Audit chunks of ordinary programs, and print each program's; return the number of chunks and of verdicts."""
    programs = list_ordinary()
    random.Random(seed).shuffle(programs)
    audited, others = 0, 0
    while audited < chunks:
        for program in programs:
            kinds = program.judge(nursery, chunks - audited)
            wrong = [kind for kind in kinds if kind != "certified"]
            audited, others = audited + len(kinds), others + len(wrong)
            print(f"{program}: {len(kinds)} chunks", *wrong, flush=True)
            if audited >= chunks:
                break
    return f"{audited} chunks of ordinary programs, {others} different verdicts than certified"


if __name__ == "__main__":
    sys.exit(app())

"""One of several ranks is killed without notice: the others save the last completed step, and no byte differs."""

import collections
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import read_metadata
from holdfast.journal import Commit, Journal
from holdfast.ledger.goodput import make_ledger
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import COMMAND_WITHIN_S, IN_SOAK, IS_SOAK, ROOT
from tests.support.device import DEVICE, ON_GPUS
from tests.support.lives import Lives
from tests.support.vanishing import FAULTS, LATER_MS, NOTES

pytestmark = pytest.mark.slow

EPOCHS, STEPS_PER_EPOCH, CHUNK = 2, 6, 5
STEPS = EPOCHS * STEPS_PER_EPOCH
VIRTUAL = "compute.virtual_ranks = 8"
RANDOM_KILLS = 30 if IS_SOAK else 2

Fault = tuple[str, int, int]  # the place, the step and the rank


class Run:
    """A run in a folder, whose ranks have faults."""

    def __init__(self, folder: Path, ranks: int, *faults: Fault, how: str = VIRTUAL, **environment: str) -> None:
        """
        Args:
            how: the settings that say how the ranks train together.
        """
        folder.mkdir(exist_ok=True)
        self.folder, self.config = folder, str(folder / "config.toml")
        lines = [
            'recipe = "tests.support.vanishing:vanishing"', 'run = "r"', f"store = {json.dumps(str(folder))}",
            f"epochs = {EPOCHS}", f"chunk.steps = {CHUNK}", "retention.keep_last = 99", f"compute.ranks = {ranks}",
            f'compute.device = "{DEVICE}"', f"log.folder = {json.dumps(str(folder / 'logs'))}", how,
        ]  # fmt: skip
        Path(self.config).write_text("\n".join(lines))
        self.struck = [folder / f"struck-{number}" for number in range(len(faults))]
        asked = [(*each, str(file)) for each, file in zip(faults, self.struck, strict=True)]
        self.environment = {FAULTS: json.dumps(asked), NOTES: str(folder / "notes"), **environment}
        self.journal = Journal(open_store(str(folder)), "r")

    def train(self, nursery: Lives) -> "Run":
        """Train it to its end, or until an error ends the command."""
        self.done = nursery.call("tests.support.forked:train", self.config, [], **self.environment)
        assert all(file.exists() for file in self.struck), "a fault has missed"
        return self

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in (self.folder / "logs" / "r").glob("attempt-*.log"))

    @property
    def commits(self) -> list[Commit]:
        return sorted(self.journal.candidates(), key=lambda commit: commit.step)

    @property
    def content_id(self) -> str:
        assert self.commits[-1].step == STEPS, self.done.stderr + self.log
        return self.commits[-1].checkpoint_sha256

    @property
    def adopted(self) -> list[int]:
        """The steps that ranks have saved before they ended, and that the attempt has adopted."""
        return [commit.step for commit in self.commits if commit.why == "adopted"]

    @property
    def trail(self) -> list[dict[str, Any]]:
        """The lines of the trail, without the facts of shares: which lines have them depends on the interruptions."""
        store = self.journal.store
        texts = [store.read(f"metrics/{name}").decode() for name in sorted(store.list("metrics"))]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return [{name: each for name, each in line.items() if name != "parts"} for line in lines]

    @property
    def trained(self) -> collections.Counter[int]:
        """The number of ranks that completed each step; a rank that trained it twice counts twice."""
        return collections.Counter(int(line.split()[1]) for line in (self.folder / "notes").read_text().splitlines())


@pytest.fixture(scope="module")
def straight(nursery: Lives, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("straight"), 1).train(nursery)


def check_trained_once(run: Run, ranks: int, kills: int) -> None:
    """Check that no step was trained twice.

    A rank that its save's thread kills may be in a step that the others complete with the gradients that it sent.
    """
    trained = run.trained
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert max(trained.values()) == ranks, "a step was trained twice"
    assert sum(ranks - number for number in trained.values()) <= kills


def check_same(run: Run, straight: Run) -> None:
    assert run.content_id == straight.content_id, run.log
    assert run.trail == straight.trail


@pytest.mark.parametrize(("ranks", "killed"), [(2, 0)] + [(4, 2), (2, 1), (4, 0)] * IS_SOAK)
def test_a_rank_killed_in_mid_step_costs_no_step(
    nursery: Lives, tmp_path: Path, straight: Run, ranks: int, killed: int
) -> None:
    run = Run(tmp_path, ranks, ("backward", 9, killed)).train(nursery)
    assert run.adopted[-1:] == [8], run.log
    assert run.trained == dict.fromkeys(range(1, STEPS + 1), ranks), "a step was trained twice"
    assert [attempt.lost_steps for attempt in make_ledger(run.journal).attempts] == [0]
    check_same(run, straight)
    found = [read_metadata(run.journal.store, commit.path) for commit in run.commits]
    assert all(each and each.environment["sources"] == found[0].environment["sources"] != {} for each in found)
    assert all(each and each.rank_probes == [each.probe] for each in found)


@pytest.mark.parametrize(
    ("place", "step", "adopted"),
    [("optimizer", 9, 9), ("raise", 9, 8)] + [("after", 6, 6), ("evaluate", 6, 6)] * IS_SOAK,
)
def test_a_rank_may_end_anywhere_in_a_step(
    nursery: Lives, tmp_path: Path, straight: Run, place: str, step: int, adopted: int
) -> None:
    """A rank whose gradients have reached the others completes the step without knowing it."""
    run = Run(tmp_path, 2, (place, step, 0)).train(nursery)
    assert run.adopted[-1:] == [adopted], run.log
    assert set(run.trained.values()) <= {1, 2}, "a step was trained twice"
    check_same(run, straight)


@pytest.mark.parametrize(
    ("point", "number"), [("payload-written", 1)] + [("metadata-durable", 1), ("payload-durable", 3)] * IS_SOAK
)
def test_a_main_rank_killed_in_a_save_loses_none_of_its_steps(
    nursery: Lives, tmp_path: Path, straight: Run, point: str, number: int
) -> None:
    """The others still have the trail of a save that isn't complete. The last one is that of the run's end."""
    struck = tmp_path / "struck"
    run = Run(tmp_path, 2, **fault(point, number, "self", struck)).train(nursery)
    assert struck.exists()
    check_trained_once(run, 2, 1)
    check_same(run, straight)


def test_ranks_are_killed_one_after_the_other(nursery: Lives, tmp_path: Path, straight: Run) -> None:
    """The main rank, the rank that saves in its place, and later another one."""
    struck = tmp_path / "struck"
    run = Run(tmp_path, 4, ("backward", 3, 0), ("backward", 9, 2), **fault("payload-durable", 1, "self", struck))
    run.train(nursery)
    assert struck.exists()
    assert {2, 8} <= {*run.adopted}, run.log
    check_trained_once(run, 4, 3)
    check_same(run, straight)


@pytest.mark.parametrize("seed", range(RANDOM_KILLS))
def test_a_rank_is_killed_at_any_moment(nursery: Lives, tmp_path: Path, straight: Run, seed: int) -> None:
    chosen = random.Random(seed)
    ranks = chosen.choice([2, 3, 4])
    later = Run(
        tmp_path,
        ranks,
        ("later", chosen.randrange(1, STEPS - 2), chosen.randrange(ranks)),
        **{LATER_MS: str(chosen.uniform(0, 60))},
    )
    check_same(later.train(nursery), straight)


# On GPUs no rank can be sure of the last step.
UNSURE = [("fsdp", 2, 8), *([("ddp", 4, 0), ("fsdp", 2, 0)] if IS_SOAK else []), *([("ddp", 2, 8)] if ON_GPUS else [])]


@pytest.mark.gpus
@pytest.mark.parametrize(("parallel", "ranks", "shares"), UNSURE)
def test_state_that_a_rank_has_alone_costs_a_chunk_at_most(
    nursery: Lives, tmp_path: Path, parallel: str, ranks: int, shares: int
) -> None:
    """Its generators, or its share of the weights, are lost with it."""
    how = f'compute.parallel = "{parallel}"\nsettings.how = "alike"\ncompute.virtual_ranks = {shares}'
    straight = Run(tmp_path / "straight", ranks, how=how).train(nursery)
    run = Run(tmp_path / "killed", ranks, ("optimizer", 9, 1), how=how).train(nursery)
    assert max(run.adopted, default=0) <= 6, "a commit was still to be made of what all ranks had saved"
    again = {step for step, count in run.trained.items() if count > ranks}
    assert {7, 8, 9} <= again <= {6, 7, 8, 9}, "that of step 6 may have been under way, that of step 5 was not"
    check_same(run, straight)


def test_the_others_save_nothing_if_a_rank_has_refused_a_step(nursery: Lives, tmp_path: Path) -> None:
    """Its gradient may not be deterministic, and the others have it in their weights."""
    run = Run(tmp_path, 2, ("refuse", 9, 1)).train(nursery)
    assert run.done.returncode == 1
    assert "use_deterministic_algorithms" in run.done.stderr
    assert max((commit.step for commit in run.commits), default=0) <= 6
    assert not list(tmp_path.glob("r/epoch-0002*/metadata.json"))


@IN_SOAK
def test_ranks_under_torchrun_save_before_it_ends_them(tmp_path: Path, straight: Run) -> None:
    run = Run(tmp_path, 2, ("backward", 9, 0))
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "train", run.config],
        env=os.environ | run.environment, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_WITHIN_S,
        check=True,
    )  # fmt: skip
    said = " ".join(done.stderr.split())
    assert "the ranks ended: rank 0: signal 9 (SIGKILL)" in said
    assert "adopting epoch-0002-step-00000008 (step 8), which this attempt's earlier ranks had saved" in said
    run.done = done
    check_same(run, straight)

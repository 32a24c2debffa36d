"""A run without virtual ranks continues with different numbers of ranks, across kills."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from holdfast.data import Order
from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.support.device import DEVICE
from tests.support.lives import Lives
from tests.support.numbered import BATCH_SIZE, GRAD_ACCUM, LIFE, SAMPLES, STEPS_PER_EPOCH

pytestmark = pytest.mark.slow

EPOCHS = 6
# Relative: what docs/ranks.md and RESUME.md promise of a recipe without random numbers in its steps.
TOLERANCE = 1e-4
# Each life: its number of ranks, and where SIGKILL ends it, in its second chunk or before its first commit. What its
# ranks have saved by then is adopted.
LIVES = [
    (4, ("chunk-reported", 2, "self")),
    (2, ("chunk-reported", 2, "both")),
    (3, ("chunk-reported", 2, "self")),
    (1, ("metadata-durable", 1, "other")),
    (4, None),
]
REASONS = [["saved 4, here 2"], ["saved 2, here 3"], ["saved 3, here 1"], ["saved 3, here 4", "saved 1, here 4"]]


def train(nursery: Lives, folder: Path, ranks: int | str, *settings: str, **environment: str) -> Any:
    """Train the run in the folder; return the ended command."""
    folder.mkdir(exist_ok=True)
    lines = [
        'recipe = "tests.support.numbered:numbered"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        f"epochs = {EPOCHS}", "chunk.steps = 4", "retention.keep_last = 99",
        f"settings.notes = {json.dumps(str(folder / 'notes'))}",
        f"compute.ranks = {json.dumps(ranks)}", f'compute.device = "{DEVICE}"',
        f"log.folder = {json.dumps(str(folder))}",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(lines))
    return nursery.call("tests.support.forked:train", str(folder / "config.toml"), list(settings), **environment)


def journal_of(folder: Path) -> Journal:
    return Journal(open_store(str(folder)), "r")


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of each committed step."""
    texts = [path.read_text() for path in (folder / "r" / "metrics").iterdir()]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def read_samples(folder: Path) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks of the last life that trained it."""
    found: dict[int, dict[int, list[list[int]]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, (folder / "notes").read_text().splitlines()):
        found[line["step"]][line[LIFE]].append(line["samples"])
    return {step: [number for part in lives[max(lives)] for number in part] for step, lives in found.items()}


@pytest.mark.gpus(4)
def test_a_run_goes_on_with_other_numbers_of_ranks(nursery: Lives, tmp_path: Path) -> None:
    """No sample comes twice in a pass and none is skipped; the losses are those of one rank that was never killed."""
    once, many = tmp_path / "once", tmp_path / "many"
    train(nursery, once, 1)
    for life, (ranks, killed) in enumerate(LIVES):
        strike = fault(*killed, tmp_path / f"struck-{life}") if killed else {}
        done = train(nursery, many, ranks, **{LIFE: str(life)}, **strike)
        assert (done.returncode == 0) == (killed is None), done.stderr
        found = re.findall(r"ranks: (.*); the bits would be equal only with compute.virtual_ranks", done.stderr)
        assert found == REASONS[life - 1] * bool(life)
    order = Order(SAMPLES, BATCH_SIZE, GRAD_ACCUM, 1234)
    samples = read_samples(many)
    steps = range(1, EPOCHS * STEPS_PER_EPOCH + 1)
    assert {step: sorted(numbers) for step, numbers in samples.items()} == {
        step: sorted(order.step_indices(step - 1).flatten().tolist()) for step in steps
    }
    losses, expected = read_losses(many), read_losses(once)
    assert sorted(losses) == sorted(expected) == list(steps)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    journal = journal_of(many)
    reasons = [journal.read_attempt(life + 1).lineage["environment"]["reasons"] for life in range(1, len(LIVES))]
    # The first chunk after the last change. A replay of a later one would begin DDP anew, which sums three ranks or
    # more in a different order in its first step.
    first = min(each.number for each in journal.candidates() if (each.attempt, each.why) == (len(LIVES), "chunk"))
    for options, said in (
        ([], "replayed to the same bytes"),
        (["--ranks", "2"], "--ranks 2: 4 ranks trained the steps"),
    ):
        command = ("audit", str(many / "r"), "--trust-records", "--commit", str(first), *options)
        audited = nursery.call("tests.support.forked:command", *command)
        assert said in audited.stdout + audited.stderr
    found = [reason.partition(";")[0] for each in reasons for reason in each]
    assert found == [f"ranks: {reason}" for reason, *_ in REASONS], "of the newest commit when the attempt began"


@pytest.mark.gpus(5)
def test_what_cannot_go_on_with_another_number_is_refused(nursery: Lives, tmp_path: Path) -> None:
    def refuse(ranks: int, *settings: str) -> str:
        done = train(nursery, tmp_path, ranks, *settings)
        assert done.returncode == 1, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        (hint,) = [line for line in done.stderr.splitlines() if line.startswith("hint:")]
        return f"{line}\n{hint}"

    assert refuse(5) == (
        "error: compute.ranks = 5: a batch of 12 samples can't be divided evenly over ranks\n"
        "hint: these numbers of ranks divide the batch: 1, 2, 3, 4, 6, 12"
    )
    assert train(nursery, tmp_path, 2, "epochs=1", "settings.own=true").returncode == 0
    found = refuse(1, "epochs=2", "settings.own=true")
    assert (
        "compute.ranks = 1: the checkpoint of step 8, which 2 ranks saved, can't be divided over a different number"
        in found
    )
    assert "the extra 'own' differs between the ranks" in found
    assert "hint: continue with compute.ranks = 2" in found
    found = refuse(1, "epochs=2", "settings.own=true", 'resume.environment="refuse"')
    assert "this machine may compute different bits than the run's earlier machine: ranks: saved 2, here 1" in found

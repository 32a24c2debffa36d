"""Any number of ranks trains the same bytes, if the run has virtual ranks."""

import json
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.support.lives import Lives

pytestmark = pytest.mark.slow

SHARES = 8
RANKS = (3, 2, 4, 1)


def write_config(folder: Path, ranks: int, epochs: int, how: str = "") -> str:
    """Write the run's configuration into the folder; return its path."""
    lines = [
        'recipe = "tests.support.shares:averaged"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        f"epochs = {epochs}", f'settings.how = "{how}"', "chunk.steps = 2", f"compute.ranks = {ranks}",
        f"compute.virtual_ranks = {SHARES}", 'compute.device = "cpu"', 'compute.mixed_precision = "bf16"',
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    path = folder / "config.toml"
    path.write_text("\n".join(lines))
    return str(path)


def train(nursery: Lives, folder: Path, ranks: int, epochs: int, how: str = "") -> str:
    """Train a run in the folder, or train it further; return what the command printed."""
    done = nursery.call("tests.support.forked:train", write_config(folder, ranks, epochs, how), [])
    return done.stdout + done.stderr


def list_commits(folder: Path) -> dict[int, str]:
    """Return the content id of each commit, by step."""
    return {commit.step: commit.checkpoint_sha256 for commit in Journal(open_store(str(folder)), "r").candidates()}


def test_the_number_of_ranks_changes_no_byte(nursery: Lives, tmp_path: Path) -> None:
    train(nursery, tmp_path / "one", 1, len(RANKS))
    for epochs, ranks in enumerate(RANKS, 1):
        train(nursery, tmp_path / "many", ranks, epochs)
    one, many = list_commits(tmp_path / "one"), list_commits(tmp_path / "many")
    assert max(many) == 6 * len(RANKS)
    assert many == one
    trails = [
        "".join(path.read_text() for path in sorted((tmp_path / name / "r" / "metrics").iterdir()))
        for name in ("one", "many")
    ]
    assert trails[0] == trails[1], "other losses, gradient norms or samples"
    commit = str(max(commit.number for commit in Journal(open_store(str(tmp_path / "many")), "r").candidates()) - 1)
    audited = nursery.call(
        "tests.support.forked:command", "audit", str(tmp_path / "many" / "r"), "--commit", commit, "--ranks", "2"
    )
    assert audited.returncode == 0, audited.stderr
    assert "replayed on 2 ranks to the same bytes" in audited.stdout


def test_a_proof_crosses_numbers_of_ranks(nursery: Lives, tmp_path: Path) -> None:
    options = ("--ranks", "1,3,2", "--steps", "8", "--kills", "2", "--seed", "3")
    done = nursery.call("tests.support.forked:command", "prove", write_config(tmp_path, 1, 1), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  ranks       1 straight, and 1, 3 and 2 between the kills\n" in done.stdout
    assert done.stdout.endswith("--seed 3 --steps 8 --kills 2 --ranks 1,3,2\n")


def test_an_extra_that_a_share_changes_is_refused(nursery: Lives, tmp_path: Path) -> None:
    """Each rank's extra has seen other shares: nothing of it may count."""
    said = train(nursery, tmp_path, 2, 1, how="counts")
    assert "a share of a batch has changed the extras" in said
    assert list_commits(tmp_path) == {}

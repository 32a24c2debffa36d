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


def train(nursery: Lives, folder: Path, ranks: int, epochs: int, how: str = "") -> str:
    """Train a run in the folder, or train it further; return what the command printed."""
    lines = [
        'recipe = "tests.support.shares:averaged"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        f"epochs = {epochs}", f'settings.how = "{how}"', "chunk.steps = 2", f"compute.ranks = {ranks}",
        f"compute.virtual_ranks = {SHARES}", 'compute.device = "cpu"', 'compute.mixed_precision = "bf16"',
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("\n".join(lines))
    done = nursery.call("tests.support.forked:train", str(folder / "config.toml"), [])
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


def test_an_extra_that_a_share_changes_is_refused(nursery: Lives, tmp_path: Path) -> None:
    """Each rank's extra has seen other shares: nothing of it may count."""
    said = train(nursery, tmp_path, 2, 1, how="counts")
    assert "a share of a batch has changed the extras" in said
    assert list_commits(tmp_path) == {}

"""A rank that hangs is named, with the stack of each rank, and the attempt continues with fresh ones."""

import json
import re
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from tests.support import failing
from tests.support.device import DEVICE, ON_GPUS
from tests.support.lives import Lives

pytestmark = pytest.mark.slow


def train(nursery: Lives, folder: Path, ranks: int, how: str, hangs: int) -> str:
    """Train a run whose rank ``hangs`` hangs in its fourth step; return what the command printed."""
    lines = [
        'recipe = "tests.support.failing:hanging"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        "epochs = 1", "chunk.steps = 3", f"compute.ranks = {ranks}", f'compute.device = "{DEVICE}"',
        f"log.folder = {json.dumps(str(folder / 'logs'))}", "extensions.hangs.hung_after_s = 5",
        f"settings = {{ how = \"{how}\", rank = {hangs}, struck = {json.dumps(str(folder / 'struck'))} }}",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(lines))
    done = nursery.call("tests.support.forked:train", str(folder / "config.toml"), [])
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


def read_log(folder: Path) -> str:
    (path,) = (folder / "logs" / "r").glob("attempt-*.log")
    return path.read_text()


@pytest.mark.gpus
@pytest.mark.parametrize(
    ("how", "ranks", "hangs", "says"),
    [
        ("stop", 2, 1, "in step 4: its process is stopped"),
        ("lock", 2, 1, r"in step 4 at \S+failing.py:\d+: no progress for \d+ s, and the longest step took"),
        ("data", 1, 0, r"in step 4, loading data at \S+failing.py:\d+: no progress for"),
    ],
)
def test_a_run_goes_on_after_a_hang(
    nursery: Lives, tmp_path: Path, how: str, ranks: int, hangs: int, says: str
) -> None:
    printed = train(nursery, tmp_path, ranks, how, hangs)
    assert (tmp_path / "struck").exists()
    where = r"\S+, GPU \S+" if ON_GPUS else r"\S+"
    assert re.search(rf"rank {hangs} \(process \d+ on {where}\) hangs {says}", printed), printed
    assert "new ranks continue from the last commit" in printed
    log = read_log(tmp_path)
    for rank in range(ranks):
        assert f"---- rank {rank} (process" in log
    assert ("the rank doesn't answer" in log) == (how == "stop")
    assert log.count("most recent call first") >= ranks - (how == "stop")
    commits = list(Journal(open_store(str(tmp_path)), "r").candidates())
    assert {commit.attempt for commit in commits} == {1}, "the same attempt went on"
    assert failing.__file__ in log or how == "stop"

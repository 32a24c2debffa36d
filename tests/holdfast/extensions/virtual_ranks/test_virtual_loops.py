"""Virtual ranks in a loop of one's own: any number of ranks trains the same bytes, with shards and without."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.shares import write_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fsdp_imported")]

EPOCHS = 2
STEPS = 6 * EPOCHS
# Each life: its number of ranks, what they hold of the model, and where SIGKILL ends it.
LIVES = [
    (3, "fsdp", ("chunk-reported", 2, "self")),
    (2, "ddp", ("chunk-reported", 1, "both")),
    (1, "ddp", ("commit-recorded", 1, "both")),
    (2, "fsdp", None),
]


def train(nursery: Lives, path: str, **environment: str) -> Any:
    """Train a run, or train it further; return the ended command."""
    return nursery.call("tests.support.forked:train", path, [], **environment)


def read(folder: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Return the content id of each commit, by step, and the lines of the trail.

    Which lines have facts of shares depends on where the run was interrupted, so they are left out.
    """
    commits = {each.step: each.checkpoint_sha256 for each in Journal(open_store(str(folder)), "r").candidates()}
    text = "".join(path.read_text() for path in sorted((folder / "r").glob("metrics/*")))
    lines = map(json.loads, text.splitlines())
    return commits, [{name: each for name, each in line.items() if name != "parts"} for line in lines]


@pytest.mark.parametrize("recipe", ["looped", *["loaded", "from_loader"] * IS_SOAK])
def test_the_number_of_ranks_and_their_shards_change_no_byte(nursery: Lives, tmp_path: Path, recipe: str) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    done = train(
        nursery, write_config(one, 1, EPOCHS, recipe=recipe, chunk_steps=1)
    )  # dead ranks may save after any step
    assert done.returncode == 0, done.stderr
    expected, trail = read(one)
    assert max(expected) == STEPS
    for life, (ranks, parallel, killed) in enumerate(LIVES):
        struck = tmp_path / f"struck-{life}"
        done = train(
            nursery, write_config(many, ranks, EPOCHS, parallel, recipe), **(fault(*killed, struck) if killed else {})
        )
        assert struck.exists() == (killed is not None), done.stderr
        assert "not promised" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert read(many) == ({step: expected[step] for step in read(many)[0]}, trail)


@pytest.mark.parametrize(("parallel", "how"), [("fsdp", "two"), *[("ddp", "")] * IS_SOAK])
def test_a_proof_crosses_numbers_of_ranks(nursery: Lives, tmp_path: Path, parallel: str, how: str) -> None:
    options = ("--ranks", "1,3,2", "--steps", "8", "--kills", "2", "--seed", "3")
    path = write_config(tmp_path, 1, EPOCHS, parallel, "looped", how=how)
    done = nursery.call("tests.support.forked:command", "prove", path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  ranks       1 straight, and 1, 3 and 2 between the kills\n" in done.stdout


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("unwrapped", "'model' is trained, and run.wrap has not sharded it"),
        ("logs", "the shares of a batch have logged numbers of different names"),
        ("counts", "the extras were changed by code that trains only a share of a batch"),
        ("steps", "the parameters were changed by code that trains only a share of a batch"),
    ],
)
def test_a_mistake_is_refused_with_shards_too(nursery: Lives, tmp_path: Path, how: str, said: str) -> None:
    done = train(nursery, write_config(tmp_path, 2, EPOCHS, "fsdp", "looped", how=how))
    assert done.returncode != 0
    assert said in done.stderr
    assert read(tmp_path)[0] == {}

"""With virtual ranks any number of ranks, each with the whole model or a part of it, trains the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import IN_SOAK
from tests.support.device import ON_GPUS
from tests.support.gpus import count_gpus
from tests.support.lives import Lives
from tests.support.shares import write_config

pytestmark = [pytest.mark.slow, pytest.mark.gpus(2), pytest.mark.usefixtures("fsdp_imported")]

FOLDER = "tests.holdfast.extensions.virtual_ranks"
EPOCHS = 4
# Each life: its number of ranks, what they hold of the model, the number of its replicas, and where SIGKILL ends it.
# What its ranks have saved by then is adopted. On GPUs there are at most as many ranks as GPUs.
LIVES = [
    (8, "fsdp", 1, ("chunk-reported", 2, "self")),
    (4, "ddp", 1, ("chunk-reported", 1, "both")),
    (3, "fsdp", 1, ("commit-recorded", 1, "both")),
    (2, "fsdp", 1, ("latest-replaced", 1, "self")),
    (1, "ddp", 1, ("chunk-reported", 1, "both")),
    (4, "fsdp", 2, None),
]


def train(nursery: Lives, path: str, **environment: str) -> Any:
    """Train a run, or train it further; return the ended command."""
    return nursery.call("tests.support.forked:train", path, [], **environment)


def check(nursery: Lives, ranks: int, function: str, *arguments: object) -> None:
    """Let several ranks make a check of `cut`."""
    done = nursery.call(f"{FOLDER}.cut:in_ranks", ranks, function, *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def list_commits(folder: Path) -> dict[int, str]:
    """Return the content id of each commit, by step."""
    return {commit.step: commit.checkpoint_sha256 for commit in Journal(open_store(str(folder)), "r").candidates()}


def read_trail(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the line of each committed step: its loss, gradient norm, samples and random numbers.

    Which lines have facts of shares depends on where the run was interrupted, so they are left out.
    """
    lines = [
        json.loads(line) for path in (folder / "r" / "metrics").iterdir() for line in path.read_text().splitlines()
    ]
    return {line["step"]: {name: each for name, each in line.items() if name != "parts"} for line in lines}


def test_the_number_of_ranks_and_their_shards_change_no_byte(nursery: Lives, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    done = train(nursery, write_config(one, 1, EPOCHS, chunk_steps=1))  # dead ranks save after any step
    assert done.returncode == 0, done.stderr
    for life, (most, parallel, replicas, killed) in enumerate(LIVES):
        ranks = min(most, count_gpus()) if ON_GPUS else most
        struck = tmp_path / f"struck-{life}"
        strike = fault(*killed, struck) if killed else {}
        mesh = f"{{replicate = {replicas}, shard = {ranks // replicas}}}" if 1 < replicas < ranks else ""
        done = train(nursery, write_config(many, ranks, EPOCHS, parallel=parallel, mesh=mesh), **strike)
        assert struck.exists() == (killed is not None), done.stderr
        assert "not promised" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert max(list_commits(many)) == 6 * EPOCHS
    expected = list_commits(one)
    assert list_commits(many) == {step: expected[step] for step in list_commits(many)}
    assert read_trail(many) == read_trail(one)
    commit = str(max(commit.number for commit in Journal(open_store(str(many)), "r").candidates()) - 1)
    audited = nursery.call("tests.support.forked:command", "audit", str(many / "r"), "--commit", commit, "--ranks", "2")
    assert audited.returncode == 0, audited.stderr
    assert "replayed on 2 ranks to the same bytes" in audited.stdout


@pytest.mark.gpus(3)
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=IN_SOAK)])
def test_a_proof_crosses_numbers_of_ranks(nursery: Lives, tmp_path: Path, parallel: str) -> None:
    options = ("--ranks", "1,3,2", "--steps", "8", "--kills", "2", "--seed", "3")
    path = write_config(tmp_path, 1, 1, parallel=parallel)
    done = nursery.call("tests.support.forked:command", "prove", path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  ranks       1 straight, and 1, 3 and 2 between the kills\n" in done.stdout
    assert done.stdout.endswith("--seed 3 --steps 8 --kills 2 --ranks 1,3,2\n")


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=IN_SOAK), 3])
@pytest.mark.parametrize("function", ["exchange_early", "agree_on_order", "exchange_late", "refuse_parts"])
def test_whole_gradients_are_exchanged_during_the_backward_pass(
    nursery: Lives, tmp_path: Path, ranks: int, function: str
) -> None:
    done = nursery.call(f"{FOLDER}.exchanged:in_ranks", ranks, function, str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def test_an_extra_that_a_share_changes_is_refused(nursery: Lives, tmp_path: Path) -> None:
    """Each rank's extra has seen other shares: nothing of it may count."""
    done = train(nursery, write_config(tmp_path, 2, 1, how="counts"))
    assert "the extras were changed by code that trains only a share of a batch" in done.stdout + done.stderr
    assert list_commits(tmp_path) == {}


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_and_checksums_of_cut_tensors_are_those_of_whole_ones(nursery: Lives, tmp_path: Path, ranks: int) -> None:
    check(nursery, ranks, "compare_with_whole_tensors", str(tmp_path))


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_in_other_layouts_have_the_checksums_of_whole_ones(nursery: Lives, tmp_path: Path, ranks: int) -> None:
    check(nursery, ranks, "compare_in_other_layouts", str(tmp_path))


def test_runs_without_virtual_ranks_keep_the_checksums_of_their_earlier_checkpoints(
    nursery: Lives, tmp_path: Path
) -> None:
    """The gate compares a gradient's checksum with the one in a checkpoint, which an earlier version may have saved."""
    check(nursery, 2, "keep_earlier_checksums", str(tmp_path))


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_with_shards_keeps_sums_of_its_rows_alone(nursery: Lives, tmp_path: Path, ranks: int) -> None:
    check(nursery, ranks, "keep_rows_alone", str(tmp_path))


def test_a_model_in_float64_has_the_same_bits_with_and_without_shards(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 2, "train_in_float64", str(tmp_path))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("skips", "the forward pass used blocks.0 in only some shares of the batch"),
        ("sparse", "sparse gradient"),
        ("rows", "virtual ranks can't train with Adafactor"),
    ],
)
def test_what_ranks_with_shards_cannot_sum_in_order_is_refused(
    nursery: Lives, tmp_path: Path, how: str, said: str
) -> None:
    check(nursery, 2, "refuse", str(tmp_path), how, said)

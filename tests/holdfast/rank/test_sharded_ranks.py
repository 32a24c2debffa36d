"""Ranks that each hold a shard of the state train, save and restore together, and no byte depends on the sharding."""

import json
import subprocess
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.proof.result import Proof
from holdfast.store import open_store
from tests.conftest import IS_SOAK
from tests.support.device import DEVICE
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.gpus(2), pytest.mark.usefixtures("fsdp_imported")]

EPOCHS = 2
SETTINGS = [
    'recipe = "tests.support.sharded:averaged"', 'run = "r"', f"epochs = {EPOCHS}", "chunk.steps = 3",
    f'compute.device = "{DEVICE}"', 'compute.parallel = "fsdp"', "checkpoint.part_bytes = 1048576",
    "resume.training_probe = true", "retention.keep_last = 9",
]  # fmt: skip


def check(nursery: Lives, ranks: int, function: str, *arguments: object) -> None:
    done = nursery.call("tests.support.sharded:in_ranks", ranks, function, *arguments, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr


def train(nursery: Lives, folder: Path, ranks: int, lines: list[str] = SETTINGS, **environment: str) -> list[str]:
    """Train a run to its end. Return the content id of each commit."""
    folder.mkdir(exist_ok=True)
    lines = [*lines, f"store = {json.dumps(str(folder))}", f"compute.ranks = {ranks}", "settings.width = 300"]
    (folder / "config.toml").write_text("\n".join(lines))
    done = nursery.call("tests.support.forked:train", str(folder / "config.toml"), [], **environment)
    assert done.returncode in (0, -9) or environment, done.stderr
    return [each.checkpoint_sha256 for each in Journal(open_store(str(folder)), "r").candidates()]


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_resumed_training_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path, ranks: int) -> None:
    check(nursery, ranks, "resume_and_train", str(tmp_path))


def test_a_save_has_the_same_bytes_with_and_without_shares(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 2, "change_the_sharding", str(tmp_path))


def test_a_save_is_whole_if_the_ranks_have_metrics_of_their_own(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 2, "save_after_evaluating", str(tmp_path))


def test_a_tensor_that_is_restored_otherwise_than_it_was_sharded_trips_the_gate(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 2, "resume_elsewhere", str(tmp_path))


@pytest.mark.gpus(4)
def test_tensors_cut_over_two_dimensions_of_ranks_have_the_same_bytes(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 4, "save_meshes", str(tmp_path))


def test_a_model_on_the_meta_device_has_the_same_weights_with_and_without_shares(
    nursery: Lives, tmp_path: Path
) -> None:
    check(nursery, 2, "build_on_meta", str(tmp_path))


def test_a_part_of_another_writer_is_left_alone(nursery: Lives, tmp_path: Path) -> None:
    for number in (0, -1):
        check(nursery, 2, "save_beside_another", str(tmp_path / str(number)), number)


def test_damage_that_one_rank_reads_is_raised_by_all(nursery: Lives, tmp_path: Path) -> None:
    for number in (1, 2):
        check(nursery, 2, "read_damage", str(tmp_path / str(number)), number)


def test_a_save_that_fails_in_one_rank_fails_in_all(nursery: Lives, tmp_path: Path) -> None:
    for rank in (0, 1):
        check(nursery, 2, "fail_in_one", str(tmp_path / str(rank)), rank)


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_trained_during_the_exchange_is_not_in_the_checkpoint(
    nursery: Lives, tmp_path: Path, ranks: int
) -> None:
    check(nursery, ranks, "save_beside_training", str(tmp_path))


def test_a_save_that_begins_during_another_waits_for_it(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 2, "save_twice", str(tmp_path))


def test_parts_that_do_not_change_are_linked(nursery: Lives, tmp_path: Path) -> None:
    check(nursery, 2, "save_frozen", str(tmp_path))


@pytest.mark.parametrize(("ranks", "how", "rank"), [(2, "kill", 0)] + [(2, "stop", 1), (4, "kill", 3)] * IS_SOAK)
def test_a_rank_lost_during_the_exchange_costs_only_that_save(
    nursery: Lives, tmp_path: Path, ranks: int, how: str, rank: int
) -> None:
    expected = train(nursery, tmp_path / "straight", ranks)
    struck = tmp_path / "struck"
    lines = [
        'recipe = "tests.support.sharded:interrupted"', f'settings.how = "{how}"', f"settings.rank = {rank}",
        f"settings.struck = {json.dumps(str(struck))}", "extensions.hangs.hung_after_s = 5", *SETTINGS[1:],
    ]  # fmt: skip
    found = train(nursery, tmp_path / "lost", ranks, lines=lines)
    assert struck.read_text().startswith("save"), "the exchange is beside training"
    assert found == expected


def test_killed_in_any_phase_of_a_save_a_run_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path) -> None:
    expected = train(nursery, tmp_path / "straight", 2)
    assert len(expected) == 4
    for number, (point, victim) in enumerate(
        [("payload-written", "self"), ("payload-durable", "other"), ("metadata-durable", "both")]
    ):
        folder, struck = tmp_path / str(number), tmp_path / f"struck-{number}"
        train(nursery, folder, 2, HOLDFAST_FAULT=f"{point}:2:{victim}:{struck}")
        assert struck.exists(), point
        assert train(nursery, folder, 2) == expected, (point, victim)


def test_near_copies_are_adopted_and_read_with_the_same_bytes(nursery: Lives, tmp_path: Path) -> None:
    expected = train(nursery, tmp_path / "straight", 2)
    lines = [*SETTINGS, f"near.folder = {json.dumps(str(tmp_path / 'near'))}"]
    adopting, reading = tmp_path / "adopting", tmp_path / "reading"
    assert train(nursery, adopting, 2, lines, HOLDFAST_FAULT=f"near-durable:1:both:{tmp_path}/first") == expected
    assert Journal(open_store(str(adopting)), "r").read_commit(1).why == "adopted"
    train(nursery, reading, 2, lines, HOLDFAST_FAULT=f"latest-replaced:2:self:{tmp_path}/second")
    done = nursery.call("tests.support.forked:train", str(reading / "config.toml"), [])
    assert done.returncode == 0, done.stderr
    assert "restored from near copies" in done.stderr
    newest = Journal(open_store(str(reading)), "r").newest()
    assert newest is not None  # the orphans may have saved one more on the way
    assert newest.checkpoint_sha256 == expected[0]


@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [("averaged", "fsdp")] + [("wrapped", "ddp"), ("looped", "ddp"), ("wrapped", "fsdp")] * IS_SOAK,
)
def test_sharded_ranks_are_proved(nursery: Lives, tmp_path: Path, recipe: str, parallel: str) -> None:
    settings = {
        "recipe": f"tests.support.sharded:{recipe}", "run": "p", "store": str(tmp_path), "epochs": 2,
        "compute": {"ranks": 2, "device": DEVICE, "parallel": parallel}, "log": {"folder": str(tmp_path)},
    }  # fmt: skip
    done = nursery.call("tests.support.forked:prove_mutated", "", settings, 6, 1, 3)
    proof = Proof.model_validate_json(done.stdout)
    assert proof.is_proved, str(proof)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("on_meta", [False, True])
def test_a_loop_is_wrapped_as_configured(nursery: Lives, tmp_path: Path, parallel: str, on_meta: bool) -> None:
    """The same loop trains on one rank and on several, and every rank has the same model at the end."""
    lines = [f'compute.parallel = "{parallel}"', f"settings.on_meta = {json.dumps(on_meta)}"]
    for ranks in (1, 2):
        done = loop(nursery, tmp_path / str(ranks), "wrapped", ranks, *lines)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("function", "lines", "message"),
    [
        ("unwrapped", [], "the loop has sharded no model over the ranks"),
        ("wrapped", ["settings.is_late = true"], "the optimizer 'optimizer' was built before run.wrap(model)"),
    ],
)
def test_a_loop_that_would_train_no_shares_is_refused(
    nursery: Lives, tmp_path: Path, function: str, lines: list[str], message: str
) -> None:
    done = loop(nursery, tmp_path, function, 2, 'compute.parallel = "fsdp"', *lines)
    assert done.returncode != 0
    assert message in done.stderr


def loop(nursery: Lives, folder: Path, function: str, ranks: int, *lines: str) -> "subprocess.CompletedProcess[str]":
    """Train a run of a loop of a user's own."""
    folder.mkdir(exist_ok=True)
    known = [
        f'recipe = "tests.support.sharded:{function}"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        f'compute.device = "{DEVICE}"', f"compute.ranks = {ranks}", f"log.folder = {json.dumps(str(folder))}",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join([*known, *lines]))
    return nursery.call("tests.support.forked:train", str(folder / "config.toml"), [])

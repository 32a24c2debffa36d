"""Ranks that hold the stages of a pipeline: one checkpoint has all of them, and another split continues from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast.journal import Journal
from holdfast.proof.audit import Audit
from holdfast.proof.replay import read_run_trail
from holdfast.proof.result import Proof
from holdfast.store import open_store
from tests.conftest import IN_SOAK
from tests.holdfast.rank.test_meshes import train as train_meshed
from tests.support.device import DEVICE
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.gpus(4), pytest.mark.usefixtures("pipelining_imported")]


@pytest.fixture(scope="session")
def pipelining_imported(nursery: Lives) -> None:
    """Spare each rank the import of torch's schedules."""
    nursery.load("torch.distributed.pipelining")


def train(nursery: Lives, folder: Path, *lines: str, ranks: int = 2) -> Any:
    return train_meshed(nursery, folder, "", 'recipe = "tests.support.pipelined:pipeline"', *lines, ranks=ranks)


def read_newest(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's newest checkpoint."""
    newest = Journal(open_store(str(folder)), "r").newest()
    assert newest is not None
    return load_file(folder / "r" / newest.path / "checkpoint.safetensors")


@pytest.mark.parametrize(
    ("ranks", "schedule", "bounds", "average"),
    [
        pytest.param(2, "Schedule1F1B", [4], "loop", id="two stages"),
        pytest.param(4, "ScheduleGPipe", [3], "loop", id="two replicas of two stages"),
        pytest.param(4, "Schedule1F1B", [4], "ddp", id="two stages, each in a DistributedDataParallel"),
        pytest.param(4, "Schedule1F1B", [2, 4, 6], "loop", id="four stages", marks=IN_SOAK),
    ],
)
def test_stages_are_proved(
    nursery: Lives, tmp_path: Path, ranks: int, schedule: str, bounds: list[int], average: str
) -> None:
    settings = {
        "recipe": "tests.support.pipelined:pipeline", "run": "p", "store": str(tmp_path), "epochs": 3,
        "compute": {"ranks": ranks, "device": DEVICE}, "log": {"folder": str(tmp_path)},
        "settings": {"bounds": bounds, "schedule": schedule, "average": average},
    }  # fmt: skip
    done = nursery.call("tests.support.forked:prove_mutated", "", settings, 10, 2, 3)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    proof = Proof.model_validate_json(done.stdout)
    assert proof.is_proved, str(proof)


def test_a_rank_of_a_pipeline_has_the_samples_and_the_trail_of_the_others(nursery: Lives, tmp_path: Path) -> None:
    done = train(nursery, tmp_path, "epochs = 1", f"settings.notes = {json.dumps(str(tmp_path))}", ranks=4)
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = ((tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(4))
    assert len(first) == 4
    assert first == third
    assert second == fourth
    assert not {*first} & {*second}
    trail, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4))
    assert all(each == trail for each in others)
    assert {f"model.layers.{number}.weight" for number in range(8)} < trail["tensors"].keys()


def test_a_rehearsal_of_stages_finds_no_difference(nursery: Lives, tmp_path: Path) -> None:
    done = train(nursery, tmp_path, 'proof.rehearse = "on"', "proof.share = 1.0", "chunk.steps = 2")
    assert done.returncode == 0, done.stderr
    verdicts = [commit.verdict for commit in Journal(open_store(str(tmp_path)), "r").candidates()]
    assert verdicts[0].startswith("continues exactly: rehearsed from step")


def train_parts(nursery: Lives, folder: Path, *lines: str) -> Any:
    return train_meshed(nursery, folder, "", 'recipe = "tests.support.pipelined:two_parts"', *lines, ranks=2)


def test_a_rehearsal_of_stages_finds_what_one_rank_forgets_in_its_own_objects(nursery: Lives, tmp_path: Path) -> None:
    done = train_parts(nursery, tmp_path, 'proof.rehearse = "on"', "chunk.steps = 2", "settings.forgets = true")
    assert done.returncode != 0
    assert "extras.state of rank 1" in done.stderr


def test_stages_of_other_sizes_compute_checksums_in_the_same_steps(nursery: Lives, tmp_path: Path) -> None:
    """One has large parameters, and would compute them every 64 steps; the other every 256."""
    done = train_parts(nursery, tmp_path, "settings.sizes = [200000, 8]", "epochs = 17")
    assert done.returncode == 0, done.stderr
    newest = Journal(open_store(str(tmp_path)), "r").newest()
    assert newest is not None
    assert newest.step > 64


def test_a_weight_that_a_stage_has_tied_to_a_name_of_its_own_is_refused(nursery: Lives, tmp_path: Path) -> None:
    done = train_parts(nursery, tmp_path, 'settings.tied = "first"')
    assert "a stage has tied this tensor to another name" in done.stderr


@pytest.mark.parametrize("tied", ["", "tied"])
def test_a_weight_that_two_stages_share_counts_once_in_the_norm(nursery: Lives, tmp_path: Path, tied: str) -> None:
    done = train_parts(nursery, tmp_path, f"settings.tied = {json.dumps(tied)}", "epochs = 1", 'proof.rehearse = "off"')
    assert done.returncode == 0, done.stderr
    (line, *_) = read_run_trail(Journal(open_store(str(tmp_path)), "r"))
    assert line["logged"]["norm"] == pytest.approx(line["logged"]["squares"])


def test_another_split_continues_with_the_same_bytes(nursery: Lives, tmp_path: Path) -> None:
    done = train(nursery, tmp_path, "epochs = 1")
    assert done.returncode == 0, done.stderr
    for epochs, (ranks, bounds) in enumerate([(2, [3]), (4, [2, 4, 6]), (4, [5]), (1, [])], start=2):
        saved = read_newest(tmp_path)
        assert [f"model.layers.{number}.weight" in saved for number in range(9)] == [True] * 8 + [False]
        assert {"model.head.bias", "optimizer.state.layers.7.bias.exp_avg_sq", "model.scale"} <= {*saved}
        notes = tmp_path / f"notes-{epochs}"
        notes.mkdir()
        lines = [
            f"epochs = {epochs}", f"settings.bounds = {bounds}", f"settings.notes = {json.dumps(str(notes))}",
            'resume.accept_drift = ["settings"]',
        ]  # fmt: skip
        done = train(nursery, tmp_path, *lines, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [torch.load(notes / f"{rank}.pt") for rank in range(ranks)]
        assert set().union(*found) == {name for name in saved if name.startswith(("model.", "optimizer."))}
        for name, each in ((name, each) for own in found for name, each in own.items()):
            assert torch.equal(each, saved[name]), name


@pytest.mark.parametrize(
    ("lines", "ranks", "message"),
    [
        (
            ['settings.told = ""'],
            2,
            "rank 1 has model.head.bias, and rank 0 doesn't, and each rank would train its own samples with its own",
        ),
        (
            ['settings.told = "stage"'],
            4,
            "rank 2 has model.head.bias, and ranks 0, 1 don't, but data rank 0 of 2 needs the whole model",
        ),
        (
            ['settings.names = "local"'],
            2,
            "before the first step: ranks 0 and 1 have different values in the same rows of model.layers.0.bias",
        ),
        (
            ['settings.names = "local"', "settings.bounds = [3]"],
            2,
            "before the first step: ranks 0 and 1 have different values in the same rows of model.layers.0.bias",
        ),
        (
            ['settings.average = ""'],
            4,
            "after the first step: ranks 0 and 1 have different values in the same rows of model.layers.0.",
        ),
        (['settings.names = "sharded"'], 4, "is sharded in rank 0, and other ranks' models have other names"),
    ],
    ids=["own samples", "wrong groups", "equal names", "some equal names", "no average", "sharded"],
)
def test_stages_that_a_checkpoint_would_lose_are_refused(
    nursery: Lives, tmp_path: Path, lines: list[str], ranks: int, message: str
) -> None:
    done = train(nursery, tmp_path, *lines, ranks=ranks)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (7, "the checkpoint's model contains layers.7.bias, which no rank has built"),
        (9, 'Missing key(s) in state_dict: "layers.8.weight"'),
    ],
)
def test_stages_of_another_model_are_refused_by_name(nursery: Lives, tmp_path: Path, layers: int, message: str) -> None:
    done = train(nursery, tmp_path, "epochs = 1")
    assert done.returncode == 0, done.stderr
    drift = 'resume.accept_drift = ["settings"]'
    done = train(nursery, tmp_path, "epochs = 2", f"settings.layers = {layers}", drift)
    assert done.returncode != 0
    assert message in done.stderr


def test_commands_read_a_checkpoint_of_stages(nursery: Lives, tmp_path: Path) -> None:
    settings = {
        "recipe": "tests.support.pipelined:pipeline", "run": "r", "store": str(tmp_path), "epochs": 2,
        "compute": {"ranks": 2, "device": DEVICE}, "log": {"folder": str(tmp_path)},
        "chunk": {"steps": 2},
    }  # fmt: skip
    done = nursery.call("tests.support.forked:audit_mutated", "", settings)
    audit = Audit.model_validate_json(done.stdout)
    assert audit.is_identical, str(audit)
    out = tmp_path / "weights.safetensors"
    for command in (
        ["verify", str(tmp_path / "r")],
        ["show", str(tmp_path / "r")],
        ["export", str(tmp_path / "r"), str(out)],
    ):
        done = nursery.call("tests.support.forked:command", *command)
        assert done.returncode == 0, done.stdout + done.stderr
    saved = {name: each for name, each in read_newest(tmp_path).items() if name.startswith("model.")}
    exported = load_file(out)
    assert exported.keys() == {name.removeprefix("model.") for name in saved}
    assert all(torch.equal(each, saved[f"model.{name}"]) for name, each in exported.items())

"""Ranks that train one model together get the same samples and random numbers, and the run resumes exactly."""

import json
import subprocess
from pathlib import Path

import pytest

from holdfast.proof.result import Proof
from tests.support.device import DEVICE
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.gpus(4), pytest.mark.usefixtures("fsdp_imported")]


def train(nursery: Lives, folder: Path, function: str, *lines: str) -> "subprocess.CompletedProcess[str]":
    known = [
        f'recipe = "tests.support.meshed:{function}"', 'run = "r"', f"store = {json.dumps(str(folder))}", "epochs = 2",
        f'compute.device = "{DEVICE}"', "compute.ranks = 4", f"log.folder = {json.dumps(str(folder))}",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join([*known, *lines]))
    return nursery.call("tests.support.forked:train", str(folder / "config.toml"), [])


@pytest.mark.parametrize("sampler", ["", "data"], ids=["loader", "own sampler"])
def test_tensor_parallel_ranks_see_the_same_samples_and_masks(nursery: Lives, tmp_path: Path, sampler: str) -> None:
    notes = f"settings.notes = {json.dumps(str(tmp_path))}"
    done = train(nursery, tmp_path, "tensor_parallel", notes, f"settings.sampler = {json.dumps(sampler)}")
    assert done.returncode == 0, done.stderr
    first, second, third, fourth = ((tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(4))
    assert len(first) == 8
    assert first == second
    assert third == fourth
    for mine, other in zip(first, third, strict=True):
        assert not set(mine.split()) & set(other.split())  # neither the samples nor the masks of the other data rank


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['settings.told = ""'], "compute with one tensor 'blocks.0.up.weight' together, and each would train samples"),
        (['settings.sampler = "world"'], "ranks 0 and 1 are data rank 0 of 2 together, and train different samples"),
        (["compute.virtual_ranks = 4"], "run.data_parallel(...): virtual ranks train different samples each"),
    ],
)
def test_ranks_that_would_see_other_samples_are_refused(
    nursery: Lives, tmp_path: Path, lines: list[str], message: str
) -> None:
    done = train(nursery, tmp_path, "tensor_parallel", *lines)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))


def test_a_loop_with_a_mesh_is_proved(nursery: Lives, tmp_path: Path) -> None:
    settings = {
        "recipe": "tests.support.meshed:tensor_parallel", "run": "p", "store": str(tmp_path), "epochs": 3,
        "compute": {"ranks": 4, "device": DEVICE}, "log": {"folder": str(tmp_path)},
    }  # fmt: skip
    done = nursery.call("tests.support.forked:prove_mutated", "", settings, 10, 2, 3)
    proof = Proof.model_validate_json(done.stdout)
    assert proof.is_proved, str(proof)

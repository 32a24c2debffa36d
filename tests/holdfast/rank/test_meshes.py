"""Ranks that train one model together get the same samples and random numbers, and the run resumes exactly."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from holdfast.journal import Journal
from holdfast.proof.result import Proof
from holdfast.store import open_store
from tests.conftest import IN_SOAK, IS_SOAK
from tests.support.device import DEVICE
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.gpus(4), pytest.mark.usefixtures("fsdp_imported")]


def train(
    nursery: Lives, folder: Path, function: str, *lines: str, ranks: int = 4
) -> "subprocess.CompletedProcess[str]":
    known = [
        f'recipe = "tests.support.meshed:{function}"', 'run = "r"', f"store = {json.dumps(str(folder))}", "epochs = 2",
        f'compute.device = "{DEVICE}"', f"compute.ranks = {ranks}", f"log.folder = {json.dumps(str(folder))}",
    ]  # fmt: skip
    changed = {line.partition(" =")[0] for line in lines}
    known = [line for line in known if line.partition(" =")[0] not in changed]
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
        (
            ['settings.told = ""'],
            "hold pieces of the tensor 'blocks.0.up.weight' and compute with it together, so they need the same "
            "samples, but each would",
        ),
        (
            ['settings.told = "tensor"'],
            "average the gradient of 'blocks.0.up.weight', but would all train the same samples",
        ),
        (
            ['settings.sampler = "world"'],
            "ranks 0 and 1 are both data rank 0 of 2, so they need the same samples, but train different ones",
        ),
    ],
)
def test_ranks_that_would_see_other_samples_are_refused(
    nursery: Lives, tmp_path: Path, lines: list[str], message: str
) -> None:
    done = train(nursery, tmp_path, "tensor_parallel", *lines)
    assert done.returncode != 0
    assert message in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))


# By the engine's blocks and by a function of the recipe's own; a mesh for each kind of parallelism.
MESHES = {
    "replicas of shards": ({"replicate": 2, "shard": 2}, ""),
    "shards of tensor-parallel ranks": ({"shard": 2, "tensor": 2}, "checkpointed"),
    "replicas of tensor-parallel ranks": ({"replicate": 2, "tensor": 2}, "parallelize"),
    "compiled shards": ({"shard": 2}, "compiled"),
}


@pytest.mark.parametrize(
    ("function", "mesh", "how"),
    [
        pytest.param(function, *MESHES[name], id=f"{name}, {function}", marks=IN_SOAK if is_left else ())
        for function, name, is_left in [
            ("tensor_parallel", "shards of tensor-parallel ranks", False),
            ("replicas", "replicas of tensor-parallel ranks", False),
            ("experts", "replicas of tensor-parallel ranks", False),
            ("recipe", "shards of tensor-parallel ranks", True),
            ("recipe", "replicas of shards", False),
            ("recipe", "compiled shards", False),
            ("recipe", "replicas of tensor-parallel ranks", True),
            ("wrapped", "shards of tensor-parallel ranks", True),
            ("wrapped", "replicas of shards", True),
            ("wrapped", "replicas of tensor-parallel ranks", True),
        ]
    ],
)
def test_ranks_on_a_mesh_are_proved(
    nursery: Lives, tmp_path: Path, function: str, mesh: dict[str, int], how: str
) -> None:
    is_own = function in ("tensor_parallel", "replicas", "experts")  # the loop makes its mesh itself
    ranks = math.prod(mesh.values())
    settings = {
        "recipe": f"tests.support.meshed:{function}", "run": "p", "store": str(tmp_path), "epochs": 3,
        "compute": {"ranks": ranks, "device": DEVICE} | ({} if is_own else {"parallel": "fsdp", "mesh": mesh}),
        "settings": {} if is_own else {"how": how}, "log": {"folder": str(tmp_path)},
    }  # fmt: skip
    done = nursery.call("tests.support.forked:prove_mutated", "", settings, 10, 2 if IS_SOAK else 1, 3)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    proof = Proof.model_validate_json(done.stdout)
    assert proof.is_proved, str(proof)


@pytest.mark.parametrize(
    ("mesh", "how", "message"),
    [
        ("{shard = 2, tensor = 2}", "", "Holdfast can't shard layers over mesh.tensor by itself"),
        (
            "{shard = 2, tensor = 2}",
            "misnamed",
            "parallelize: Parallelize plan key 'layers.*.up' could not be resolved",
        ),
        ("{shard = 4}", "half", "parallelize has left norm.weight, norm.bias, head.weight and 1 more unsharded"),
        ("{shard = 4}", "untying", "parallelize has untied first.weight and second.weight"),
        ("{shard = 4}", "fusing", "the function parallelize has given the model different parameters"),
    ],
)
def test_a_model_that_a_mesh_can_not_shard_is_refused(
    nursery: Lives, tmp_path: Path, mesh: str, how: str, message: str
) -> None:
    function = "tied" if how == "untying" else "recipe"
    lines = ['compute.parallel = "fsdp"', f"compute.mesh = {mesh}", f"settings.how = {json.dumps(how)}"]
    done = train(nursery, tmp_path, function, *lines)
    assert done.returncode != 0
    assert message in done.stderr


def test_another_number_of_data_ranks_continues(nursery: Lives, tmp_path: Path) -> None:
    lines = ['compute.parallel = "fsdp"', 'settings.how = "checkpointed"']
    done = train(nursery, tmp_path, "recipe", *lines, "compute.mesh = {shard = 2, tensor = 2}", "epochs = 1")
    assert done.returncode == 0, done.stderr
    lines += ["compute.mesh = {tensor = 2}", 'resume.accept_drift = ["compute.mesh"]']
    done = train(nursery, tmp_path, "recipe", *lines, ranks=2)
    assert done.returncode == 0, done.stderr
    attempts = [commit.attempt for commit in Journal(open_store(str(tmp_path)), "r").candidates()]
    assert {*attempts} == {1, 2}


def test_a_state_that_only_some_ranks_have_is_refused_after_the_first_step(nursery: Lives, tmp_path: Path) -> None:
    done = train(nursery, tmp_path, "different_optimizers")
    assert done.returncode != 0
    found = "optimizer.state.bias.momentum_buffer is not there in rank 0 and of shape (2,) in rank 2"
    assert f"after the first step: {found}" in done.stderr


def test_state_that_is_sharded_in_another_way_is_refused_after_the_first_step(nursery: Lives, tmp_path: Path) -> None:
    lines = ['compute.parallel = "fsdp"', 'settings.kind = "RowMeans"']
    done = train(nursery, tmp_path, "wrapped", *lines, ranks=2)
    assert done.returncode != 0
    found = "the optimizer's state optimizer.state.blocks.0.down.weight.rows is sharded over the ranks differently than"
    assert f"after the first step: {found} its parameter" in done.stderr


@pytest.mark.parametrize(
    ("function", "lines", "message"),
    [
        ("twins", [], "before the first step: ranks 0 and 2 have different values in the same rows of model.0.bias"),
        ("twins", ["settings.whole = true"], "before the first step: model.0.bias is sharded in rank 0 and whole in"),
        ("replicas", ["settings.averages = false"], "after the first step: ranks 0 and 2 have different values in the"),
    ],
    ids=["stages of equal names", "sharded and whole", "no average"],
)  # fmt: skip
def test_ranks_whose_state_a_checkpoint_would_lose_are_refused(
    nursery: Lives, tmp_path: Path, function: str, lines: list[str], message: str
) -> None:
    done = train(nursery, tmp_path, function, *lines, "extensions.hangs.hung_after_s = 60")
    assert done.returncode != 0
    assert message in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))

"""Virtual ranks on a mesh: at a fixed tensor dimension any number of data ranks trains the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.departure import find_first
from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.testing.faults import fault
from tests.conftest import IN_SOAK
from tests.support.device import DEVICE
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.gpus(4), pytest.mark.usefixtures("fsdp_imported")]

PLAN = {"how": "parallelize"}
RECIPE = {"recipe": "recipe", "parallel": "fsdp"}
LOOP = {"recipe": "in_shares", "parallel": "ddp"}
STEPS = 8
# Each life: its number of ranks and their mesh, and where SIGKILL ends it.
LIVES = {
    "tensor": [
        (4, "{shard = 2, tensor = 2}", ("chunk-reported", 1, "both")),
        (2, "{tensor = 2}", ("commit-recorded", 1, "self")),
        (4, "{replicate = 2, tensor = 2}", None),
    ],
    "replicas": [
        (4, "{replicate = 2, shard = 2}", ("chunk-reported", 1, "both")),
        (3, "{replicate = 3}", ("commit-recorded", 1, "self")),
        (2, "{shard = 2}", None),
    ],
    "own mesh": [(4, "", ("chunk-reported", 1, "both")), (2, "", ("commit-recorded", 1, "self")), (4, "", None)],
}  # fmt: skip


def write_config(
    folder: Path, ranks: int, mesh: str, settings: dict[str, Any], *lines: str,
    recipe: str = "recipe", parallel: str = "fsdp", shares: int = 4, chunk: int = 2, epochs: int = 2,
) -> str:  # fmt: skip
    """Write a run's configuration into the folder; return its path.

    Args:
        mesh: the mesh in TOML; empty for none.
        lines: further lines of the configuration.
    """
    known = [
        f'recipe = "tests.support.meshed:{recipe}"', 'run = "r"', f"store = {json.dumps(str(folder))}",
        f"epochs = {epochs}", f"chunk.steps = {chunk}", f'compute.device = "{DEVICE}"', f"compute.ranks = {ranks}",
        f'compute.parallel = "{parallel}"', f"compute.virtual_ranks = {shares}",
        *([f"compute.mesh = {mesh}"] if mesh else []), "retention.keep_last = 99",
        f"log.folder = {json.dumps(str(folder))}",
        *(f"settings.{name} = {json.dumps(value)}" for name, value in settings.items()),
    ]  # fmt: skip
    folder.mkdir(exist_ok=True)
    path = folder / "config.toml"
    path.write_text("\n".join([*known, *lines]))
    return str(path)


def train(nursery: Lives, path: str, **environment: str) -> Any:
    """Train a run, or train it further; return the ended command."""
    return nursery.call("tests.support.forked:train", path, [], **environment)


def read(folder: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Return the content id of each commit by step, and the trail's lines of all committed steps."""
    commits = {each.step: each.checkpoint_sha256 for each in Journal(open_store(str(folder)), "r").candidates()}
    lines = [line for path in (folder / "r" / "metrics").iterdir() for line in path.read_text().splitlines()]
    return commits, sorted(map(json.loads, lines), key=lambda line: int(line["step"]))


def leave_out_parts(trail: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a trail without the facts of single ranks, which other ranks have of other steps."""
    return [{name: value for name, value in line.items() if name != "parts"} for line in trail]


@pytest.mark.parametrize(
    ("name", "first", "program"),
    [
        pytest.param("tensor", (2, "{tensor = 2}"), RECIPE | {"settings": PLAN}, id="tensor"),
        pytest.param("replicas", (1, ""), RECIPE | {"settings": {}}, id="replicas"),
        pytest.param(
            "tensor", (2, "{tensor = 2}"), RECIPE | {"settings": {"how": "checkpointed"}}, id="checkpointed",
            marks=IN_SOAK,
        ),
        pytest.param("replicas", (1, ""), RECIPE | {"settings": PLAN}, id="replicas by parallelize", marks=IN_SOAK),
        pytest.param(
            "tensor", (2, "{tensor = 2}"), RECIPE | {"recipe": "in_shares", "settings": {"how": "wrapped"}},
            id="wrapped", marks=IN_SOAK,
        ),
        pytest.param("own mesh", (2, ""), LOOP | {"settings": {"how": "own"}}, id="own"),
        pytest.param("own mesh", (2, ""), LOOP | {"settings": {"how": "plan"}}, id="plan", marks=IN_SOAK),
    ],
)  # fmt: skip
def test_the_number_of_data_ranks_and_their_replicas_change_no_byte(
    nursery: Lives, tmp_path: Path, name: str, first: tuple[int, str], program: dict[str, Any]
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = train(nursery, write_config(straight, *first, chunk=1, **program))  # dead ranks may save after any step
    assert done.returncode == 0, done.stderr
    for life, (ranks, mesh, strike) in enumerate(LIVES[name]):
        struck = tmp_path / f"struck-{life}"
        environment = fault(*strike, struck) if strike else {}
        done = train(nursery, write_config(killed, ranks, mesh, **program), **environment)
        assert struck.exists() == (strike is not None), done.stderr
        assert "not promised" not in done.stderr
    assert done.returncode == 0, done.stderr
    expected, trail = read(straight)
    commits, found = read(killed)
    assert max(commits) == STEPS
    assert commits == {step: expected[step] for step in commits}
    assert leave_out_parts(found) == leave_out_parts(trail)
    assert any("parts" in line for line in found)
    assert find_first(found, trail) is None


@pytest.mark.parametrize("recipe", ["recipe", "in_shares"])
def test_ranks_of_a_tensor_group_train_the_same_shares_with_the_same_masks(
    nursery: Lives, tmp_path: Path, recipe: str
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, ranks, mesh in ((one, 2, "{tensor = 2}"), (two, 4, "{shard = 2, tensor = 2}")):
        noted = (PLAN if recipe == "recipe" else {"how": "wrapped"}) | {"notes": str(folder)}
        done = train(nursery, write_config(folder, ranks, mesh, noted, 'proof.rehearse = "off"', recipe=recipe))
        assert done.returncode == 0, done.stderr
    both, other = ((one / f"{rank}.txt").read_text().splitlines() for rank in range(2))
    assert both == other
    first, second, third, fourth = ((two / f"{rank}.txt").read_text().splitlines() for rank in range(4))
    assert (first, third) == (second, fourth)
    assert {*both} == {*first, *third}
    masks = {line.split()[1] for line in both}
    assert len(masks) >= STEPS * 4, "each share of a step has a mask of its own"


def test_ranks_of_a_mesh_rehearse_and_are_audited_with_other_data_ranks(nursery: Lives, tmp_path: Path) -> None:
    rehearsed = ('proof.rehearse = "on"', "proof.share = 1.0")
    done = train(nursery, write_config(tmp_path, 4, "{shard = 2, tensor = 2}", PLAN, *rehearsed))
    assert done.returncode == 0, done.stderr
    commits = [*Journal(open_store(str(tmp_path)), "r").candidates()]
    assert "continues exactly: rehearsed from step" in commits[0].verdict
    for ranks, code, said in (
        (2, 0, "replayed on 2 ranks to the same bytes"),
        (3, 1, "compute.ranks = 3: compute.mesh.tensor = 2 doesn't divide it"),
    ):
        done = nursery.call("tests.support.forked:command", "audit", str(tmp_path / "r"), "--ranks", str(ranks))
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr


def test_a_proof_crosses_numbers_of_data_ranks(nursery: Lives, tmp_path: Path) -> None:
    path = write_config(tmp_path, 4, "{shard = 2, tensor = 2}", PLAN)
    options = ("--ranks", "2,4", "--steps", "6", "--kills", "1", "--seed", "3")
    done = nursery.call("tests.support.forked:command", "prove", path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  ranks       2 straight, and 2 and 4 between the kills\n" in done.stdout


def test_another_tensor_dimension_is_drift(nursery: Lives, tmp_path: Path) -> None:
    done = train(nursery, write_config(tmp_path, 2, "{tensor = 2}", PLAN, epochs=1))
    assert done.returncode == 0, done.stderr
    done = train(nursery, write_config(tmp_path, 2, "{shard = 2}", PLAN))
    assert done.returncode != 0
    assert "compute.mesh" in done.stderr
    assert "resume.accept_drift" in done.stderr
    accepted = 'resume.accept_drift = ["compute.mesh"]'
    done = train(nursery, write_config(tmp_path, 2, "{shard = 2}", PLAN, accepted))
    assert done.returncode == 0, done.stderr


def test_another_tensor_dimension_of_a_loop_s_own_mesh_is_drift(nursery: Lives, tmp_path: Path) -> None:
    program = LOOP | {"settings": {"how": "grows"}}
    done = train(nursery, write_config(tmp_path, 2, "", epochs=1, **program))
    assert done.returncode == 0, done.stderr
    done = train(nursery, write_config(tmp_path, 4, "", **program))
    assert done.returncode != 0
    assert "ranks_of_a_sample" in done.stderr
    assert "resume.accept_drift" in done.stderr


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("pipelined:two_parts", "can't train the stages of a pipeline: rank 1 has different parameters than rank 0"),
        (
            "meshed:experts",
            "ranks 0, 1 hold pieces of the tensor '1.weight' and compute with it together, so",
        ),
    ],
    ids=["stages", "experts"],
)
def test_what_data_ranks_compute_together_is_refused(
    nursery: Lives, tmp_path: Path, program: str, message: str
) -> None:
    path = write_config(tmp_path, 2, "", {}, **LOOP | {"recipe": program})
    Path(path).write_text(Path(path).read_text().replace("meshed:" + program, program))
    done = train(nursery, path)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("ranks", "mesh", "how", "shares", "message"),
    [
        (4, "{shard = 2, tensor = 2}", "parallelize", 1, "4: 2 data ranks, and there are only 1 virtual ranks"),
        (2, "{shard = 2}", "wide", 4, "FSDP2 cuts its dimension 1 over the data ranks"),
        (2, "{shard = 2}", "rounded", 4, "a single rank trains without fully_shard, and gets different bits"),
        (2, "{tensor = 2}", "planned", 4, "FSDP2 shards the model, but not this parameter"),
    ],
    ids=["too many data ranks", "columns", "precision", "a plan alone"],
)
def test_what_would_depend_on_the_number_of_data_ranks_is_refused(
    nursery: Lives, tmp_path: Path, ranks: int, mesh: str, how: str, shares: int, message: str
) -> None:
    done = train(nursery, write_config(tmp_path, ranks, mesh, {"how": how}, shares=shares))
    assert done.returncode != 0
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))

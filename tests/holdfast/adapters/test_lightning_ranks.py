"""Lightning's own loop on several ranks: killed anywhere, the run ends on the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint import read_payload
from holdfast.journal import Journal
from holdfast.store import open_store
from holdfast.training.capturing import decode
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.extras("lightning")]


def write_config(folder: Path, ranks: int, how: str, *more: str, function: str = "automatic") -> str:
    lines = [
        f'recipe = "tests.support.lit:{function}"', 'run = "r"', f"store = {json.dumps(str(folder))}", "epochs = 3",
        f"settings.how = {json.dumps(how)}", f"compute.ranks = {ranks}",
        'compute.device = "cpu"', f"log.folder = {json.dumps(str(folder))}", *more,
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(lines))
    return str(folder / "config.toml")


@pytest.mark.parametrize(("ranks", "how"), [(2, ""), (3, "accumulates"), (2, "averages")])
def test_several_ranks_are_proved(nursery: Lives, tmp_path: Path, ranks: int, how: str) -> None:
    options = ("--steps", "8", "--kills", "2", "--seed", "3")
    done = nursery.call("tests.support.forked:command", "prove", write_config(tmp_path, ranks, how), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout


@pytest.mark.parametrize(("how", "has_files"), [("", True), ("accumulates", False)])
def test_fsdp2_is_proved(nursery: Lives, tmp_path: Path, how: str, has_files: bool) -> None:
    more = [f"settings.files = {json.dumps(str(tmp_path / 'files'))}"] if has_files else []
    config = write_config(tmp_path, 2, how, *more, function="sharded")
    options = ("--steps", "8", "--kills", "2", "--seed", "3")
    done = nursery.call("tests.support.forked:command", "prove", config, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout


@pytest.mark.parametrize(
    ("how", "more", "message"),
    [
        ("", ["settings.sizes = [1, 2]"], "ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)"),
        ("averages", [], "the callback EMAWeightAveraging copies the module"),
        ("leaves", [], "configure_model has left net.1.weight, net.1.bias, net.4.weight and 1 more unsharded"),
    ],
)
def test_a_layout_that_can_not_be_resumed_is_refused(
    nursery: Lives, tmp_path: Path, how: str, more: list[str], message: str
) -> None:
    done = nursery.call("tests.support.forked:train", write_config(tmp_path, 2, how, *more, function="sharded"), [])
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
    assert "hint: " in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))


def test_two_ranks_train_as_with_lightning_alone(nursery: Lives, tmp_path: Path) -> None:
    """A module that draws no numbers has the same weights in the end, bit for bit."""
    how, file = "draws nothing", tmp_path / "alone.pt"
    script = ["-m", "tests.support.lit", how, "2", str(file)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, *script], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    done = nursery.call("tests.support.forked:train", write_config(tmp_path, 2, how), [])
    assert done.returncode == 0, done.stderr
    journal = Journal(open_store(str(tmp_path)), "r")
    commit = journal.newest()
    assert commit is not None
    trained = decode(read_payload(journal.store, commit))["model"]
    expected = torch.load(file)
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(trained[name], value), name


def test_a_trainer_of_another_number_of_ranks_is_refused(nursery: Lives, tmp_path: Path) -> None:
    path = Path(write_config(tmp_path, 2, ""))
    path.write_text(path.read_text().replace("lit:automatic", "lit:manual").replace("settings.", "#"))
    done = nursery.call("tests.support.forked:train", str(path), [])
    assert done.returncode != 0
    assert "the Trainer uses SingleDeviceStrategy" in done.stderr
    assert 'strategy="ddp"' in done.stderr

"""A loop whose own accelerator shards the model by an FSDP2 plugin: the run resumes exactly, or is refused by name."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.support.device import DEVICE
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.gpus(2), pytest.mark.usefixtures("fsdp_imported")]

KILLS = "2" if IS_SOAK else "1"


def call(
    nursery: Lives, folder: Path, command: str, function: str, *options: str, **changed: Any
) -> "subprocess.CompletedProcess[str]":
    settings = {
        "recipe": f"tests.support.plugged:{function}", "run": "r", "store": str(folder), "epochs": 3,
        "compute.device": DEVICE, "compute.ranks": 2, "log.folder": str(folder),
    } | changed  # fmt: skip
    lines = (f"{name} = {json.dumps(value)}" for name, value in settings.items())
    (folder / "config.toml").write_text("\n".join(lines))
    return nursery.call("tests.support.forked:command", command, str(folder / "config.toml"), *options)


@pytest.mark.parametrize(
    ("how", "accumulated"),
    [("", 2), ("keeps whole", 3), ("checkpoints", 1), ("loads on one rank", 1), *[("", 1)] * IS_SOAK],
)
def test_a_loop_with_a_plugin_is_proved(nursery: Lives, tmp_path: Path, how: str, accumulated: int) -> None:
    settings = {"settings.how": how, "settings.accumulated": accumulated}
    done = call(nursery, tmp_path, "prove", "train", "--steps", "8", "--kills", KILLS, "--seed", "3", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout


def test_a_loop_with_a_plugin_is_proved_in_bf16(nursery: Lives, tmp_path: Path) -> None:
    settings = {"compute.mixed_precision": "bf16"}
    done = call(nursery, tmp_path, "prove", "train", "--steps", "8", "--kills", KILLS, "--seed", "3", **settings)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_plugin_shards_the_model(nursery: Lives, tmp_path: Path) -> None:
    done = call(nursery, tmp_path, "train", "train", epochs=1, **{"settings.is_checked": True})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("train", {"settings.how": "first version"}, "FullyShardedDataParallelPlugin: fsdp_version=1"),
        ("train", {"settings.how": "offloads"}, "FullyShardedDataParallelPlugin: cpu_offload"),
        ("train", {"settings.how": "ignores"}, "has left head.weight, head.bias unsharded: nothing would average"),
        ("train", {"compute.virtual_ranks": 2}, "FullyShardedDataParallelPlugin: compute.virtual_ranks = 2"),
        (
            "meshed",
            {},
            "Accelerator(parallelism_config=...): accelerate takes it only from a process's first accelerator",
        ),
        ("ignored", {}, "Accelerator(megatron_lm_plugin=...): the ranks have an accelerator already"),
        ("wrapped", {}, "run.wrap(model): the script also has Accelerator(fsdp_plugin=...)"),
        ("forgotten", {}, "has left head.weight, head.bias unsharded: nothing would average"),
    ],
)
def test_a_plugin_with_which_a_run_can_not_resume_is_refused(
    nursery: Lives, tmp_path: Path, function: str, settings: dict[str, Any], message: str
) -> None:
    done = call(nursery, tmp_path, "train", function, **settings)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
    assert "plugged.py:" in done.stderr
    assert "hint: " in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))

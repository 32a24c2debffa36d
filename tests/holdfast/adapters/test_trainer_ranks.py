"""A Trainer's own loop on several ranks: killed anywhere, the run ends on the same bytes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.extras("transformers")]


def call(
    nursery: Lives, folder: Path, command: str, arguments: dict[str, Any], *options: str, ranks: int = 2
) -> "subprocess.CompletedProcess[str]":
    lines = [
        'recipe = "tests.support.hugging:train"', 'run = "r"', f"store = {json.dumps(str(folder))}", "epochs = 3",
        f"settings.output_dir = {json.dumps(str(folder / 'output'))}", f"compute.ranks = {ranks}",
        *(f"settings.arguments.{name} = {json.dumps(value)}" for name, value in arguments.items()),
        'compute.device = "cpu"', f"log.folder = {json.dumps(str(folder))}",
    ]  # fmt: skip
    (folder / "config.toml").write_text("\n".join(lines))
    return nursery.call("tests.support.forked:command", command, str(folder / "config.toml"), *options)


@pytest.mark.parametrize(("ranks", "finds_unused"), [(3, False), *[(2, True), (2, False), (3, True)] * IS_SOAK])
def test_several_ranks_are_proved(nursery: Lives, tmp_path: Path, ranks: int, finds_unused: bool) -> None:
    """The Trainer's own option, which it sets to False for activation checkpointing, changes nothing."""
    arguments = {"ddp_find_unused_parameters": finds_unused}
    done = call(nursery, tmp_path, "prove", arguments, "--steps", "6", "--kills", "2", "--seed", "3", ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout


WRAPPED = {"fsdp_config.fsdp_version": 2, "fsdp_config.transformer_layer_cls_to_wrap": ["Sequential"]}


@pytest.mark.parametrize(
    "arguments",
    [
        {"fsdp": "full_shard", "fsdp_config.fsdp_version": 2},
        {"fsdp": True, "max_grad_norm": 0.5, **WRAPPED, "save_strategy": "epoch"},
    ],
    ids=["whole model", "blocks"],
)
def test_fsdp2_is_proved(nursery: Lives, tmp_path: Path, arguments: dict[str, Any]) -> None:
    done = call(nursery, tmp_path, "prove", arguments, "--steps", "6", "--kills", "2", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout


def test_parameters_beside_the_device_are_refused(nursery: Lives, tmp_path: Path) -> None:
    done = call(nursery, tmp_path, "train", {"fsdp": "full_shard offload"})
    assert done.returncode != 0
    assert "FullyShardedDataParallelPlugin: cpu_offload" in done.stderr, done.stderr
    assert "hugging.py:" in done.stderr
    assert "hint: leave it out" in done.stderr
    assert not list((tmp_path / "r").glob("epoch-*"))

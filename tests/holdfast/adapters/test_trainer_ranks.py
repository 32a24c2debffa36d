"""A Trainer's own loop on several ranks: killed anywhere, the run ends on the same bytes."""

import json
from pathlib import Path

import pytest

from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.extras("transformers")]


@pytest.mark.parametrize(("ranks", "finds_unused"), [(2, "true"), (2, "false"), (3, "true"), (3, "false")])
def test_several_ranks_are_proved(nursery: Lives, tmp_path: Path, ranks: int, finds_unused: str) -> None:
    """The Trainer's own option, which it sets to False for activation checkpointing, changes nothing."""
    lines = [
        'recipe = "tests.support.hugging:train"', 'run = "r"', f"store = {json.dumps(str(tmp_path))}", "epochs = 3",
        f"settings.output_dir = {json.dumps(str(tmp_path / 'output'))}", f"compute.ranks = {ranks}",
        f"settings.arguments.ddp_find_unused_parameters = {finds_unused}",
        'compute.device = "cpu"', f"log.folder = {json.dumps(str(tmp_path))}",
    ]  # fmt: skip
    (tmp_path / "config.toml").write_text("\n".join(lines))
    options = ("--steps", "6", "--kills", "2", "--seed", "3")
    done = nursery.call("tests.support.forked:command", "prove", str(tmp_path / "config.toml"), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout

"""A Trainer's own loop on several ranks: killed anywhere, the run ends on the same bytes."""

import json
from pathlib import Path

import pytest

from tests.support.lives import Lives

pytestmark = [pytest.mark.slow, pytest.mark.extras("transformers")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_are_proved(nursery: Lives, tmp_path: Path, ranks: int) -> None:
    lines = [
        'recipe = "tests.support.hugging:train"', 'run = "r"', f"store = {json.dumps(str(tmp_path))}", "epochs = 3",
        f"settings.output_dir = {json.dumps(str(tmp_path / 'output'))}", f"compute.ranks = {ranks}",
        'compute.device = "cpu"', f"log.folder = {json.dumps(str(tmp_path))}",
    ]  # fmt: skip
    (tmp_path / "config.toml").write_text("\n".join(lines))
    options = ("--steps", "6", "--kills", "2", "--seed", "3")
    done = nursery.call("tests.support.forked:command", "prove", str(tmp_path / "config.toml"), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout

"""The command that ``holdfast import`` names for the training to go on."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.extensions.importing import command


def test_the_command_that_goes_on_is_quoted_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "my run.toml"
    config.write_text('recipe = "tests.support.movers:loop"\nrun = "moved"\n')
    commit = SimpleNamespace(number=1, step=2, checkpoint_sha256="0" * 64, path="step-2")
    monkeypatch.setattr(command, "import_run", lambda *given: SimpleNamespace(commit=commit, total_steps=4))
    command.import_command("at.pt", f"{tmp_path}/my store/moved", config=config)
    said = capsys.readouterr().out.splitlines()[-1].removeprefix("continue with: ")
    assert shlex.split(said) == [
        "holdfast", "train", str(config), "--set", "run=moved", "--set", f"store={tmp_path}/my store",
    ]  # fmt: skip

"""The line of the user's code that changes one of torch's settings is found."""

import importlib.util
import sys
from pathlib import Path

import pytest

from holdfast.errors import DeterminismError
from holdfast.provenance.settings_lines import find_setter
from holdfast.training.flags import locating_flags

CODE = """from torch.backends import cudnn
import torch

def speed_up(self):
    self.benchmark = True
    cudnn.benchmark = True

def lower():
    torch.set_default_dtype(torch.float64)
"""


@pytest.mark.parametrize(
    ("setting", "line"), [("torch.backends.cudnn.benchmark", 6), ("torch.set_default_dtype", 9), ("torch.nothing", 0)]
)
def test_the_users_line_that_changes_a_setting_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, line: int
) -> None:
    file = tmp_path / "fast.py"
    file.write_text(CODE)
    spec = importlib.util.spec_from_file_location("fast_settings", file)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "fast_settings", importlib.util.module_from_spec(spec))
    own = [module for name, module in [*sys.modules.items()] if name.startswith("tests.")]
    for each in own:  # the tests' own modules may change settings, too
        monkeypatch.setattr(each, "__file__", None, raising=False)
    assert find_setter([setting]) == (f"{file}:{line}: " if line else "")
    with pytest.raises(DeterminismError) as caught, locating_flags():
        raise DeterminismError("it is True", hint="leave it", flags=[setting])
    assert caught.value.message == (f"{file}:{line}: it is True" if line else "it is True")
    assert caught.value.hint == "leave it"

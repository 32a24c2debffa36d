"""The table of the extension, and the setting of earlier versions in its place."""

from pathlib import Path

import pytest

from holdfast.config import RunConfig, load_config
from holdfast.errors import ConfigError
from holdfast.extending import check_tables, find_extensions, read_table


def test_the_setting_of_earlier_versions_is_read_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.toml"
    file.write_text('recipe = "m:f"\nrun = "a"\nresume.hung_after_s = 5\n')
    (hangs,) = (each for each in find_extensions() if each.name == "hangs")
    assert read_table(hangs, load_config(file)).hung_after_s == 5
    assert caplog.messages == [f"{file}: resume.hung_after_s is now extensions.hangs.hung_after_s"]
    every_record = {"recipe": "m:f", "run": "a", "resume": {"hung_after_s": "auto"}}
    assert RunConfig.model_validate(every_record) == RunConfig(recipe="m:f", run="a")


def test_a_wrong_time_is_refused() -> None:
    config = RunConfig(recipe="m:f", run="a", extensions={"hangs": {"hung_after_s": "soon"}})
    with pytest.raises(ConfigError, match=r'hangs.hung_after_s: expected a number of seconds, more than 0, or "auto"'):
        check_tables(config)

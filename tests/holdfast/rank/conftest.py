"""What tests of ranks share."""

import pytest

from tests.support.lives import Lives
from tests.support.machines import LONG


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> str:
    """Return what the run `LONG` prints that was never interrupted, and had one rank on this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = folder / "run.toml"
    config.write_text("\n".join([*LONG, 'run = "r"', f'store = "{folder}/runs"', 'compute.device = "cpu"']))
    return nursery.call("tests.support.forked:train", str(config), []).stdout

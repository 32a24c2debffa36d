"""Fixtures that the tests of the engine share."""

import pytest

from tests.support.lives import Lives
from tests.support.machines import LONG
from tests.support.makers import Keys, make_key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Two keys: mine, and another's."""
    folder = tmp_path_factory.mktemp("keys")
    return [make_key(folder / "mine"), make_key(folder / "another")]


@pytest.fixture
def fsdp_imported(nursery: Lives) -> None:
    """Spare each rank the import of FSDP2, which takes longer than what most of these tests do."""
    nursery.load("torch.distributed.fsdp")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> str:
    """Return what the run `LONG` prints that was never interrupted, and had one rank on this machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = folder / "run.toml"
    config.write_text("\n".join([*LONG, 'run = "r"', f'store = "{folder}/runs"', 'compute.device = "cpu"']))
    return nursery.call("tests.support.forked:train", str(config), []).stdout

"""Fixtures that the tests of the engine share."""

from collections.abc import Iterator

import pytest
import torch

from holdfast import state
from tests.support.makers import Keys, make_key


@pytest.fixture
def same_process() -> Iterator[None]:
    """What a training sets for its process is taken back."""
    threads, rng = torch.get_num_threads(), state.capture_rng()
    yield
    torch.set_num_threads(threads)
    state.restore_rng(rng)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Two keys: mine, and another's."""
    folder = tmp_path_factory.mktemp("keys")
    return [make_key(folder / "mine"), make_key(folder / "another")]

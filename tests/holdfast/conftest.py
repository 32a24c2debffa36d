"""What tests that train in their own process have in common; see `tests.support.trainings`."""

from collections.abc import Iterator

import pytest
import torch

from holdfast import state


@pytest.fixture
def same_process() -> Iterator[None]:
    """What a training sets for its process is taken back."""
    threads, rng = torch.get_num_threads(), state.capture_rng()
    yield
    torch.set_num_threads(threads)
    state.restore_rng(rng)

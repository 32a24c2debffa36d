"""A training on a GPU mixes no tensors of the GPU with others, and its ranks exchange none of the host's memory."""

import pytest

from tests.support.lives import Lives

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("recipe", "ranks", "shares"),
    [
        ("toy:toy", 1, 0),
        ("numbered:numbered", 1, 0),
        ("varied:normalised", 1, 0),
        ("failing:failing", 1, 0),
        ("shares:averaged", 1, 8),
        ("shares:averaged", 2, 8),
        ("vanishing:vanishing", 3, 8),
    ],
)
def test_a_step_on_a_gpu_mixes_no_devices(nursery: Lives, recipe: str, ranks: int, shares: int) -> None:
    done = nursery.call("tests.support.pretended:train", f"tests.support.{recipe}", ranks, shares)
    assert done.returncode == 0, done.stderr

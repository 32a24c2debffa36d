"""The numbers of a step, as code gives them."""

import numpy as np
import pytest
import torch

from holdfast.errors import RecipeError
from holdfast.training.step_record import read_number

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", [1.5, torch.tensor([1.5]), np.float64(1.5), np.array([1.5]), np.array(1.5)])
def test_a_number_may_be_in_a_tensor_or_an_array(value: object) -> None:
    found = read_number("reward", value, CPU)
    assert (found.item(), found.dtype, found.shape) == (1.5, torch.float32, ())


def test_several_numbers_are_refused() -> None:
    with pytest.raises(RecipeError, match="reward: expected a number, found a ndarray"):
        read_number("reward", np.ones(2), CPU)

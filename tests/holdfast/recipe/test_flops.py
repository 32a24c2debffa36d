"""The FLOPs that a recipe gives for its samples."""

import math

import pytest

from holdfast.errors import RecipeError
from holdfast.recipes.language import language
from tests.support.toy import toy


def test_the_language_model_gives_six_for_each_parameter_and_byte() -> None:
    recipe = language(context=32, layers=1, heads=1, width=16, steps_per_epoch=4)
    params = sum(each.numel() for each in recipe.model.parameters())
    assert recipe.flops_per_sample == 6 * params * 32


@pytest.mark.parametrize("flops", [0, -1.0, math.inf, math.nan])
def test_a_number_that_is_none_of_flops_is_refused(flops: float) -> None:
    known = toy()
    with pytest.raises(RecipeError, match=r"flops_per_sample = .*: expected a number above 0"):
        type(known)(**{**vars(known), "flops_per_sample": flops})

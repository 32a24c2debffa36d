"""Data ranks: the ranks that train the same samples, and those that train different ones."""

import pytest

from holdfast.errors import RecipeError
from holdfast.training.data_ranks import DataRank, check_groups, read_mesh


@pytest.mark.parametrize(
    "found",
    [
        [DataRank(0, 2), DataRank(0, 2), DataRank(1, 2)],
        [DataRank(0, 2), DataRank(0, 2)],
        [DataRank(0, 1), DataRank(0, 2), DataRank(1, 2)],
    ],
    ids=["sizes", "missing", "counts"],
)
def test_groups_of_different_sizes_are_refused(found: list[DataRank]) -> None:
    with pytest.raises(RecipeError, match=r"the data ranks of ranks .* don't fit together: 0 of"):
        check_groups(found)


def test_equal_groups_are_taken() -> None:
    check_groups([DataRank(0, 2), DataRank(1, 2), DataRank(0, 2), DataRank(1, 2)])


def test_no_mesh_is_refused() -> None:
    with pytest.raises(RecipeError, match="expected a DeviceMesh, found a int"):
        read_mesh(2, 0)

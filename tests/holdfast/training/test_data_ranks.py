"""Data ranks: the ranks that train the same samples, and those that train different ones."""

import copy
from pathlib import Path

import pytest
from accelerate import Accelerator

from holdfast import state
from holdfast.errors import RecipeError
from holdfast.training import Training
from holdfast.training.data_ranks import DataRanks, check_groups, gather_data_ranks
from holdfast.training.elastic import DATA_RANKS, count_other_data_ranks, count_others
from tests.support.trainings import make, save_state


@pytest.mark.parametrize(
    "found",
    [[(0, 2), (0, 2), (1, 2)], [(0, 2), (0, 2)], [(0, 1), (0, 2), (1, 2)]],
    ids=["sizes", "missing", "counts"],
)
def test_groups_of_different_sizes_are_refused(found: list[tuple[int, int]]) -> None:
    with pytest.raises(
        RecipeError, match=r"needs the same number of ranks, but the ranks 0, 1, ... have the data ranks 0 of"
    ):
        check_groups(found)


def test_equal_groups_are_taken() -> None:
    check_groups([(0, 2), (1, 2), (0, 2), (1, 2)])


def test_no_mesh_is_refused(same_process: None) -> None:
    with pytest.raises(RecipeError, match="expected a DeviceMesh, found a int"):
        gather_data_ranks(2, Accelerator(cpu=True))


@pytest.mark.parametrize(
    ("saved", "now", "others", "data"),
    [
        ([0, 0, 1, 1], (0, 0, 1, 1), None, None),
        ([0, 0, 1, 1], (0, 1, 0, 1), 4, 2),
        (None, (0, 1, 2, 3), None, None),
        (None, (0, 0, 1, 1), 4, 4),
        ([0, 0, 1, 1], (0, 1, 2, 3), 4, 2),
        ([0, 0, 1, 1], (0, 0), 4, 2),
    ],
)
def test_each_rank_continues_its_state_if_it_trains_the_same_samples_as_before(
    same_process: None, tmp_path: Path, saved: list[int] | None, now: tuple[int, ...], others: int, data: int
) -> None:
    training = make(tmp_path, "tests.support.varied:averaged")
    found = state.from_payload(save_state(training, tmp_path)[0])
    found["rng"] = [copy.deepcopy(found["rng"][0]) for _ in range(4)]
    found |= {DATA_RANKS: saved} if saved else {}
    regroup(training, now)
    assert (count_others(training, found), count_other_data_ranks(training, found)) == (others, data)


def regroup(training: Training, numbers: tuple[int, ...]) -> None:
    """Let a training count as one of several ranks with these data ranks."""
    training.ranks.accelerator = type("Several", (), {"num_processes": len(numbers), "process_index": 0})()
    training.ranks.data = DataRanks(numbers, 0, (tuple(range(len(numbers))),))

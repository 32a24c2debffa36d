"""The choice of a proof's kills, its verdict on unregistered state, and the list of what it didn't reach."""

import random
from pathlib import Path

import pytest

from holdfast import RunConfig
from holdfast.config import Compute, Determinism
from holdfast.errors import WrongUse
from holdfast.proof import judge_unregistered, list_not_reached
from holdfast.prove import check_ranks, choose_kills
from holdfast.rank.messages import Found
from holdfast.testing import assert_resumes


@pytest.mark.parametrize("steps", [2, 3, 5, 8, 12, 20, 31])
@pytest.mark.parametrize("kills", [1, 2, 3, 6])
def test_kills_and_saves_surround_an_epochs_end(steps: int, kills: int) -> None:
    for epoch in {1, 2, max(steps // 3, 1), steps // 2} & set(range(1, steps // 2 + 1)):
        for seed in range(50):
            killed, chunks = choose_kills(steps, kills, epoch, random.Random(seed))
            resumed = [max(stop for stop in chunks if stop < kill) for kill in killed]
            assert chunks == sorted(set(chunks))
            assert chunks[-1] == steps
            assert len(set(killed)) == len(killed) == min(kills, steps - 1)
            assert resumed == sorted(set(resumed)), "each life goes on from a checkpoint of its own"
            ends = range(epoch, steps + 1, epoch)
            assert any(chunks[0] <= end <= start for end in ends for start in resumed), (
                "saves on each side, then a kill"
            )
            assert max(ends) > resumed[0], "an epoch ends after a resume"
            if epoch > 1:
                assert any(start % epoch for start in resumed), "a resume is inside of an epoch"
            if kills >= 3 and steps > 3:
                assert not all(start % epoch for start in resumed), "a resume is at the end of an epoch"


@pytest.mark.parametrize(
    ("ranks", "virtual", "said"),
    [
        ([1, 2], 0, r"--ranks 1,2: without virtual ranks, equal bytes are not promised on another number of ranks"),
        ([1, 0], 8, r"--ranks 1,0: expected numbers from 1 on"),
        ([1, 2, 4, 8], 8, r"--ranks 1,2,4,8: a run that is killed 2 times has 3 lives, too few for 4 numbers"),
    ],
)
def test_numbers_of_ranks_that_prove_nothing_are_refused(ranks: list[int], virtual: int, said: str) -> None:
    config = RunConfig(recipe="m:f", run="r", compute=Compute(virtual_ranks=virtual))
    with pytest.raises(WrongUse, match=said) as refused:
        check_ranks(config, ranks, kills=2)
    assert refused.value.exit_code == 1


def test_one_number_of_ranks_is_proved_without_virtual_ranks() -> None:
    check_ranks(RunConfig(recipe="m:f", run="r"), [2], kills=1)


def found(name: str, sha256: str, **flags: bool) -> Found:
    kinds = {"is_generator": False, "is_copy": False} | flags
    return Found(name=name, kind="Linear", reached_by="loss", remedy="a line", sha256=sha256, **kinds)


def test_unregistered_state_that_changed_or_looks_like_a_copy_is_lost() -> None:
    built = [found("average", "a"), found("target", "a", is_copy=True), found("teacher", "a"), found("noise", "a")]
    straight = [found("average", "b"), found("target", "a"), found("teacher", "a"), found("late", "a")]
    judged = judge_unregistered(built, straight, straight)
    assert [line.partition(" ")[0] for line in judged["lost"]] == ["average", "target", "late"]
    assert [line.partition(" ")[0] for line in judged["unchanged"]] == ["teacher"]
    assert judged["lost"][0].endswith("changed in these steps: add a line")


def test_a_generator_whose_state_follows_from_the_step_is_not_lost() -> None:
    built, straight = [found("noise", "a", is_generator=True)], [found("noise", "b", is_generator=True)]
    assert judge_unregistered(built, straight, straight) == {"lost": [], "unchanged": []}
    assert len(judge_unregistered(built, straight, built)["lost"]) == 1


def test_a_proof_lists_what_it_did_not_reach() -> None:
    events = {"the end of anneal 'temperature'": 900.0, "StepLR.step_size": 5.0}
    lines = list_not_reached(20, 10, 6000, events, ranks=1, workers=2, device="cpu")
    assert lines == [
        "the end of an epoch of 6000 steps: here an epoch has 10",
        "the end of anneal 'temperature' (step 900)",
        "a GPU, several ranks",
    ]
    assert list_not_reached(20, 10, 10, {}, ranks=2, workers=2, device="cuda") == []


@pytest.mark.slow
def test_assert_resumes_names_what_is_lost(tmp_path: Path) -> None:
    config = RunConfig(recipe="tests.support.loops:forgets", run="r", store=str(tmp_path))
    with pytest.raises(AssertionError, match=r"not proved(.|\n)*average \(Sequential(.|\n)*best is carried"):
        assert_resumes(config, kills=1, steps=6)


@pytest.mark.slow
def test_a_killed_life_trains_no_step_that_the_straight_run_does_not(tmp_path: Path) -> None:
    """Another rank may be further than the one whose report brings the kill."""
    config = RunConfig(
        recipe="tests.support.loops:ends", run="r", store=str(tmp_path), settings={"after": 4},
        compute=Compute(ranks=2), determinism=Determinism(mode="fast"),
    )  # fmt: skip
    assert assert_resumes(config, kills=3, steps=4, seed=3).kills[-1] == 4

"""The choice of a proof's kills, its verdict, its text on forgotten state, and the list of what it didn't reach."""

import random
from pathlib import Path
from typing import Any

import pytest

from holdfast import RunConfig
from holdfast.checkpoint.found import Found, find_suspects
from holdfast.config import Compute, Determinism
from holdfast.errors import WrongUse
from holdfast.proof.kills import FEWEST_STEPS, MOST_STEPS, Speed, choose_kills, describe_phases
from holdfast.proof.prove import check_proof_ranks
from holdfast.proof.result import Proof, describe_found, list_not_reached, list_unchanged
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
            assert resumed == sorted(set(resumed)), "each life continues from a checkpoint of its own"
            ends = range(epoch, steps + 1, epoch)
            assert any(chunks[0] <= end <= start for end in ends for start in resumed), (
                "saves on each side, then a kill"
            )
            assert max(ends) > resumed[0], "an epoch ends after a resume"
            if epoch > 1:
                assert any(start % epoch for start in resumed), "a resume is inside of an epoch"
            if kills >= 3 and steps > 3:
                assert not all(start % epoch for start in resumed), "a resume is at the end of an epoch"


@pytest.mark.parametrize("epoch", [4, 8, 16, 30])
def test_resumes_interrupt_every_period_and_lie_on_both_sides_of_an_epochs_end(epoch: int) -> None:
    """State that changes at every k-th step is lost unseen by a resume at a multiple of k."""
    for seed in range(50):
        _, chunks = choose_kills(60, 3, epoch, random.Random(seed))
        resumed = chunks[-4:-1]
        assert all(any(step % period for step in resumed) for period in range(2, 9))
        assert {step % 2 for step in resumed} == {0, 1}
        assert describe_phases(resumed, epoch).endswith(
            "inside every period of 2 to 8 steps; an epoch's last steps, an epoch's end, an epoch's first steps"
        )
    assert describe_phases([16], 16) == "step 16: inside every period of 2 to 8 steps except 2, 4, 8; an epoch's end"


def choose_steps(within_s: float, **speed: Any) -> int:
    usual: dict[str, Any] = {
        "spent_s": 5.0, "start_s": 3.0, "step_s": 0.5, "epoch_s": 0.0, "own_epoch": 100, "own_steps": 10**6
    }  # fmt: skip
    return Speed(**usual | speed).choose_steps(within_s, kills=3)


def test_a_proof_has_as_many_steps_as_are_trained_twice_in_its_time() -> None:
    assert choose_steps(120.0) == 100  # five starts and the measurement leave 100 s, for 200 steps of 0.5 s
    assert choose_steps(240.0) == 220
    assert choose_steps(120.0, epoch_s=5.0) == 80  # with two epochs' ends of 5 s in each run


def test_a_proof_has_enough_steps_however_slow_and_no_more_than_the_run() -> None:
    assert choose_steps(120.0, step_s=60.0) == FEWEST_STEPS
    assert choose_steps(1.0) == FEWEST_STEPS
    assert choose_steps(120.0, step_s=0.0) == MOST_STEPS
    assert choose_steps(120.0, step_s=0.001, own_steps=90) == 90
    assert choose_steps(120.0, own_steps=6, own_epoch=3) == 6
    assert choose_steps(120.0, own_steps=1, own_epoch=1) == 2


@pytest.mark.parametrize(
    ("ranks", "virtual", "said"),
    [
        ([1, 2], 0, r"--ranks 1,2: without virtual ranks, a different number of ranks may compute different bytes"),
        ([1, 0], 8, r"--ranks 1,0: expected numbers from 1 on"),
        (
            [1, 2, 4, 8],
            8,
            r"--ranks 1,2,4,8: a run that is killed 2 times is started 3 times, too few for 4 different numbers",
        ),
    ],
)
def test_numbers_of_ranks_that_prove_nothing_are_refused(ranks: list[int], virtual: int, said: str) -> None:
    config = RunConfig(recipe="m:f", run="r", compute=Compute(virtual_ranks=virtual))
    with pytest.raises(WrongUse, match=said) as refused:
        check_proof_ranks(config, ranks, kills=2)
    assert refused.value.exit_code == 1


def test_one_number_of_ranks_is_proved_without_virtual_ranks() -> None:
    check_proof_ranks(RunConfig(recipe="m:f", run="r"), [2], kills=1)


def found(name: str, sha256: str, *, is_plain: bool = True, place: str = "") -> Found:
    return Found(
        name=name, kind="float", reached_by="loop", place=place, remedy="keep it", sha256=sha256, is_plain=is_plain
    )


def test_a_suspect_differs_between_a_process_that_lived_and_one_that_resumed() -> None:
    lived = [found("best", "a"), found("same", "a"), found("unreadable", ""), found("inner", "a"), found("x.late", "a")]
    restored = [found("best", "b"), found("same", "a"), found("unreadable", "b"), found("x.early", "a")]
    assert [each.name for each in find_suspects(lived, restored)] == ["best", "x.late"]


def test_objects_with_a_state_that_did_not_change_are_listed_apart() -> None:
    built = [found("teacher", "a", is_plain=False), found("average", "a", is_plain=False), found("rate", "a")]
    straight = [found("teacher", "a", is_plain=False), found("average", "b", is_plain=False), found("rate", "a")]
    assert [each.name for each in list_unchanged(built, straight, [])] == ["teacher"]
    assert list_unchanged(built, straight, [built[0]]) == []


def make_proof(straight: str, resumed: str, **fields: Any) -> Proof:
    machine = {"torch": "2", "cpu": "c", "system": "s", "threads": 1}
    return Proof(
        recipe="m:f", config_fingerprint="f", seed=1, steps=4, kills=[2], chunks=[1, 4], resumed_from=[1],
        steps_per_epoch=2, own_steps_per_epoch=2, straight=straight, resumed=resumed, environment=machine, **fields,
    )  # fmt: skip


def test_equal_bytes_are_proved_whatever_the_search_has_found() -> None:
    line = describe_found(found("meter.total", "a", place="m.py:3: "))
    proof = make_proof("a", "a", lost=[line], unchanged=["teacher (Net, reached by loss): keep it"])
    assert proof.is_proved
    assert "m.py:3: meter.total (float, reached by loop): keep it; no byte depended on it in these steps" in str(proof)
    assert "teacher (Net, reached by loss): keep it; it did not change in these steps" in str(proof)
    assert str(proof).startswith("proved: ")


def test_a_module_that_steps_change_is_named_first() -> None:
    log, mean = describe_found(found("log", "a")), describe_found(found("mean", "a", is_plain=False))
    lines = str(make_proof("a", "a", lost=[mean, log], products=[mean])).splitlines()
    assert lines[1] == "  not kept, though steps change it: mean (float, reached by loop): keep it"
    assert [line for line in lines if "no byte depended" in line] == [
        "  not kept    log (float, reached by loop): keep it; no byte depended on it in these steps"
    ]


def test_other_bytes_are_explained_by_what_a_resume_has_lost() -> None:
    proof = make_proof("a", "b", lost=[describe_found(found(f"v{number}", "a")) for number in range(7)])
    assert not proof.is_proved
    rows = [line for line in str(proof).splitlines() if line.startswith("  no checkpoint has ")]
    assert rows[0] == "  no checkpoint has v0 (float, reached by loop): keep it"
    assert rows[-1] == "  no checkpoint has 2 more"


def test_a_search_that_looked_at_nothing_says_so() -> None:
    assert "unsearched" in str(make_proof("a", "a", looked_at=0))
    assert "unsearched" not in str(make_proof("a", "a", looked_at=3))


def test_a_proof_lists_what_it_did_not_reach() -> None:
    events = {"the end of anneal 'temperature'": 900.0, "StepLR.step_size": 5.0}
    lines = list_not_reached(20, (10, 6000), (20, 3), events, ranks=1, workers=2, device="cpu")
    assert lines == [
        "the end of an epoch of 6000 steps: here an epoch has 10",
        "a run of 3 epochs: here the run has 20; --whole proves the run as it is",
        "the end of anneal 'temperature' (step 900)",
        "a GPU, several ranks",
    ]
    assert list_not_reached(20, (10, 10), (2, 2), {}, ranks=2, workers=2, device="cuda") == []


@pytest.mark.slow
def test_assert_resumes_names_what_is_lost(tmp_path: Path) -> None:
    config = RunConfig(recipe="tests.support.loops:forgets", run="r", store=str(tmp_path))
    with pytest.raises(AssertionError, match=r"not proved(.|\n)*average \(Sequential(.|\n)*: best \(float"):
        assert_resumes(config, kills=1, steps=6)


@pytest.mark.slow
def test_a_killed_life_trains_no_step_that_the_straight_run_does_not(tmp_path: Path) -> None:
    """Another rank may be further than the one whose report brings the kill."""
    config = RunConfig(
        recipe="tests.support.loops:ends", run="r", store=str(tmp_path), settings={"after": 4},
        compute=Compute(ranks=2), determinism=Determinism(mode="fast"),
    )  # fmt: skip
    assert assert_resumes(config, kills=1, steps=4, seed=3).kills == [4]

"""The first difference between two trails is named by its earliest step, and in it by its earliest cause."""

from typing import Any

import pytest

from holdfast.checkpoint.departure import Difference, find_departure, find_first


def line(step: int, **changed: Any) -> dict[str, Any]:
    tensors = {"model.a": "1", "model.b": "2", "optimizer.state.a.exp_avg": "3", "extras.average.a": "4"}
    state = {"buffers": "0", "extras.average": "5", "model": "6", "optimizer": "7", "optimizer.exp_avg": "8"}
    known = {"loss": 1.0, "grad_norm": 2.0, "lrs": [0.1], "samples": "aa-bb", "rng": "cc"}
    changed["state"] = state | {"tensors": tensors | changed.pop("tensors", {})} | changed.pop("components", {})
    return {"step": step, **known, **changed}


ONE = [line(step) for step in range(1, 5)]


@pytest.mark.parametrize(
    ("changed", "fields", "tensors"),
    [
        ({"loss": 3.0}, ("loss",), ()),
        ({"skipped": True}, ("skipped",), ()),
        ({"rng": "x", "grad_norm": 0.5, "loss": 3.0, "samples": "ab-bb"}, ("samples", "loss", "grad_norm", "rng"), ()),
        ({"samples": "aa-bc"}, ("batch content",), ()),
        ({"samples": "aa"}, (), ()),  # of an earlier version
        ({"lrs": [0.2], "loss": 3.0}, ("lrs", "loss"), ()),
        ({"anneals": {"x": 1.0}, "metrics": {"y": 1.0}}, (), ()),  # the other trail has none
        (
            {"components": {"model": "x", "extras.average": "x", "optimizer.exp_avg": "x"}, "rng": "x"},
            ("optimizer.exp_avg", "model", "extras.average", "rng"),
            (),
        ),
        (
            {"tensors": {"model.b": "x", "extras.average.a": "x"}, "components": {"model": "x"}},
            ("model",),
            ("model.b", "extras.average.a"),
        ),
        ({"components": {"new": "x"}}, (), ()),
    ],
)
def test_differences_are_named_causes_first(
    changed: dict[str, Any], fields: tuple[str, ...], tensors: tuple[str, ...]
) -> None:
    other = [*ONE[:2], line(3, **changed), line(4, loss=9.0)]
    expected = Difference(3, fields, tensors) if fields else Difference(4, ("loss",))
    assert find_first(ONE, other) == expected
    assert find_first(other, ONE) == expected


def test_only_steps_and_checksums_of_both_trails_are_compared() -> None:
    without = [{name: value for name, value in each.items() if name != "state"} for each in ONE]
    assert find_first(ONE, without) is None
    assert find_first(ONE, ONE[2:]) is None
    assert find_first(ONE, []) is None
    assert find_first(ONE[:2], [line(2, loss=2.0), line(7)]) == Difference(2, ("loss",))


# ---- parts: the ranks, or the shares with virtual ranks


def rank(number: int, **changed: Any) -> dict[str, Any]:
    facts = {"samples": "aa", "generators": "bb", "loss": "cc", "state": {"model": "dd", "extras.seen": "ee"}}
    return {"rank": number, **facts, **changed}


def share(number: int, rank: int, **changed: Any) -> dict[str, Any]:
    return {"share": number, "rank": rank, "samples": "aa", "buffers": "bb", "gradient": "cc", **changed}


RANKS = [rank(0), rank(1)]
SHARES = [*(share(number, number // 2) for number in range(4)), {"rank": 0, "sum": "x"}, {"rank": 1, "sum": "y"}]
ON_ONE = [*(share(number, 0) for number in range(4)), {"rank": 0, "sum": "z"}]


def named(one: list[dict[str, Any]], other: list[dict[str, Any]], **changed: Any) -> tuple[str, ...]:
    found = find_first([line(1, parts=one)], [line(1, parts=other, **changed)])
    return found.fields if found else ()


def test_a_difference_in_some_ranks_is_named_with_the_rank() -> None:
    assert named(RANKS, RANKS) == ()
    assert named(RANKS, [rank(0), rank(1, samples="x", loss="x")], loss=3.0) == (
        "samples of rank 1", "loss of rank 1", "loss"
    )  # fmt: skip
    changed = rank(1, generators="x", state={"model": "dd", "extras.seen": "x"})
    assert named(RANKS, [rank(0), changed]) == ("generators of rank 1", "extras.seen of rank 1")


def test_a_difference_in_all_ranks_is_named_once() -> None:
    everywhere = [rank(0, loss="x", generators="x"), rank(1, loss="x", generators="x")]
    assert named(RANKS, everywhere, loss=3.0) == ("generators", "loss")


def test_a_difference_in_some_shares_is_named_with_the_rank_that_trained_them() -> None:
    two = [*SHARES[:2], share(2, 1, buffers="x"), share(3, 1, buffers="x"), *SHARES[4:]]
    assert named(SHARES, two) == ("buffers of rank 1 (shares 2, 3)",)
    assert named(two, ON_ONE) == ("buffers of rank 1 (shares 2, 3)",), "the ranks of the first trail are named"
    assert named(ON_ONE, two) == ("buffers of rank 0 (shares 2, 3)",)


def test_sums_are_compared_for_one_number_of_ranks_only() -> None:
    assert named(SHARES, [*SHARES[:5], {"rank": 1, "sum": "other"}]) == ("sum of all gradients of rank 1",)
    assert named(SHARES, ON_ONE) == ()


def test_sums_are_compared_for_one_layout_of_the_model_only() -> None:
    sharded, replicated = (
        [*SHARES[:4], *({"rank": rank, "sum": f"{grid} {rank}", "grid": grid} for rank in range(2))]
        for grid in ("1x2", "2x1")
    )
    assert named(SHARES, sharded) == named(sharded, replicated) == ()
    changed = [*sharded[:5], {**sharded[5], "sum": "other"}]
    assert named(sharded, changed) == ("sum of all gradients of rank 1",)


def test_shares_are_compared_for_the_same_part_of_the_model() -> None:
    pairs = [(number, part) for part in range(2) for number in range(2)]
    two = [share(number, part, model_part=part, gradient=f"{number} {part}") for number, part in pairs]
    four = [{**each, "rank": 2 * each["share"] + each["model_part"]} for each in two]
    assert named(two, four) == named(four, two) == ()
    wrong = [{**each, "gradient": "x"} if each["rank"] == 3 else each for each in four]
    assert named(wrong, two) == ("gradient of rank 3 (share 1)",)


def test_the_form_of_a_saved_state_is_compared_last() -> None:
    lived = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0, "form": {"extras": "a", "progress": "b"}}]
    again = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0, "form": {"extras": "c", "progress": "b"}}]
    found = find_departure(lived, again)
    assert found is not None
    assert (found.step, found.fields) == (2, ("saved extras",))
    assert find_departure(lived, again, tolerance=0.1) is None

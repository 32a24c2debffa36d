"""Tests that values stand in one column, however long their names are."""

import math

import pytest

from holdfast.proof.evaluation import Evaluation
from holdfast.recipe.probe import Probe
from holdfast.terminal.columns import align, tabulate


def evaluation(
    metrics: dict[str, float],
    recorded: dict[str, float | None] | None = None,
    anneals: dict[str, float] | None = None,
    probe: dict[str, float | None] | None = None,
) -> list[str]:
    """Return the printed lines of an evaluation, except the first."""
    found = Evaluation(
        run="a", commit=1, path="epoch-0001", step=10, epoch=1, checkpoint_sha256="0" * 64, metrics=metrics,
        anneals=anneals or {}, probe=Probe(values=probe or {}), recorded=recorded or {},
    )  # fmt: skip
    return str(found).splitlines()[1:]


def test_values_begin_after_the_longest_name() -> None:
    rows = align({"a": "1", "accuracy on held out": "2"})
    assert rows == ["a                     1", "accuracy on held out  2"]


def test_a_long_name_moves_only_its_own_value() -> None:
    long = "m" * 41
    assert align({"a": "1", long: "2"}) == ["a               1", f"{long}  2"]


def test_a_tables_lines_end_with_their_last_value() -> None:
    rows = [("attempt", "lost"), ("1", ""), ("2", "3.5")]
    assert tabulate(rows, has_numbers=False) == ["attempt  lost", "1", "2        3.5"]
    assert tabulate(rows) == ["attempt  lost", "1", "2         3.5"]


@pytest.mark.parametrize("name", ["loss", "accuracy_on_the_held_out_part", "x" * 16, "x" * 60])
def test_an_evaluations_values_stand_apart_from_their_names(name: str) -> None:
    first, second = evaluation({name: 0.5, "b": 0.25}, anneals={"b": 0.25})
    shown = name.replace("_", " ")
    assert first.startswith(f"  {shown}  ")
    assert first.removeprefix(f"  {shown}").strip() == "0.5"
    if len(name) <= 40:
        assert first.index("0.5") == second.index("0.25")


def test_a_metric_and_a_probe_value_of_one_name_are_told_apart() -> None:
    assert evaluation({"loss": 1.0}, probe={"loss": None}) == ["  loss            1", "  probe loss      not finite"]


def test_metrics_equal_to_those_of_training_are_marked() -> None:
    *_, last = evaluation({"a": 1.0, "b": math.nan}, {"a": 1.0, "b": None})
    assert last == "  the metrics equal those recorded in training"


def test_a_metric_that_differs_from_training_shows_both_values() -> None:
    rows = evaluation({"accuracy": 0.1 + 0.2, "same": 2.0}, {"accuracy": 0.3, "same": 2.0})
    assert rows == ["  accuracy        0.30000000000000004, in training 0.3", "  same            2"]

"""An annealed value is a function of the step alone, whatever the run's interruptions and length."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Anneal
from holdfast.errors import ConfigError

STEPS_PER_EPOCH = 10

MOVES = {"temperature_initial": 1.2, "temperature_final": 0.2}

numbers = st.floats(-1e6, 1e6)
fractions = st.floats(0, 1)


@st.composite
def anneals(draw: st.DrawFn) -> Anneal:
    """Draw an anneal that begins before it ends, in steps, fractions or one of each."""
    initial, final, epochs = draw(numbers), draw(numbers), draw(st.floats(0.1, 100))
    start, end = sorted(draw(st.tuples(fractions, fractions)))
    fields: dict[str, Any] = {"start_frac": start, "end_frac": end}
    length = epochs * STEPS_PER_EPOCH
    if draw(st.booleans()):
        fields["start_step"] = int(start * length)
    if draw(st.booleans()):
        fields["end_step"] = int(end * length) + 1
    return Anneal(initial, final, epochs, **fields)


def values(anneal: Anneal, steps: int, steps_per_epoch: int = STEPS_PER_EPOCH) -> list[float]:
    return [round(anneal.at(step, steps_per_epoch), 4) for step in range(steps)]


@given(anneals(), st.integers(0, 2000), st.integers(0, 2000))
def test_an_anneal_is_monotonic_and_stays_between_its_ends(anneal: Anneal, one: int, other: int) -> None:
    earlier, later = (anneal.at(step, STEPS_PER_EPOCH) for step in sorted([one, other]))
    ends = (anneal.initial, earlier, later, anneal.final)
    assert list(ends) == sorted(ends, reverse=anneal.final < anneal.initial)


@given(anneals())
def test_the_first_and_last_values_are_exact(anneal: Anneal) -> None:
    start, end = anneal.bounds(STEPS_PER_EPOCH)
    assert anneal.at(int(end) + 1, STEPS_PER_EPOCH) == anneal.final
    if start < end:
        assert anneal.at(int(start), STEPS_PER_EPOCH) == anneal.initial


@given(anneals(), st.lists(st.integers(0, 2000), max_size=5), st.integers(0, 2000))
def test_an_anneal_depends_on_the_step_alone(anneal: Anneal, before: list[int], step: int) -> None:
    fields = {name: getattr(anneal, name) for name in ("start_frac", "end_frac", "start_step", "end_step")}
    fresh = Anneal(anneal.initial, anneal.final, anneal.epochs, **fields)
    for each in before:
        anneal.value = anneal.at(each, STEPS_PER_EPOCH)
    assert anneal.at(step, STEPS_PER_EPOCH) == fresh.at(step, STEPS_PER_EPOCH)


def test_an_anneal_moves_on_a_straight_line() -> None:
    assert values(Anneal(1.0, 0.0, epochs=1), 12, 10) == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]


def test_fractions_refer_to_the_anneals_own_length() -> None:
    anneal = Anneal(0.0, 1.0, epochs=2, start_frac=0.25, end_frac=0.75)
    assert anneal.bounds(4) == (2.0, 6.0)
    assert values(anneal, 9, 4) == [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        ({"start_step": 3}, (3.0, 15.0)),
        ({"end_step": 17}, (5.0, 17.0)),
        ({"start_step": 0, "end_step": 4}, (0.0, 4.0)),  # 0 is a step, too
    ],
)
def test_a_step_overrides_a_fraction(steps: dict[str, int], bounds: tuple[float, float]) -> None:
    assert Anneal(1.0, 0.0, epochs=2, start_frac=0.25, end_frac=0.75, **steps).bounds(10) == bounds


def test_steps_need_no_length() -> None:
    anneal = Anneal(1.0, 0.0, start_step=2, end_step=4)
    for steps_per_epoch in (1, 7):
        assert values(anneal, 6, steps_per_epoch) == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    "fields", [{"start_step": 3, "end_step": 3}, {"epochs": 1, "start_frac": 0.5, "end_frac": 0.5}]
)
def test_an_anneal_that_ends_where_it_begins_is_a_step_function(fields: dict[str, Any]) -> None:
    assert values(Anneal(1.0, 0.0, **fields), 6, 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_anneal_begins_with_its_first_value() -> None:
    assert Anneal(0.7, 0.1, epochs=1).value == 0.7


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "set epochs, or both"),
        ({"start_step": 3}, "set epochs, or both"),
        ({"end_step": 3}, "set epochs, or both"),
        ({"epochs": 0}, "epochs=0.: expected a number above 0"),
        ({"epochs": float("nan")}, "epochs=nan"),
        ({"epochs": 1, "start_frac": -0.1}, "start_frac=-0.1.: expected a number from 0 to 1"),
        ({"epochs": 1, "end_frac": 1.5}, "end_frac=1.5.: expected a number from 0 to 1"),
        ({"epochs": 1, "start_frac": 0.6, "end_frac": 0.5}, "the end, 0.5, is before the start, 0.6"),
        ({"start_step": 6, "end_step": 5}, "the end, 5, is before the start, 6"),
        ({"epochs": 1, "start_step": 6, "end_step": 5}, "the end, 5, is before the start, 6"),
    ],
)
def test_an_anneal_without_a_length_or_that_ends_before_it_begins_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Anneal(1.0, 0.0, **fields)


def test_an_endless_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="epochs=inf"):
        Anneal(1.0, 0.0, epochs=float("inf"))


# ---- from a recipe's settings


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (0.0, 20.0)),
        ({"temperature_anneal_start_frac": 0.25, "temperature_anneal_end_frac": 0.5}, (5.0, 10.0)),
        ({"temperature_anneal_start_frac": 0.25, "temperature_anneal_start_step": 7}, (7.0, 20.0)),
        ({"temperature_anneal_end_frac": 0.5, "temperature_anneal_end_step": 3}, (0.0, 3.0)),
        ({"temperature_anneal_start_step": None, "temperature_anneal_end_step": None}, (0.0, 20.0)),
        ({"temperature_anneal_start_step": 0, "temperature_anneal_end_step": 8, "schedule_epochs": None}, (0.0, 8.0)),
        ({"lr": 0.1, "temperature_scale_initial": 9.0, "temperature_scale_anneal_end_step": 9, "tem": 1}, (0.0, 20.0)),
    ],
)
def test_an_anneal_is_read_from_settings(settings: dict[str, Any], bounds: tuple[float, float]) -> None:
    anneal = Anneal.from_settings("temperature", {**MOVES, "schedule_epochs": 2, **settings})
    assert (anneal.initial, anneal.final, anneal.value) == (1.2, 0.2, 1.2)
    assert anneal.bounds(10) == bounds


def test_messages_name_the_table_of_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"settings\.policy\.temperature_final is missing"):
        Anneal.from_settings("temperature", {"temperature_initial": 1.0}, epochs=3, table="settings.policy")


def test_the_length_of_the_training_can_be_given() -> None:
    assert Anneal.from_settings("temperature", MOVES, epochs=3).bounds(10) == (0.0, 30.0)
    assert Anneal.from_settings("temperature", {**MOVES, "schedule_epochs": 2}, epochs=3).bounds(10) == (0.0, 30.0)


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        ({"temperature_initial": None}, "settings.temperature_initial is missing", "'temperature'"),
        ({"temperature_final": None}, "settings.temperature_final is missing", "'temperature'"),
        ({"temperature_finall": 1}, "no setting settings.temperature_finall", "did you mean temperature_final?"),
        ({"temperature_anneal_strat_frac": 0}, "temperature_anneal_strat_frac", "mean temperature_anneal_start_frac?"),
        ({"temperature_anneal_initial": 1}, "there is no setting settings.temperature_anneal_initial", "did you mean "),
        ({"temperature_initial": True}, "settings.temperature_initial = True: expected a finite number", ""),
        ({"temperature_initial": "hot"}, "settings.temperature_initial = 'hot': expected a finite number", ""),
        ({"temperature_final": math.nan}, "settings.temperature_final = nan: expected a finite number", ""),
        ({"temperature_final": 10**400}, "settings.temperature_final = 1000", ""),
        ({"temperature_anneal_end_frac": 1.5}, "settings.temperature_anneal_end_frac = 1.5: expected 0 to 1", ""),
        ({"temperature_anneal_end_step": 1.5}, "anneal_end_step = 1.5: expected a whole number from 0", ""),
        ({"temperature_anneal_start_step": -1}, "anneal_start_step = -1: expected a whole number from 0", ""),
        ({"temperature_anneal_start_frac": 0.7, "temperature_anneal_end_frac": 0.5}, "anneal_end_frac = 0.5", ""),
        ({"temperature_anneal_start_step": 7, "temperature_anneal_end_step": 5}, "would end before it begins: ", ""),
        ({"schedule_epochs": None}, "the step at which it ends isn't known", "settings.schedule_epochs, or both"),
        ({"schedule_epochs": 0}, "settings.schedule_epochs = 0: expected a number above 0", ""),
        ({"schedule_epochs": "2"}, "settings.schedule_epochs = '2': expected a number above 0", ""),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Anneal.from_settings("temperature", {**MOVES, "schedule_epochs": 2, **settings})
    assert said in str(caught.value)
    assert hint in caught.value.hint

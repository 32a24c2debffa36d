"""Canonical JSON follows RFC 8785, and the spellings of numbers that JSON lacks never change."""

import json
import math
import struct
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.provenance.canonical import (
    dump_json,
    finite_or_none,
    mark_exactly,
    mark_float,
    mark_int,
    read_exactly,
    spell_floats,
)
from tests.conftest import IS_SOAK


def test_json_follows_rfc_8785() -> None:
    value = {
        "\U0001f600": 1,
        "\ufb33": 2.0,
        "lr": 1e-5,
        "b": [{"c": 1e-7}, "1e-7\u2028\x7f"],
        "big": 1e21,
        "zero": -0.0,
    }
    # Keys in the order of UTF-16, which puts the emoji before the letter.
    text = '{"b":[{"c":1e-7},"1e-7\u2028\x7f"],"big":1e+21,"lr":0.00001,"zero":0,"\U0001f600":1,"\ufb33":2}'
    assert dump_json(value).decode() == text


# Ordinary texts, lone surrogates, keys on both sides of UTF-16's other order, and texts that look like numbers in JSON.
TEXTS = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["", "a,1e-08,b", "[1.0]", ":1e+16}", '",1.0,"', "\ufb33", "\U0001f600", "\x00\x1f\x7f\u2028\\/"]
)
FLOATS = st.floats() | st.sampled_from(
    [-0.0, 5e-324, 1e-4, 9.9e-5, 1e-5, 1e-6, 1e-7, 1e-8, 1e15, 1e16, 1.5e16, 1e20, 1e21]
)
SCALARS = st.none() | st.booleans() | TEXTS | FLOATS | st.integers() | st.integers(2**53 - 2, 2**53 + 2)
OTHERS = st.binary() | st.sets(st.integers()) | st.sampled_from(HTTPStatus) | st.dictionaries(st.integers(), st.none())
VALUES = st.recursive(
    SCALARS | OTHERS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS | st.integers(), inner),
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner))


@settings(max_examples=20_000 if IS_SOAK else 250)
@given(VALUES | JSON)
def test_json_is_that_of_the_library_rfc8785_and_so_are_its_errors(value: object) -> None:
    assert outcome(dump_json, value) == outcome(rfc8785.dumps, value)


def outcome(dump: Callable[[Any], bytes], value: object) -> object:
    try:
        return dump(value)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "value", [[1e-8] * 3, {"a": [1.0, {"b": 1e16}], "c": "x,1.0"}, {"é": -0.0, "e": [True, None, "1.0"]}]
)
def test_ordinary_values_take_the_fast_way(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rfc8785.dumps(value)
    written = rfc8785.dumps
    monkeypatch.setattr(
        rfc8785, "dumps", lambda part: written(part) if isinstance(part, float) else pytest.fail("slow")
    )
    assert dump_json(value) == expected


def test_a_value_that_contains_itself_is_an_error() -> None:
    value: list[object] = []
    value.append({"it": value})
    with pytest.raises(RecursionError):
        dump_json(value)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 2**53])
def test_nan_and_infinity_must_be_marked(value: float) -> None:
    with pytest.raises(rfc8785.CanonicalizationError):
        dump_json([value])
    assert dump_json([mark_int(value) if isinstance(value, int) else mark_float(value)])


@given(st.floats())
@example(-0.0)
@example(1.0)
def test_a_marked_float_is_read_to_the_bit(value: float) -> None:
    found = read_exactly(written_and_read(mark_exactly(value)))
    assert math.isnan(value) == math.isnan(found)
    assert math.isnan(value) or struct.pack("d", found) == struct.pack("d", value)


def written_and_read(value: object) -> object:
    return json.loads(dump_json([value]))[0]


def test_spellings_on_disk_never_change() -> None:
    assert [mark_int(2**53 - 1), mark_int(-(2**53))] == [2**53 - 1, {"$int": "-9007199254740992"}]
    assert [mark_float(1.0), mark_float(math.inf)] == [1.0, {"$float": "inf"}]
    assert [mark_exactly(0.1), mark_exactly(3.0), mark_exactly(-0.0)] == [
        0.1,
        {"$float": "0x1.8000000000000p+1"},
        {"$float": "-0x0.0p+0"},
    ]
    assert spell_floats({"loss": math.nan, "step": 3, "anneals": {"t": -math.inf}}) == {
        "loss": "nan",
        "step": 3,
        "anneals": {"t": "-inf"},
    }
    assert [finite_or_none(0.5), finite_or_none(math.nan)] == [0.5, None]

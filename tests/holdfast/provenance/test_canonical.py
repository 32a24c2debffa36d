"""Canonical JSON follows RFC 8785, and the spellings of numbers that JSON lacks never change."""

import json
import math
import struct

import pytest
import rfc8785
from hypothesis import example, given
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

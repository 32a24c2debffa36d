"""Equal settings have equal fingerprints, and differences between settings are named."""

import dataclasses
import enum
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import holdfast
from holdfast import ConfigDrift
from holdfast.provenance.fingerprint import canonical_json, diff


@dataclasses.dataclass
class Inner:
    rate: float = 0.1
    _cache: int = 0


@dataclasses.dataclass
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    name: str = "a"


class Model(BaseModel):
    name: str = "a"
    inner: Inner = Inner()


class Color(enum.Enum):
    RED = "red"


def test_a_fingerprint_is_the_sha256_of_canonical_json() -> None:
    expected = b'{"inner":{"rate":0.1},"name":"a"}'
    assert canonical_json(Outer()) == expected
    assert holdfast.fingerprint(Outer()) == hashlib.sha256(expected).hexdigest()


def test_dataclasses_models_and_mappings_agree() -> None:
    as_mapping = {"name": "a", "inner": {"rate": 0.1}}
    assert holdfast.fingerprint(Outer()) == holdfast.fingerprint(Model()) == holdfast.fingerprint(as_mapping)


def test_private_fields_and_order_do_not_count() -> None:
    assert holdfast.fingerprint(Outer(Inner(_cache=9))) == holdfast.fingerprint(Outer())
    assert holdfast.fingerprint({"_x": 1, "a": 1, "b": 2}) == holdfast.fingerprint({"b": 2, "a": 1.0})


def test_other_objects_are_hashed_as_their_string() -> None:
    assert holdfast.fingerprint("lr=1") == hashlib.sha256(b"lr=1").hexdigest()
    assert holdfast.fingerprint({"path": Path("a/b")}) == holdfast.fingerprint({"path": "a/b"})
    assert holdfast.fingerprint({"c": Color.RED}) == holdfast.fingerprint({"c": "red"})


@given(st.integers(min_value=2**53), st.integers(min_value=2**53))
def test_large_numbers_have_different_fingerprints(a: int, b: int) -> None:
    assert (holdfast.fingerprint({"n": a}) == holdfast.fingerprint({"n": b})) == (a == b)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_have_a_fingerprint(value: float) -> None:
    assert holdfast.fingerprint({"x": value}) == holdfast.fingerprint({"x": value})
    assert holdfast.fingerprint({"x": value}) != holdfast.fingerprint({"x": 0.0})


def test_an_equal_or_empty_fingerprint_passes() -> None:
    holdfast.validate_fingerprint(Outer(), holdfast.fingerprint(Outer()))
    holdfast.validate_fingerprint(Outer(), "")


def test_drift_names_both_hashes_and_every_field() -> None:
    saved, current = Outer(), Outer(Inner(rate=0.2), "b")
    with pytest.raises(ConfigDrift) as caught:
        holdfast.validate_fingerprint(current, holdfast.fingerprint(saved), saved)
    message = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert holdfast.fingerprint(saved)[:16] in message
    assert holdfast.fingerprint(current)[:16] in message
    assert holdfast.fingerprint(saved)[:17] not in message
    assert "inner.rate: saved 0.1, now 0.2" in message
    assert "name: saved 'a', now 'b'" in message
    assert caught.value.data["fields"] == {"inner.rate": [0.1, 0.2], "name": ["a", "b"]}


def test_drift_without_the_saved_configuration() -> None:
    with pytest.raises(ConfigDrift, match="saved 0000000000000000, now "):
        holdfast.validate_fingerprint(Outer(), "0" * 64)


settings = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text("xyz", min_size=1, max_size=2), settings, max_size=3),
    st.dictionaries(st.text("xyz", min_size=1, max_size=2), settings, max_size=3),
)
def test_fingerprints_differ_exactly_if_there_is_a_diff(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert bool(diff(a, b)) == (holdfast.fingerprint(a) != holdfast.fingerprint(b))

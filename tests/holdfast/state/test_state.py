"""A state is saved and restored to the last bit, without pickle."""

import enum
import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import checkpoint
from holdfast.errors import StateError
from holdfast.state import capture_rng, from_payload, restore_rng, to_payload
from holdfast.state.encoding import DTYPES


def there_and_back(state: Any) -> Any:
    data = bytearray(b"".join(bytes(piece) for piece in checkpoint.serialize(to_payload(state))))
    return from_payload(checkpoint.deserialize([data]))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tensor", "$dict", "$float", "a"]), inner, max_size=2)
    ),
    max_leaves=9,
)


@given(plain)
def test_plain_values_are_exact(value: Any) -> None:
    assert repr_of(there_and_back(value)) == repr_of(value)


def repr_of(value: Any) -> str:
    """Return a value's repr with every bit of its floats and without the order of its dicts."""
    if isinstance(value, dict):
        return f"{{{sorted((repr_of(key), repr_of(item)) for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[repr_of(item) for item in value]}"
    return "nan" if isinstance(value, float) and math.isnan(value) else repr(value)


class Point(NamedTuple):
    x: Any
    y: Any


class Phase(enum.Enum):
    MAIN = 2


def test_numbers_enums_and_named_tuples_keep_their_types() -> None:
    values = [np.float32(0.1), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), Phase.MAIN, Point(1, Point(2, (3,)))]
    found = there_and_back({"extras": values})["extras"]
    assert repr(found) == repr(values)
    assert list(map(type, found)) == list(map(type, values))


def test_mappings_in_extras_keep_their_order() -> None:
    for value in ({"b": 1, "a": {"d": 1, "c": 2}}, {2: 0, 1: 0}, {"a": 0, "b": 0}, {"\ue000": 0, "\U0001f600": 0}):
        assert repr(there_and_back({"extras": value})["extras"]) == repr(value)


def test_a_class_that_cannot_be_found_again_is_refused() -> None:
    class Inner(NamedTuple):
        x: int

    with pytest.raises(StateError, match=r"extras\.0 is of the class .*Inner, which a resume can't find by its name"):
        to_payload({"extras": [Inner(1)]})
    payload = to_payload({"extras": [Point(1, 2)]})
    for path in (["os", "system"], [__name__, "Phase"], ["not.imported", "Point"]):
        payload.tree["extras"][0]["$named"][:2] = path
        with pytest.raises(StateError, match="which the recipe doesn't import now"):
            from_payload(payload)


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_tensors_are_exact(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    size = math.prod(shape) * dtype.itemsize
    limit = 2 if dtype == torch.bool else 256
    data = torch.randint(0, limit, (size,), dtype=torch.uint8, generator=generator)
    tensor = data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    found = there_and_back({"a": tensor})["a"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_strided_tensors_and_arrays_are_exact() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    state = there_and_back({"t": matrix.T, "s": matrix[:, 1], "a": np.arange(4, dtype=np.uint32)[::2]})
    assert torch.equal(state["t"], matrix.T)
    assert torch.equal(state["s"], matrix[:, 1])
    assert state["a"].dtype == np.uint32
    assert state["a"].tolist() == [0, 2]


def test_tied_tensors_are_stored_once() -> None:
    weight = torch.ones(4)
    payload = to_payload({"embed": weight, "head": weight, "other": torch.ones(4), "part": weight[:2]})
    assert sorted(payload.tensors) == ["embed", "other", "part"]
    assert torch.equal(there_and_back({"embed": weight, "head": weight})["head"], weight)


def test_tensors_that_only_begin_at_the_same_address_are_not_tied() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    state = {"a": square, "transposed": square.T, "flat": square.view(4), "bits": square.view(torch.int32)}
    assert list(to_payload(state).tensors) == sorted(state)
    found = there_and_back(state)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_conjugated_tensor_is_exact() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    assert torch.equal(there_and_back({"a": numbers.conj()})["a"], torch.tensor([1 - 2j, 3 + 1j]))


def test_names_do_not_collide() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.tensor([2.0])}
    found = there_and_back(state)
    assert (found["a.b"].item(), found["a"]["b"].item(), found["__metadata__"].item()) == (1.0, 0.0, 2.0)


def test_restored_tensors_own_their_memory() -> None:
    state = there_and_back({"a": torch.ones(2), "b": torch.zeros(2)})
    state["a"].add_(1)
    assert state["b"].tolist() == [0.0, 0.0]


def test_lent_tensors_are_views_of_the_payload() -> None:
    shared = torch.ones(2)
    state = {"model": {"w": torch.zeros(3), "tied": shared, "none": torch.ones(0)}, "average": [shared, torch.ones(2)]}
    data = bytearray(b"".join(map(bytes, checkpoint.serialize(to_payload(state)))))
    found = from_payload(checkpoint.deserialize([data]), lent=["model"])
    assert found["model"]["none"].shape == (0,)
    data[-32:] = bytes(32)  # the ends of all tensors
    assert found["model"]["tied"].tolist() == [0.0, 0.0]
    assert [each.tolist() for each in found["average"]] == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": [object()]}}, "a.b.0"), ({"f": len}, "f"), ({"k": {(1, 2): 3}}, "k"), ({"s": {1, 2}}, "s"),
        ({"rows": torch.eye(2).to_sparse()}, "rows is a torch.sparse_coo tensor"),
        ({"later": torch.ones(2, device="meta")}, "later is a torch.strided tensor of torch.float32 without data"),
        ({"wide": torch.ones(2, dtype=torch.complex128)}, "wide is a torch.strided tensor of torch.complex128"),
    ],
)  # fmt: skip
def test_a_value_that_needs_pickle_is_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(StateError, match=where) as caught:
        to_payload(value)
    assert isinstance(caught.value, TypeError)


def test_every_generator_is_restored() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()]

    random.gauss(0, 1)  # draws a pair and keeps the second number, which is state too
    np.random.randn()
    saved = there_and_back(capture_rng())
    expected = draw()
    assert draw() != expected
    restore_rng(saved)
    assert draw() == expected


def test_tied_tensors_come_back_tied() -> None:
    """Otherwise an average of a tied model, updated in place, would continue as two separate tensors."""
    weight = torch.ones(2)
    found = there_and_back({"a": weight, "b": weight, "c": torch.ones(2)})
    found["a"].add_(1)
    assert found["b"].tolist() == [2.0, 2.0]
    assert found["c"].tolist() == [1.0, 1.0]

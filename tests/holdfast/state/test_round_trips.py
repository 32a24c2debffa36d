"""A kept value comes back equal, of an equal type and laid out alike, or is refused by name."""

import enum
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from holdfast import checkpoint
from holdfast.errors import HoldfastError, StateError
from holdfast.state import Ties, as_stateful, from_payload, to_payload
from holdfast.state.encoding import DTYPES, NUMPY_NAMES


def there_and_back(state: Any) -> Any:
    """Return a state as a checkpoint gives it back."""
    data = bytearray(b"".join(map(bytes, checkpoint.serialize(to_payload({"extras": state})))))
    return from_payload(checkpoint.deserialize([data]))["extras"]


def describe(value: Any) -> Any:
    """Return everything about a value that has to come back."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
        strides = [each for size, each in zip(value.shape, value.stride(), strict=True) if size > 1 and value.numel()]
        return type(value), value.dtype, value.shape, strides, value.requires_grad, data
    if isinstance(value, np.ndarray):
        strides = [each for size, each in zip(value.shape, value.strides, strict=True) if size > 1 and value.size]
        return type(value), value.dtype.str, value.shape, strides, value.flags.writeable, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(describe(key), describe(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(describe, value)]
    return type(value), "nan" if isinstance(value, float | np.floating) and math.isnan(value) else repr(value)


class Point(NamedTuple):
    x: Any
    y: Any


class Level(enum.IntEnum):
    HIGH = 3


class Kind(enum.StrEnum):
    OWN = "own"


class Word(str):
    pass


class Wrong(str):
    def __new__(cls, first: str, second: str = "") -> "Wrong":
        return super().__new__(cls, first + "!")


shapes = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (2, 0, 3), (1, 3), (2, 3, 4, 2), (2, 3, 1, 1)])
LAYOUTS = ["rows", "columns", "channels_last", "gaps", "expanded", "reversed", "a row"]


@st.composite
def tensors(draw: Any) -> Tensor:
    dtype, shape = draw(st.sampled_from([*DTYPES.values(), torch.complex128])), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    data = torch.arange(size, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    tensor = data.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
    tensor = arrange(tensor, draw(st.sampled_from(LAYOUTS)))
    if dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans()):
        tensor = tensor.detach().requires_grad_()
        return nn.Parameter(tensor.detach()) if draw(st.booleans()) else tensor
    return tensor


def arrange(value: Any, layout: str) -> Any:
    """Return a value laid out in another way, where its shape allows it."""
    is_array = isinstance(value, np.ndarray)
    if layout == "columns" and value.ndim == 2:
        return value.T
    if layout == "channels_last" and value.ndim == 4:
        return np.asfortranarray(value) if is_array else value.permute(0, 2, 3, 1).clone().permute(0, 3, 1, 2)
    if layout == "gaps" and value.ndim >= 2 and value.shape[-1] > 1:
        return value[..., :-1]
    if layout == "expanded" and value.ndim == 1 and value.shape[0]:
        return np.broadcast_to(value, (2, *value.shape)) if is_array else value.expand(2, -1)
    if layout == "reversed" and value.ndim and is_array:
        return value[::-1]
    return value[:1] if layout == "a row" and value.ndim and value.shape[0] else value


@st.composite
def arrays(draw: Any) -> np.ndarray[Any, Any]:
    kinds = [*map(str, NUMPY_NAMES), ">f4", "complex128", "M8[ns]", "m8[s]", "U3", "S2", "object", "longdouble"]
    dtype, shape = np.dtype(draw(st.sampled_from([*kinds, "V3"]))), draw(shapes)
    value = (
        np.zeros(shape, dtype) if dtype.kind in "OUSVmM" else np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    )
    value = arrange(value, draw(st.sampled_from(LAYOUTS)))
    how = draw(st.sampled_from(["plain", "plain", "read only", "matrix", "masked", "memmap", "record"]))
    if how == "read only":
        value = value[...]
        value.flags.writeable = False
    if how == "matrix" and value.ndim == 2:
        return value.view(np.matrix)
    if how == "masked":
        return np.ma.masked_array(value)
    if how == "record" and value.ndim:
        return value.view(np.recarray)
    return value.view(np.memmap) if how == "memmap" else value


numbers = st.sampled_from(
    [np.float32(0.1), np.int8(-3), np.bool_(True), np.uint64(2**64 - 1), np.complex64(1 + 2j), np.str_("a"),
     np.bytes_(b"a"), np.float64(-0.0), np.datetime64(5, "s"), np.timedelta64(5, "ns"), np.longdouble(1), np.float16(2)]
)  # fmt: skip
plain = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | numbers
    | st.complex_numbers() | st.sampled_from(
        [Level.HIGH, Kind.OWN, Word("a"), Wrong("a"), torch.Size([2, 3]), range(3), {1}, frozenset({1}),
         bytearray(b"a"), memoryview(b"a"), object(), 1j, torch.float32, Path("a"), slice(3)]
    )
)  # fmt: skip
keys = st.text(max_size=2) | st.integers(-2, 2) | st.booleans() | st.none() | st.floats(0, 1) | st.sampled_from(
    [Kind.OWN, Level.HIGH, np.str_("z"), np.int64(9), (1, 2), Word("w"), "$tensor", "item", "how", "value", "new"]
)  # fmt: skip
values = st.recursive(
    plain | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner).map(lambda each: Point(*each))
        | st.dictionaries(keys, inner, max_size=3) | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=2).map(lambda each: defaultdict(list, each))
        | st.dictionaries(keys, inner, max_size=2).map(lambda each: defaultdict(lambda: 0, each))
        | st.dictionaries(keys, st.integers(), max_size=2).map(Counter)
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=400)
@given(values)
def test_an_item_comes_back_as_it_was_or_is_refused_by_name(value: Any) -> None:
    built: dict[str, Any] = {"x": None}
    kept = as_stateful("kept", {"x": None}, Ties({}))
    kept.value["x"] = value
    try:
        state = there_and_back(kept.state_dict())
    except HoldfastError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "kept['x']" in message or "extras.value.x" in message
        return
    as_stateful("kept", built, Ties({})).load_state_dict(state)
    assert describe(built["x"]) == describe(value)
    again = as_stateful("kept", built, Ties({}))
    assert describe(again.value["x"]) == describe(value)


@settings(max_examples=200)
@given(values)
def test_a_state_comes_back_as_it_was_or_is_refused_by_name(value: Any) -> None:
    try:
        found = there_and_back({"x": value})["x"]
    except StateError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "extras.x" in message
        return
    assert describe(without_gradients(found)) == describe(without_gradients(value))


def without_gradients(value: Any) -> Any:
    """Return a value with plain tensors: an object's own ``state_dict`` says nothing of gradients."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {key: without_gradients(each) for key, each in value.items()})
    if isinstance(value, dict):
        return type(value)({key: without_gradients(each) for key, each in value.items()})
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        each = [*map(without_gradients, value)]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array(0), np.array([0])), (np.eye(2), np.asfortranarray(np.eye(2))), (np.eye(2), np.eye(2).view(np.matrix)),
        (torch.eye(2), torch.eye(2).T), (torch.Size([1]), (1,)), (np.str_("a"), "a"), (OrderedDict(a=1), {"a": 1}),
    ],
)  # fmt: skip
def test_values_that_differ_have_other_bytes(one: Any, other: Any) -> None:
    first, second = (
        b"".join(map(bytes, checkpoint.serialize(to_payload({"extras": {"x": each}})))) for each in (one, other)
    )
    assert first != second


def test_values_that_share_memory_in_part_share_it_again() -> None:
    corpus = torch.arange(40.0)
    found = there_and_back({"x": corpus[3:9], "y": corpus[5:30:2], "own": corpus[33:35]})
    assert found["x"].tolist() == [3, 4, 5, 6, 7, 8]
    found["x"][2] = -1
    assert found["y"][0] == -1
    assert found["own"].untyped_storage().nbytes() == 8
    grid = np.arange(12.0).reshape(3, 4)
    found = there_and_back([grid, grid[::-1, 1], torch.from_numpy(grid)[1:]])
    found[0][1, 1] = -1
    assert found[1][1] == found[2][0, 1] == -1


def test_elements_that_lie_scattered_over_too_much_memory_are_refused() -> None:
    column = torch.empty(3, 2**28 + 9, dtype=torch.bfloat16)[:, :1]
    with pytest.raises(StateError, match=r"extras\.column is a view whose elements are scattered"):
        to_payload({"extras": {"column": column}})


def with_metadata(metadata: dict[str, Any], **items: Any) -> OrderedDict[str, Any]:
    """Return a state as `state_dict` of a torch module makes it, and of a tensordict."""
    made: OrderedDict[str, Any] = OrderedDict(items)
    made._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return made


def test_what_a_state_says_beside_its_items_comes_back() -> None:
    state = {"storage": with_metadata({"": {"batch_size": torch.Size([64]), "device": torch.device("cpu")}}, x=[1])}
    found = there_and_back(state)["storage"]
    assert found == {"x": [1]}
    assert found._metadata == {"": {"batch_size": torch.Size([64]), "device": None}}
    assert isinstance(found._metadata[""]["batch_size"], torch.Size)


class Migrated(nn.Module):
    """A module whose states of before its second version had half the weight."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_inside_a_state_gets_its_own_version() -> None:
    module = Migrated()
    module.load_state_dict(there_and_back({"average": module.state_dict()})["average"])
    assert module.weight.tolist() == [1.0]


def test_versions_that_say_nothing_are_left_out() -> None:
    names = {name: {"$tensor": f"extras.it.{name}"} for name in ("weight", "bias")}
    assert to_payload({"extras": {"it": nn.Linear(1, 1).state_dict()}}).tree == {"extras": {"it": names}}


@pytest.mark.parametrize("value", [torch.device("cpu"), torch.device("cuda:1"), torch.bfloat16, torch.int64])
def test_a_device_and_a_data_type_come_back(value: Any) -> None:
    assert there_and_back({"it": value}) == {"it": value}

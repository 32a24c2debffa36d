"""The comparison of two states names every difference, and nothing else."""

import copy
import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast import state
from holdfast.checkpoint import Payload, deserialize, differences, serialize, shorten

NAMES = ("a", "b", "c", "d")

tensors = st.lists(st.floats(allow_nan=False), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.float64))
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | tensors
    | tensors.map(lambda tensor: tensor.numpy())
)  # fmt: skip
states = st.dictionaries(
    st.sampled_from(NAMES),
    st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
            | st.dictionaries(st.integers(0, 5), inner, max_size=3)
        ),
        max_leaves=9,
    ),
    max_size=4,
)


def named(one: Any, other: Any) -> list[str]:
    return differences(state.to_payload(one), state.to_payload(other))


def test_the_order_of_a_mapping_counts_in_extras_alone() -> None:
    one, other = {"b": 1, "a": 2}, {"a": 2, "b": 1}
    assert named({"extras": one}, {"extras": {"b": 1, "a": 2}}) == []
    assert named({"model": one}, {"model": other}) == []
    assert named({"extras": {1: 1, 0: 2}}, {"extras": {0: 2, 1: 1}}) == ["extras"]


class Point(NamedTuple):
    x: Any


class Phase(enum.StrEnum):
    MAIN = "main"


def test_what_an_earlier_version_wrote_without_types_is_no_difference() -> None:
    now = {"extras": {"z": np.float32(0.5), "p": Point(1), "a": Phase.MAIN, "l": [np.int64(3)]}}
    earlier = {"extras": {"a": "main", "l": [3], "p": (1,), "z": 0.5}}
    assert named(now, earlier) == named(earlier, now) == []
    earlier["extras"] |= {"a": "warm up", "l": [4], "p": (2,), "z": 0.25}
    assert named(now, earlier) == named(earlier, now) == ["extras.a", "extras.l.0", "extras.p.0", "extras.z"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a state, outer values first."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return the state with a different value at one path."""
    if not path:
        return new
    if isinstance(value, tuple):
        return tuple(put(list(value), path, new))
    changed = copy.copy(value)
    changed[path[0]] = put(value[path[0]], path[1:], new)
    return changed


def drop(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the state without one key."""
    parent = at(value, path[:-1])
    return put(value, path[:-1], {key: item for key, item in parent.items() if key != path[-1]})


def alter(value: Any) -> list[Any]:
    """Return values that are similar to a value but not equal."""
    if isinstance(value, torch.Tensor) and value.numel():
        changed = value.clone()
        changed.view(torch.uint8)[0] ^= 1
        return [changed, value.to(torch.float32), value.reshape(-1, 1), value.numpy()]
    if isinstance(value, np.ndarray) and value.size:
        return [torch.from_numpy(value), value[:-1], value.view(np.int64)]
    if isinstance(value, bool):
        return [not value, int(value), str(value)]
    if isinstance(value, int):
        return [value + 1, float(value), -value - 1]
    if isinstance(value, float):
        return [str(value), float(np.nextafter(value, 7.0)) if value != 7.0 else -value]
    if isinstance(value, list):
        return [tuple(value), [*value, None]]
    if isinstance(value, tuple):
        return [list(value), (*value, None)]
    if isinstance(value, dict):
        return [{**value, "new": None}, list(value.items())]
    return [0, {"$tensor": "a"}, [value]]


@given(states)
def test_equal_states_have_no_differences(value: Any) -> None:
    payload = state.to_payload(value)
    assert differences(payload, state.to_payload(copy.deepcopy(value))) == []
    read = deserialize([bytearray(b"".join(map(bytes, serialize(payload))))])
    assert differences(read, payload) == differences(payload, read) == []


@given(states, st.data())
def test_only_the_changed_value_is_named(value: Any, data: st.DataObject) -> None:
    known = list(places(value))
    assume(known)
    path = data.draw(st.sampled_from(known))
    old, new = at(value, path), data.draw(st.sampled_from(alter(at(value, path))))
    assume(not (isinstance(old, float) and isinstance(new, float) and np.isnan(old)))
    name = ".".join(map(str, path))
    if isinstance(old, dict) and isinstance(new, dict):
        name += ".new"  # the old one lacks it
    changed = put(value, path, new)
    assert named(value, changed) == named(changed, value) == [name]


@given(states, st.data())
def test_a_missing_key_is_named(value: Any, data: st.DataObject) -> None:
    dicts = [path for path in places(value) if isinstance(at(value, path[:-1]), dict)]
    known = [path for path in dicts if isinstance(path[-1], str) or len(at(value, path[:-1])) > 1]  # {} has no numbers
    assume(known)
    path = data.draw(st.sampled_from(known))
    changed = drop(value, path)
    assert named(value, changed) == named(changed, value) == [".".join(map(str, path))]


def test_several_differences_are_sorted_and_begin_with_their_component() -> None:
    one = {"rng": [{"torch": torch.zeros(2)}], "model": {"0.weight": torch.zeros(2, 2)}, "progress": {"step": 1}}
    other = {"rng": [{"torch": torch.ones(2)}], "model": {"0.weight": torch.ones(2, 2)}, "progress": {"step": 2}}
    assert named(one, other) == ["model.0.weight", "progress.step", "rng.0.torch"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))),
        (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.zeros(0), torch.zeros(0, 2)),
        (torch.zeros(1), torch.zeros(())),
        (0.0, -0.0),
        (1, True),
        (2**60, float(2**60)),
        (b"1", "1"),
        (float("nan"), float("inf")),
        ({}, []),
    ],
)
def test_values_that_python_treats_alike_differ(one: Any, other: Any) -> None:
    assert named({"a": [one]}, {"a": [other]}) == ["a.0"]
    assert named({"a": [one]}, {"a": [one]}) == []


def test_nan_equals_itself() -> None:
    assert (
        named({"a": float("nan"), "b": torch.tensor([torch.nan])}, {"a": float("nan"), "b": torch.tensor([torch.nan])})
        == []
    )


def test_a_difference_of_the_whole_tree_is_called_everything() -> None:
    assert differences(Payload({}, 1), Payload({}, 2)) == ["(everything)"]


@pytest.mark.parametrize(("one", "other"), [({1: 0.5, "1": 2}, {1: 0.25, "1": 2}), ({1: 0, 2: 1}, {"1": 0, 2: 1})])
def test_keys_of_different_types_are_different_keys(one: Any, other: Any) -> None:
    assert "a.1" in differences(state.to_payload({"a": one}), state.to_payload({"a": other}))


def test_a_tensor_that_is_no_longer_tied_differs() -> None:
    weight = torch.ones(2)
    tied, untied = ({"a": weight, "b": other} for other in (weight, weight.clone()))
    assert differences(state.to_payload(tied), state.to_payload(untied)) == ["b"]


@pytest.mark.parametrize(
    ("shown", "said"), [(1, "a and 2 more"), (2, "a, b and 1 more"), (3, "a, b, c"), (4, "a, b, c")]
)
def test_shorten_shows_some_names_and_counts_the_others(shown: int, said: str) -> None:
    assert shorten(["a", "b", "c"], shown) == said

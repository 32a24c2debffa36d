"""Equal batches have equal digests, whatever their device, and different batches have different digests."""

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.data import Batches, Order, Share, combine, digest_content
from holdfast.proof.differing import find_difference

LARGE = 2**19 + 8 * 1024 + 5


def name_first(data: Any) -> str:
    """Return the name of the first micro-batch of map-style data."""
    batches = Batches(data, None, Order(len(data), 4, 1, 1), [Share(4)], 1, 1, 0)
    batches.begin(0, 1)
    return next(batches)[0]


def test_equal_indices_of_other_data_have_another_digest() -> None:
    data = [torch.full((8,), float(number)) for number in range(8)]
    name = name_first(data)
    changed = [each.clone() for each in data]
    for each in changed:
        each[3] += 1e-6
    assert name_first([each.clone() for each in data]) == name
    indices, content = zip(name.split("-"), name_first(changed).split("-"), strict=True)
    assert indices[0] == indices[1]
    assert content[0] != content[1]


@pytest.mark.parametrize("size", [16, LARGE])
@pytest.mark.parametrize("place", [0, 0.3, 1])
def test_each_byte_changes_the_digest(size: int, place: float) -> None:
    batch = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    changed = batch.clone()
    changed[int((size - 1) * place)] ^= 1
    assert digest_content(batch) == digest_content(batch.clone())
    assert digest_content(batch) != digest_content(changed)


def test_order_changes_the_digest_of_large_batches() -> None:
    batch = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    for dim in (0, 1):
        assert digest_content(batch) != digest_content(batch.flip(dim))
    assert digest_content(batch) == digest_content(batch.t().contiguous().t())


def test_a_batch_may_hold_any_values() -> None:
    tensor, array = torch.arange(4.0), np.arange(3000)
    changed = array.copy()
    changed[1500] = 0  # which NumPy doesn't print
    assert digest_content({"x": array}) != digest_content({"x": changed})
    assert digest_content(collections.UserDict(x=tensor)) == digest_content({"x": tensor})
    assert digest_content(SimpleNamespace(x=tensor)) == digest_content(SimpleNamespace(x=tensor.clone()))
    assert digest_content(SimpleNamespace(x=tensor)) != digest_content(SimpleNamespace(x=tensor + 1))
    assert digest_content(np.array(["a", "b"])) != digest_content(np.array(["a", "c"]))
    assert digest_content(tensor.to_sparse()) == digest_content(tensor)
    own = SimpleNamespace(x=1)
    own.own = own
    assert digest_content(own) == digest_content(own)


class Slotted:
    __slots__ = ("points",)

    def __init__(self, points: torch.Tensor) -> None:
        self.points = points


def test_an_object_with_slots_counts_by_its_values() -> None:
    """Its repr has its address, which differs in each process."""
    one, same, other = (Slotted(torch.full((3,), value)) for value in (1.0, 1.0, 2.0))
    assert digest_content([one]) == digest_content([same]) != digest_content([other])


def test_the_combined_name_of_micro_batches_has_the_same_parts() -> None:
    assert combine(["a-b"]) == "a-b"
    indices, content = combine(["a-b", "c-d"]).split("-")
    assert indices == combine(["a", "c"])
    assert combine(["a-b", "c-e"]) == f"{indices}-{combine(['b', 'e'])}"
    assert content != combine(["b", "e"])


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [("a-b", "a-b", False), ("a-b", "a-c", True), ("a-b", "c-b", True), ("a", "a-b", False), ("a", "c-b", True)],
)
def test_trails_of_an_older_version_are_compared_by_their_indices(one: str, other: str, differs: bool) -> None:
    found = find_difference(([{"step": 1, "samples": one}], [{"step": 1, "samples": other}]))
    assert bool(found) == differs

"""Sharding in one process: the blocks, the regions, who owns a part, and what can't be sharded."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._subclasses import FakeTensorMode

from holdfast.checkpoint import assign_owners, list_batches
from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.state.shards import Region, cut_boxes
from holdfast.training import Training
from holdfast.training.sharded.exchange import Exchange, Link
from holdfast.training.sharded.extents import Move
from holdfast.training.sharded.model import list_blocks, materialize
from tests.support.sharded import Blocks
from tests.support.trainings import train_to


def make_config(folder: Path, recipe: str = "sharded:averaged", **compute: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.{recipe}", run="r", store=str(folder), epochs=1,
        determinism=Determinism(mode="fast"), compute=Compute(device="cpu", parallel="fsdp", **compute),
    )  # fmt: skip


def test_blocks_are_the_items_of_module_lists_inner_ones_first() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Blocks(), nn.Tanh()])
            self.grouped = nn.ModuleList([nn.ModuleList([nn.Linear(1, 1)])])

    model = Nested()
    inner: Any = model.layers[0]
    found = list(list_blocks(model))
    assert {*map(id, found[:-1])} == {id(inner), *map(id, inner.blocks), id(model.grouped[0][0])}
    assert found[-1] is model
    places = {id(block): place for place, block in enumerate(found)}
    assert all(places[id(block)] < places[id(inner)] for block in inner.blocks)


def test_blocks_without_a_module_list_are_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert list(list_blocks(model)) == [model]


@pytest.mark.parametrize(
    ("recipe", "changes", "said"),
    [
        ("sharded:averaged", {"mixed_precision": "fp16"}, "fp16"),
        ("composed:adversarial", {}, "a model with Recipe"),
    ],
)
def test_what_cannot_be_sharded_is_refused(tmp_path: Path, recipe: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        Training(make_config(tmp_path, recipe, **changes))
    assert found.value.hint


def test_one_rank_is_not_sharded(tmp_path: Path) -> None:
    training = Training(make_config(tmp_path))
    assert all(type(each) is nn.Parameter for each in training.model.parameters())


def test_a_model_on_the_meta_device_gets_memory_and_keeps_its_ties(tmp_path: Path) -> None:
    config = make_config(tmp_path).model_copy(update={"settings": {"device": "meta"}})
    training = Training(config)
    model = training.recipe.model
    assert model.get_parameter("tied.weight") is model.get_parameter("first.weight")
    stepped = [each for group in training.optimizer.param_groups for each in group["params"]]
    assert {*map(id, stepped)} == {*map(id, model.parameters())}
    assert not model.get_parameter("frozen").requires_grad
    before = model.get_parameter("first.weight").clone()
    train_to(training, 1)
    assert not torch.equal(before, model.get_parameter("first.weight"))
    assert torch.equal(model.get_buffer("blocks.0.1.num_batches_tracked"), torch.tensor(2))


def test_a_module_that_cannot_set_its_first_values_is_named() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(RecipeError, match=r"the model's 1 \(.*Own\).*no reset_parameters"):
        materialize(nn.Sequential(nn.Linear(1, 1), Own()), torch.device("cpu"), {})


def test_the_fingerprint_has_the_sharding_only_if_there_is_one(tmp_path: Path) -> None:
    assert make_config(tmp_path).identity["compute"] == {"ranks": 1, "mixed_precision": "no", "parallel": "fsdp"}
    assert Compute().identity == {"ranks": 1, "mixed_precision": "no"}
    virtual = [Compute(virtual_ranks=8, parallel=parallel, ranks=3).identity for parallel in ("ddp", "fsdp")]
    assert virtual == [{"virtual_ranks": 8, "mixed_precision": "no"}] * 2, "which change no bit with virtual ranks"


def test_parts_are_dealt_by_their_bytes_and_the_main_rank_has_the_first() -> None:
    assert assign_owners([1, 5, 5, 4, 1], 3) == [0, 1, 2, 0, 0]
    assert assign_owners([9], 4) == [0]
    assert assign_owners([], 2) == []
    loads = [0] * 3
    for size, owner in zip(sizes := [7] * 16, assign_owners(sizes, 3), strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= 7


def test_a_batch_has_so_many_parts_of_each_owner() -> None:
    owners = dict(zip("abcde", [0, 1, 0, 0, 1], strict=True))
    assert list(list_batches(owners, 1)) == [["a", "b"], ["c", "e"], ["d"]]
    assert list(list_batches(owners, 2)) == [["a", "c", "b", "e"], ["d"]]
    assert list(list_batches({}, 2)) == []


def test_regions_meet_in_a_box_of_the_tensor() -> None:
    tensor = torch.arange(60).view(5, 4, 3)
    one, other = Region((1, 0, 1), (3, 4, 2)), Region((2, 2, 0), (3, 2, 2))
    common = one.intersect(other)
    assert common == Region((2, 2, 1), (2, 2, 1))
    assert torch.equal(tensor[1:4, :, 1:][common.within(one)], tensor[2:4, 2:, 1:2])
    assert Region((0,), (2,)).intersect(Region((3,), (1,))).size == 0
    assert Region((), ()).size == 1


@pytest.mark.parametrize("shape", [(13,), (5, 4), (3, 2, 5), (2, 1, 3, 4)])
def test_boxes_have_the_elements_between_two_positions_in_their_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    whole = Region((0,) * len(shape), shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        boxes = [tensor[box.within(whole)].flatten() for box in cut_boxes(shape, start, stop)]
        assert torch.cat([torch.empty(0), *boxes]).tolist() == list(range(start, stop))


def test_tensors_of_the_gpu_and_of_the_host_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's step is in the host's memory, and NCCL sends none of it."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "P2POp", lambda send, tensor, target, group: sent.append(tensor))
    monkeypatch.setattr(distributed, "batch_isend_irecv", lambda orders: [])
    exchange = object.__new__(Exchange)
    exchange.rank, link = 0, Link(None, torch.device("cuda:0"))
    with FakeTensorMode():  # which checks devices without having them
        read = [torch.ones(5, dtype=torch.uint8, device="cuda:0"), torch.ones(4, dtype=torch.uint8)]
        exchange.copy((Move(0, 1, each.nbytes, each, None) for each in read), link)
        assert [(each.device, each.nbytes) for each in sent] == [(link.device, 9)]

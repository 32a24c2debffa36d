"""Checks that several ranks make together of what virtual ranks compute from tensors that are cut over the ranks.

Each check is a function that returns 0, for `in_ranks`.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from holdfast import Recipe
from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.extensions.virtual_ranks.norm import clip_to, take_norm
from holdfast.state import gather_whole
from holdfast.state.checksum import checksum, checksum_together, count_by_place
from holdfast.training import Training
from holdfast.training.devices import prepare_device
from holdfast.training.loop import train_step
from tests.support import shares
from tests.support.device import DEVICE
from tests.support.sharded import launch_checks
from tests.support.trainings import train_to

SHAPES = [(31, 8), (31,), (1,), (5, 3, 7), (300, 70), (2, 9000), (64, 64)]


def in_ranks(count: int, function: str, *arguments: Any) -> int:
    """Call a function of this module in several ranks; return 0 if it has returned 0 in all of them."""
    return launch_checks(globals()[function], count, *arguments)


def make_config(
    folder: str,
    recipe: str = f"{__name__}:odd",
    parallel: str = "fsdp",
    **settings: str,
) -> RunConfig:
    """Return the configuration of a training with eight virtual ranks."""
    ranks = {"ranks": int(os.environ["WORLD_SIZE"]), "virtual_ranks": 8}
    compute = Compute.model_validate(ranks | {"device": DEVICE, "parallel": parallel})
    return RunConfig(
        recipe=recipe, settings=settings, run="r", store=folder, epochs=9, compute=compute,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


class Odd(nn.Module):
    """A model that uses its blocks in a way that the ranks can't sum in order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.blocks = nn.ModuleList([nn.Embedding(8, 8, sparse=how == "sparse"), nn.Linear(8, 1)])

    def forward(self, points: Tensor) -> Tensor:
        """Return a number for each point; shape (n, 1)."""
        self.calls += 1
        found = points if self.how == "skips" and self.calls > 1 else self.blocks[0](points.argmax(1))
        out: Tensor = self.blocks[1](found)
        return out


def odd(how: str = "") -> Recipe:
    """Build the model with its data; ``how`` is empty or one of ``skips``, ``sparse`` and ``rows``."""
    model = Odd(how)
    recipe = shares.plain()
    recipe.model = model
    recipe.optimizer = (torch.optim.Adafactor if how == "rows" else torch.optim.AdamW)(model.parameters())
    return recipe


def compare_with_whole_tensors(folder: str) -> int:
    """Take norms and checksums of tensors that are cut and of the same ones whole: they have the same bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    device = prepare_device(make_config(folder)).device
    mesh = init_device_mesh(DEVICE, (distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = [(torch.randn(shape, generator=generator) ** 9).to(device, dtype) for shape in SHAPES]
        cut: Any = [distribute_tensor(each, mesh, [Shard(0)]) for each in whole]
        assert checksum(cut) == checksum(whole)
        assert checksum_together(cut) == checksum_together(whole)
        mixed = [each if number % 2 else whole[number] for number, each in enumerate(cut)]
        assert checksum_together(mixed) == checksum_together(whole)
        assert checksum(cut[::-1]) != checksum(whole)
        norm = take_norm(whole)
        assert torch.equal(take_norm(cut), norm)
        torch.testing.assert_close(norm.double(), torch.nn.utils.get_total_norm([each.double() for each in whole]))
        for gradients in (whole, cut):
            clip_to(gradients, 0.5, norm)
        assert all(torch.equal(each.full_tensor(), other) for each, other in zip(cut, whole, strict=True))
    return 0


def compare_in_other_layouts(folder: str) -> int:
    """Take checksums and norms of tensors that are replicated, or whose rows are cut: each number counts once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    device, ranks = prepare_device(make_config(folder)).device, distributed.get_world_size()
    count_by_place(True)  # a training in the process that was forked may have chosen the other one
    generator = torch.Generator().manual_seed(1)
    meshes = [init_device_mesh(DEVICE, (ranks, 1)), init_device_mesh(DEVICE, (1, ranks))]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        whole = [(torch.randn(shape, generator=generator) ** 9).to(device, dtype) for shape in SHAPES]
        exact = torch.nn.utils.get_total_norm([each.double() for each in whole])
        for mesh in meshes:
            for last in (Shard(1), Replicate()):
                cut: Any = [
                    distribute_tensor(each, mesh, [Shard(0), last if each.dim() > 1 else Replicate()]) for each in whole
                ]
                assert checksum(cut) == checksum(whole)
                assert checksum_together(cut) == checksum_together(whole)
                torch.testing.assert_close(take_norm(cut).double(), exact, rtol=1e-5, atol=0)
                if last == Replicate():
                    assert torch.equal(take_norm(cut), take_norm(whole))
    return 0


def keep_earlier_checksums(folder: str) -> int:
    """Take the checksums that versions before virtual ranks on meshes took of tensors cut within their rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    device = prepare_device(make_config(folder)).device
    mesh = init_device_mesh(DEVICE, (distributed.get_world_size(),))
    whole = [torch.arange(6 * 4096.0, dtype=torch.float64).view(6, 4096), torch.arange(30.0).view(3, 10)]
    cut: Any = [distribute_tensor(each.to(device), mesh, [Shard(1)]) for each in whole]
    count_by_place(False)
    assert checksum(cut) == [7304838595595141120, 12522424700172763256]
    assert checksum_together(cut) == 8118378753050218120
    count_by_place(True)
    assert checksum(cut) == checksum(whole)
    return 0


def keep_rows_alone(folder: str) -> int:
    """Train a step: between its rounds a rank keeps sums of its own rows, as few as a binary counter has ones."""
    training = Training(make_config(folder))
    virtual: Any = training.ranks
    sums = virtual.sums
    add, ranks = sums.add, distributed.get_world_size()

    def look(turn: Any) -> None:
        add(turn)
        done = min(sums._turn * ranks, 8)
        for block in sums._blocks:
            parts = block.tree.parts.values()
            assert all(each.untyped_storage().nbytes() == each.nbytes for each in parts), "the rest is other ranks'"
            assert len(parts) == (done.bit_count() if done < 8 else 0)

    sums.add = look
    train_step(training)
    assert sums._turn == -(-8 // ranks)
    return 0


def doubled() -> Recipe:
    """Build a recipe whose model is in float64."""
    recipe = shares.plain()
    model = recipe.model.double()
    recipe.loss = lambda model, batch: F.mse_loss(model(batch[0].double()), batch[1].double())
    recipe.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return recipe


def train_in_float64(folder: str) -> int:
    """Train two steps of a model in float64, whole and cut over the ranks, to the same bits."""
    found = []
    for parallel in ("ddp", "fsdp"):
        training = Training(make_config(folder, f"{__name__}:doubled", parallel))
        train_to(training, 2)
        found.append([gather_whole(each).clone() for each in training.recipe.model.parameters()])
    assert all(map(torch.equal, *found))
    return 0


def refuse(folder: str, how: str, said: str) -> int:
    """Train a step that can't be summed in order, or build what can't be cut: all ranks raise."""
    with pytest.raises((ConfigError, RecipeError), match=said) as found:
        train_step(Training(make_config(folder, how=how)))
    assert found.value.hint
    return 0

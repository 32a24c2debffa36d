"""Loops with an `Accelerator` of their own, whose FSDP2 plugin shards the model."""

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast import Run
from tests.support.meshed import BATCH, Net, find_loss, make_data


def make_accelerator(how: str, **options: Any) -> Any:
    """Return an accelerator with a plugin, as a script would make it.

    Args:
        how: what is special about the plugin.
        options: further arguments of the accelerator.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    chosen: dict[str, dict[str, Any]] = {
        "first version": {"fsdp_version": 1},
        "offloads": {"cpu_offload": True},
        "loads on one rank": {"cpu_ram_efficient_loading": True},
        "checkpoints": {"activation_checkpointing": True},
        "keeps whole": {"reshard_after_forward": False},
        "ignores": {"ignored_modules": "head"},
    }
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(**({"fsdp_version": 2} | blocks | chosen.get(how, {})))
    return Accelerator(fsdp_plugin=plugin, **options)


def train(run: Run, how: str = "", accumulated: int = 1, is_checked: bool = False) -> None:
    """Train a `Net`, and evaluate it in every second step.

    Args:
        how: see `make_accelerator`.
        accumulated: the steps whose gradients are accumulated.
        is_checked: whether to look at the shards.
    """
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulated} if accumulated > 1 else {}
    accelerator = make_accelerator(how, **options)
    torch.manual_seed(3)
    plain = Net()
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
    loader: Any = DataLoader(make_data(), BATCH // 2, shuffle=True)
    model: Any
    model, optimizer, scheduler, loader = accelerator.prepare(plain, optimizer, scheduler, loader)
    if is_checked:
        local: Any = model.blocks[0].up.weight
        assert local.shape == (32, 8)
        assert local.to_local().shape == (32 // run.world_size, 8)
    points = make_data().tensors[0]
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in run.steps(loader):
        batch = step.batch
        with accelerator.accumulate(model):
            loss = find_loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                step.log(grad_norm=accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        numbers = {"loss": loss.detach()}
        if step.number % 2:  # which leaves the outermost module whole, unless somebody shards it again
            model.eval()
            with torch.no_grad():
                numbers["spread"] = model(points).std()
            model.train()
        step.log(**numbers)


def wrapped(run: Run) -> None:
    """Let the run wrap a model, and make an accelerator with a plugin before."""
    make_accelerator("")
    run.wrap(Net())


def meshed(run: Run) -> None:
    """Make an accelerator with a mesh of its own."""
    from accelerate.utils import ParallelismConfig

    make_accelerator("", parallelism_config=ParallelismConfig(dp_shard_size=2))


def ignored(run: Run) -> None:
    """Go on as after ``Accelerator(megatron_lm_plugin=...)``, which needs Megatron-LM."""
    os.environ["ACCELERATE_USE_MEGATRON_LM"] = "true"
    run.keep(model=Net())
    for _ in run.steps(per_epoch=2):
        raise AssertionError("a step begins")


def forgotten(run: Run) -> None:
    """Train a part of the model that the accelerator didn't prepare."""
    accelerator = make_accelerator("")
    model: Any = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    model.head = nn.Linear(8, 2)
    optimizer.add_param_group({"params": [*model.head.parameters()]})
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=2):
        raise AssertionError("a step begins")

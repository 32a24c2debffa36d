"""Loops that use streams and copies as GPU programs do; on a CPU they compute the same numbers without them."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from holdfast import Run
from tests.support.loops import learn, samples

PER_EPOCH = 4


class Streams:
    """A side stream of the run's device; on a CPU, nothing."""

    def __init__(self, device: torch.device) -> None:
        self.backend: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.side = self.backend and self.backend.Stream()

    def on_side(self) -> contextlib.AbstractContextManager[None]:
        """Queue the block's operations to the side stream."""
        return self.backend.stream(self.side) if self.backend else contextlib.nullcontext()

    def fork(self) -> None:
        """Let the side stream wait for the current stream."""
        if self.backend:
            self.side.wait_stream(self.backend.current_stream())

    def mark(self) -> Callable[[], object]:
        """Return a function that waits for what the side stream has in its queue now."""
        return self.side.record_event().synchronize if self.backend else lambda: None

    def join(self, *tensors: Tensor) -> None:
        """Let the current stream wait for the side stream, whose tensors it uses from now on."""
        if self.backend:
            self.backend.current_stream().wait_stream(self.side)
        for each in tensors if self.backend else ():
            each.record_stream(self.backend.current_stream())


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 1))


def draws(run: Run) -> None:
    """Draw noise on the device, and batches from a kept generator."""
    model, generator = net().to(run.device), torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, generator=generator)
    for step in run.steps(per_epoch=PER_EPOCH):
        x = torch.randn(5, 4, generator=generator).to(run.device)
        noise = torch.randn(5, 4, device=run.device) * torch.rand(()).item()
        step.log(loss=learn(model, optimizer, x + 0.1 * noise, x.sum(1, keepdim=True)))


def draws_there(run: Run) -> None:
    """Draw batches from a kept generator of the run's device."""
    model, generator = net().to(run.device), torch.Generator(run.device).manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, generator=generator)
    for step in run.steps(per_epoch=PER_EPOCH):
        x = torch.randn(5, 4, generator=generator, device=run.device)
        step.log(loss=learn(model, optimizer, x, x.sum(1, keepdim=True)))


def steps_beside(run: Run) -> None:
    """Train whole steps, with the backward pass, in a side stream."""
    model = net().to(run.device)
    streams, optimizer = Streams(run.device), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(samples(16), 4, shuffle=True)):
        streams.fork()
        with streams.on_side():
            step.log(loss=learn(model, optimizer, *step.batch))
        streams.join()


def graphed(run: Run) -> None:
    """Train a compiled model: on a GPU its kernels are recorded in CUDA graphs."""
    model = net().to(run.device)
    has_graphs = run.device.type == "cuda"
    compute: Any = torch.compile(model, mode="reduce-overhead") if has_graphs else torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(samples(16), 4, shuffle=True)):
        step.log(loss=learn(compute, optimizer, *step.batch))


def averages_in_the_step(run: Run) -> None:
    """Average the weights in the stream that trains."""
    model = net().to(run.device)
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.keep(model=model, average=average, optimizer=optimizer)
    for step in run.steps(DataLoader(samples(16), 4, shuffle=True)):
        step.log(loss=learn(model, optimizer, *step.batch))
        average.update_parameters(model)


def averages_beside(run: Run) -> None:
    """Average the weights in a side stream, for which only the next step's weights wait."""
    model = net().to(run.device)
    streams, optimizer = Streams(run.device), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = [each.detach().clone() for each in model.parameters()]
    run.keep(model=model, average=average, optimizer=optimizer)
    for step in run.steps(DataLoader(samples(16), 4, shuffle=True)):
        streams.join()
        step.log(loss=learn(model, optimizer, *step.batch))
        streams.fork()
        with streams.on_side():
            for mean, each in zip(average, model.parameters(), strict=True):
                mean.lerp_(each.detach(), 0.1)


def copies_out(run: Run) -> None:
    """Copy weights in a side stream into kept memory of the host, which the next step reads."""
    model, host = net().to(run.device), torch.zeros(8, 4)
    streams, optimizer = Streams(run.device), torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, host=[host])
    for step in run.steps(DataLoader(samples(16), 4, shuffle=True)):
        streams.mark()()
        x, y = step.batch
        step.log(loss=learn(model, optimizer, x + 0.1 * host.mean().item(), y))
        streams.fork()
        with streams.on_side():
            host.copy_(model[0].weight.detach(), non_blocking=True)


def trains_beside(run: Run) -> None:
    """Train in a side stream, and log nothing, so that the host doesn't wait."""
    streams, generator = Streams(run.device), torch.Generator().manual_seed(3)
    weights = [torch.ones(size, device=run.device) for size in (3, 600)]
    run.keep(weights=weights, generator=generator)
    streams.fork()
    with streams.on_side():
        for _ in run.steps(per_epoch=PER_EPOCH):
            for each in weights:
                each.mul_(0.9).add_(torch.randn(each.shape, generator=generator).to(run.device))


def prefetches(run: Run) -> None:
    """Copy batches to the device in a side stream, from two buffers of the host by turns."""
    model, generator = net().to(run.device), torch.Generator().manual_seed(5)
    streams, optimizer = Streams(run.device), torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, generator=generator)
    buffers, waits = [torch.empty(4, 4) for _ in range(2)], [streams.mark()] * 2
    for number, step in enumerate(run.steps(per_epoch=PER_EPOCH)):
        waits[number % 2]()
        buffer = buffers[number % 2].normal_(generator=generator)
        with streams.on_side():
            x = buffer.to(run.device, non_blocking=True, copy=True)
        waits[number % 2] = streams.mark()
        streams.join(x)
        loss = learn(model, optimizer, x, x.sum(1, keepdim=True))
        del x
        step.log(loss=loss.item())


def reuses_a_buffer(run: Run) -> None:
    """Fill the host's buffer again before its copy to the device is done. A GPU would train on a mixture."""
    model, buffer = net().to(run.device), torch.zeros(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer, buffer=[buffer])
    for step in run.steps(per_epoch=PER_EPOCH):
        buffer.copy_(torch.randn(4, 4))
        x = buffer.to(run.device, non_blocking=True, copy=True)
        buffer.zero_()
        step.log(loss=learn(model, optimizer, x, x.sum(1, keepdim=True)))


def frees_too_early(run: Run) -> None:
    """Free a tensor that a side stream still reads, without ``record_stream``."""
    model = net().to(run.device)
    streams, optimizer = Streams(run.device), torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(4, 4, device=run.device)
    run.keep(model=model, optimizer=optimizer, total=[total])
    for step in run.steps(per_epoch=PER_EPOCH):
        x = torch.randn(4, 4).to(run.device)
        streams.fork()
        with streams.on_side():
            total.add_(x)
        del x  # the next tensor of this size gets its memory
        y = torch.randn(4, 4).to(run.device)
        step.log(loss=learn(model, optimizer, y, y.sum(1, keepdim=True)), norm=y.norm().item())
        streams.join()

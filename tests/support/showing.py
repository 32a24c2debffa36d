"""A recipe and loops that show texts and pictures."""

import struct
import zlib
from typing import Any

import torch
from torch import nn

from holdfast import Recipe, Run

PICTURE = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'
PER_EPOCH = 4


def png() -> bytes:
    """Return a PNG of one black pixel."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(2))),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def painted(shows: bool = True) -> Recipe:
    """Show a random number, a PNG and an SVG at the end of each epoch of two steps."""
    model = nn.Linear(1, 1)

    def evaluate(model: nn.Module) -> dict[str, Any]:
        drawn = {"noise": f"{torch.rand(1).item()}", "picture": png(), "plot": PICTURE} if shows else {}
        return {"weight": next(model.parameters()).sum(), **drawn}

    return Recipe(
        model=model, data=[torch.ones(1)] * 4, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=2,
        loss=lambda model, batch: (model(batch) + torch.rand(1)).square().mean(), evaluate=evaluate,
    )  # fmt: skip


def epochs(run: Run) -> None:
    """Show and log in steps, and in the code at an epoch's beginning and at its end."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(per_epoch=PER_EPOCH):
        run.show(beginning=f"epoch {epoch}")
        run.log(begun=epoch)
        for step in run.steps():
            loss = model(torch.rand(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
            if step.number % 2:
                step.show(weight=f"{step.number} {model.weight.item()}")
        if epoch < 2:
            run.show(end=f"epoch {epoch} {model.weight.item()}")


def careless(run: Run) -> None:
    """Show bytes that are no picture."""
    model = nn.Linear(1, 1)
    run.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(per_epoch=1):
        step.show(picture=b"no picture")

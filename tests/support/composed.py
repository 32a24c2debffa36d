"""Recipes with several optimizers, steps of their own, batches as data, and modules among the extras."""

from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast import Recipe, Schedule
from tests.support.varied import SAMPLES, Points

Batch = tuple[Tensor, Tensor]
BATCH_SIZE = 8
PER_EPOCH = SAMPLES // BATCH_SIZE


def adversarial(lr: float = 0.01, rate: float = 0.1, how: str = "", epochs: int = 3) -> Recipe:
    """Build a generator and a critic, each with an optimizer, and a step that trains one after the other."""
    model = nn.ModuleDict({
        "generator": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)),
        "critic": nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)),
    })  # fmt: skip
    generator, critic = model["generator"], model["critic"]
    ours = torch.optim.Adam(generator.parameters(), lr=lr)
    theirs = torch.optim.SGD(critic.parameters(), lr=rate, momentum=0.9)

    def step(batch: Batch) -> Any:
        real, _ = batch
        fake = generator(torch.randn_like(real))
        critic_loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        theirs.zero_grad()
        critic_loss.backward()
        theirs.step()
        loss = F.softplus(-critic(fake)).mean()
        ours.zero_grad()
        loss.backward()
        ours.step()
        if how == "nothing":
            return None
        return {"loss": torch.ones(2) if how == "vector" else loss, "critic_loss": critic_loss}

    return Recipe(
        model=model, data=Points(noise=True), optimizer={"theirs": theirs, "ours": ours}, step=step,
        batch_size=BATCH_SIZE, schedule={"ours": Schedule("linear", epochs=epochs), "theirs": StepLR(theirs, 4, 0.5)},
        evaluate=lambda model: {"size": model["generator"](torch.ones(1, 8)).sum()},
    )  # fmt: skip


def accumulating() -> Recipe:
    """Build a step that leaves its gradient for the next one, two times of three."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    count = {"steps": 0}

    class Count:
        def state_dict(self) -> dict[str, int]:
            return dict(count)

        def load_state_dict(self, state: dict[str, int]) -> None:
            count.update(state)

    def step(batch: Batch) -> Tensor:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        count["steps"] += 1
        if count["steps"] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Recipe(
        model=model, data=Points(noise=False), optimizer=optimizer, step=step, batch_size=BATCH_SIZE,
        extras={"count": Count()},
    )  # fmt: skip


def two_rates(body: float = 0.01, head: float = 0.1, epochs: int = 3) -> Recipe:
    """Build one loss with an optimizer for the body and one for the head."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizers = {
        "head": torch.optim.SGD(model[2].parameters(), lr=head, momentum=0.9),
        "body": torch.optim.AdamW(model[0].parameters(), lr=body),
    }
    return Recipe(
        model=model, data=Points(noise=True), optimizer=optimizers, loss=fit, batch_size=BATCH_SIZE // 2, grad_accum=2,
        clip_norm=1.0, schedule={"body": Schedule("cosine", epochs=epochs)},
    )  # fmt: skip


def pruned() -> Recipe:
    """Build a network whose step first takes some of its weights away."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    for layer in model:
        prune.identity(layer, "weight")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(batch: Batch) -> Tensor:
        prune.l1_unstructured(model[0], "weight", 0.05)
        loss = fit(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return Recipe(model=model, data=Points(noise=True), optimizer=optimizer, step=step, batch_size=BATCH_SIZE)


def two_sgds(is_one: bool = False) -> Recipe:
    """Build the same rule for two layers, as two optimizers or as one with two groups."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1].parameters(), "lr": 0.1}]
    optimizer: Any = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    if not is_one:
        optimizer = {
            "a": torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9),
            "b": torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        }
    data = Points(noise=False)
    return Recipe(model=model, data=data, optimizer=optimizer, loss=fit, batch_size=BATCH_SIZE, clip_norm=0.5)


def fit(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def batched(how: str = "shuffled") -> Recipe:
    """Build a recipe whose data gives batches."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    points = Points(noise=how != "stateful")
    loaders: dict[str, Any] = {
        "shuffled": lambda: DataLoader(points, BATCH_SIZE, shuffle=True),
        "own order": lambda: DataLoader(points, 5, shuffle=True, generator=torch.Generator().manual_seed(1)),
        "stateful": lambda: StatefulDataLoader(points, BATCH_SIZE, shuffle=True),
        "stream": Stream,
        "list": lambda: [points[0]],
    }
    is_stream = how == "stream"
    return Recipe(
        model=model, data=loaders[how](), optimizer=torch.optim.Adam(model.parameters(), lr=0.01), loss=fit,
        **({"batch_size": None} if how in ("stream", "list", "stateful") else {}),
        grad_accum=2 if how == "own order" else 1, steps_per_epoch=PER_EPOCH if is_stream else None,
    )  # fmt: skip


class Stream:
    """An iterable of batches that keeps its position."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        self.given += 1
        x = torch.full((BATCH_SIZE, 8), self.given / 100)
        return x, x[:, :1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Settings(BaseModel):
    """Settings of `validated`."""

    class Optimizer(BaseModel):
        lr: float = Field(0.01, gt=0, description="the learning rate")

    width: int = Field(4, ge=1, description="the size of the hidden layer")
    optimizer: Optimizer = Optimizer()


def validated(settings: Settings, device: torch.device) -> Recipe:
    """Build a recipe on the device, from a pydantic model."""
    assert isinstance(device, torch.device)
    model = nn.Sequential(nn.Linear(8, settings.width, device=device), nn.Linear(settings.width, 1, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.optimizer.lr)
    return Recipe(model=model, data=Points(noise=False), optimizer=optimizer, loss=fit, batch_size=BATCH_SIZE)


def criticized(synchronized: tuple[str, ...] = (), has_own: bool = False) -> Recipe:
    """Build a critic among the extras, with its statistics. It is stepped by the recipe's optimizer, or by its own."""
    model, critic = nn.Linear(8, 1), nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    theirs = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    extras: dict[str, Any] = {"critic": critic} | ({"theirs": theirs} if has_own else {})
    ours = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        if has_own and torch.is_grad_enabled() and model.training:
            theirs.zero_grad()
            F.mse_loss(critic(out.detach()), batch[1]).backward()
            theirs.step()
        return F.mse_loss(out, batch[1]) + (0 if has_own else F.mse_loss(critic(out), batch[1]))

    return Recipe(
        model=model, data=Points(noise=True), optimizer=ours if has_own else {"ours": ours, "theirs": theirs},
        loss=loss, batch_size=BATCH_SIZE, extras=extras, synchronized=synchronized,
        probe=lambda model: {"weight": next(model.parameters()).sum()},
    )  # fmt: skip

"""Ordinary recipes that register their state: `holdfast prove` has to prove each."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.checkpoint import checkpoint

from holdfast import Recipe
from tests.support.varied import Counted, Points

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": lambda groups: optim.Adadelta(groups),
    "Adafactor": lambda groups: optim.Adafactor(groups),
    "Adagrad": lambda groups: optim.Adagrad(groups),
    "Adam": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.01),
    "Adamax": lambda groups: optim.Adamax(groups),
    "ASGD": lambda groups: optim.ASGD(groups, t0=5),
    "Muon": lambda groups: optim.Muon(groups),
    "NAdam": lambda groups: optim.NAdam(groups),
    "RAdam": lambda groups: optim.RAdam(groups),
    "RMSprop": lambda groups: optim.RMSprop(groups, momentum=0.9, centered=True),
    "Rprop": lambda groups: optim.Rprop(groups),
    "SGD": lambda groups: optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "SparseAdam": lambda groups: optim.SparseAdam(groups),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "ChainedScheduler": lambda each: schedules.ChainedScheduler(
        [schedules.ConstantLR(each, 0.5, 4), schedules.ExponentialLR(each, 0.9)]
    ),
    "ConstantLR": lambda each: schedules.ConstantLR(each, 0.5, 7),
    "CosineAnnealingLR": lambda each: schedules.CosineAnnealingLR(each, 10),
    "CosineAnnealingWarmRestarts": lambda each: schedules.CosineAnnealingWarmRestarts(each, 4),
    "CyclicLR": lambda each: schedules.CyclicLR(each, 0.001, 0.01, step_size_up=4, cycle_momentum=False),
    "ExponentialLR": lambda each: schedules.ExponentialLR(each, 0.9),
    "LambdaLR": lambda each: schedules.LambdaLR(each, lambda step: 1 / (step + 1)),
    "MultiStepLR": lambda each: schedules.MultiStepLR(each, [3, 8]),
    "OneCycleLR": lambda each: schedules.OneCycleLR(each, 0.02, total_steps=40, cycle_momentum=False),
    "PolynomialLR": lambda each: schedules.PolynomialLR(each, 20),
    "ReduceLROnPlateau": lambda each: schedules.ReduceLROnPlateau(each, patience=0, threshold=0.9),
    "SequentialLR": lambda each: schedules.SequentialLR(
        each, [schedules.LinearLR(each, 0.1, total_iters=4), schedules.StepLR(each, 3)], milestones=[4]
    ),
}


def fit(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def make(model: nn.Module, **parts: Any) -> Recipe:
    groups = [each for each in model.parameters() if each.requires_grad]
    fields = {"data": Points(noise=False), "loss": fit, "batch_size": 8}
    return Recipe(**{"model": model, "optimizer": optim.AdamW(groups, 0.01), **fields, **parts})


class Bag(nn.Module):
    """A bag of words, whose embedding has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.words((x * 4).long() % 16).sum(1)


def trained(optimizer: str = "AdamW", scheduler: str = "LambdaLR") -> Recipe:
    """Build a recipe with one of torch's optimizers and one of torch's schedulers."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))
    if optimizer == "SparseAdam":
        model = Bag()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    return make(model, optimizer=chosen, schedule=[SCHEDULERS[scheduler](chosen)])


def tied() -> Recipe:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    model[2].weight = model[0].weight
    return make(model)


def normed() -> Recipe:
    """Build a recipe with weight norm, spectral norm and dropout, under gradient checkpointing."""
    first = nn.Sequential(weight_norm(nn.Linear(8, 6)), nn.Dropout(0.1), spectral_norm(nn.Linear(6, 6)))
    model = nn.ModuleDict({"first": first, "last": nn.Linear(6, 1)})

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        inner = checkpoint(model["first"], batch[0], use_reentrant=False)
        return F.mse_loss(model["last"](inner), batch[1])

    return make(model, loss=loss)


def lazy() -> Recipe:
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))
    model(torch.zeros(2, 8))
    return make(model)


def swa() -> Recipe:
    """Build a recipe with an average that begins with the second epoch and that each evaluation reads."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = optim.SGD(model.parameters(), 0.05)
    averaged = AveragedModel(model)
    steps = torch.zeros((), dtype=torch.long)
    averaged.register_buffer("steps", steps)

    def follow() -> None:
        averaged.steps += 1
        if averaged.steps > 6:
            averaged.update_parameters(model)

    return make(
        model, optimizer=optimizer, schedule=[SWALR(optimizer, 0.01, anneal_epochs=8)], after_step=follow,
        extras={"averaged": averaged}, evaluate=lambda model: {"mean": averaged(torch.ones(4, 8)).mean()},
    )  # fmt: skip


def target() -> Recipe:
    """Build a recipe with a registered target network."""
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    target = copy.deepcopy(model).requires_grad_(False)
    return make(
        model,
        extras={"target": target},
        loss=lambda model, batch: fit(model, batch) + 0.1 * (model(batch[0]) - target(batch[0])).square().mean(),
    )


class Adversary(nn.Module):
    """A generator and a critic; the loss has a penalty on the critic's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(8, 1)
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x)  # type: ignore[no-any-return]


def adversarial() -> Recipe:
    """Build a recipe whose loss steps the critic's own optimizer."""
    model = Adversary()
    critic_optimizer = optim.Adam(model.critic.parameters(), 0.01)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        if model.training:
            between = (0.5 * made.detach() + 0.5 * batch[1]).requires_grad_()
            (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
            judged = model.critic(made.detach()).mean() - model.critic(batch[1]).mean()
            critic_optimizer.zero_grad()
            (judged + (slope.norm(dim=1) - 1).square().mean()).backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        return -model.critic(made).mean()  # type: ignore[no-any-return]

    optimizer = optim.Adam(model.generator.parameters(), 0.01)
    return make(model, loss=loss, optimizer=optimizer, extras={"critic_optimizer": critic_optimizer})


def compiled() -> Recipe:
    model = torch.compile(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1)))
    return make(model)  # type: ignore[arg-type]


def streamed() -> Recipe:
    """Build a recipe of a stream that saves its position."""
    model = nn.Linear(8, 1)
    return make(
        model, data=Counted(), loss=lambda model, x: (model(x).squeeze() - x.sum(1)).square().mean(), batch_size=4,
        steps_per_epoch=6, probe=lambda model: {"output": model(torch.ones(2, 8))},
    )  # fmt: skip

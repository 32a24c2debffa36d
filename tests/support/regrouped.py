"""Programs whose steps change what an optimizer steps, what a module caches, or what a model is made of."""

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from holdfast import Recipe, Run

PER_EPOCH = 6


def net() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))


def learn(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Tensor:
    loss: Tensor = model(torch.randn(8, 4)).square().mean()
    for each in optimizers:
        each.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for each in optimizers:
        each.step()
    return loss


# ---- parameter groups


def adds_a_group(run: Run) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 4:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.01})
        learn(model, optimizer)


def adds_a_group_to_the_first_of_two(run: Run) -> None:
    model = net()
    first = torch.optim.Adam([model[0].weight], lr=0.05)
    groups: list[dict[str, Any]] = [{"params": [model[3].weight]}, {"params": [model[3].bias], "lr": 0.2}]
    second = torch.optim.SGD(groups, lr=0.1)
    run.keep(model=model, a=first, b=second)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 5:
            first.add_param_group({"params": [model[0].bias], "betas": (0.5, 0.9)})
        learn(model, first, second)


def appends_a_group(run: Run) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 4:
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight], "lr": 0.01})
        learn(model, optimizer)


def appends_a_parameter(run: Run) -> None:
    model = net()
    optimizer = torch.optim.Adam(model[3].parameters(), lr=0.05)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number in (3, 7):
            optimizer.param_groups[0]["params"].append(model[0].bias if step.number == 3 else model[0].weight)
        learn(model, optimizer)


def moves_and_removes(run: Run) -> None:
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[3].parameters()], "lr": 0.01},
    ]
    optimizer = torch.optim.Adam(groups, lr=0.05)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 3:
            optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
        if step.number == 9:
            for each in optimizer.param_groups.pop()["params"]:
                del optimizer.state[each]
                each.grad = None
        learn(model, optimizer)


def steps_loose_tensors(run: Run) -> None:
    """Parameters that no module has keep the names of their first places when a group changes."""
    torch.manual_seed(1)
    loose = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 2, requires_grad=True)]
    model = net()
    optimizer = torch.optim.Adam(loose, lr=0.05)
    run.keep(loose=loose, model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 4:
            optimizer.param_groups[0]["params"].insert(0, model[0].weight)
        x = torch.randn(8, 4)
        loss = (torch.tanh(x @ loose[0]) @ loose[1] + model(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def replaces_a_layer(run: Run) -> None:
    """A layer of the same kind in the place of another one, and its parameters in those of the old."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 4:
            model[3] = nn.Linear(8, 2)
            optimizer.param_groups[0]["params"] = [*model.parameters()]
        learn(model, optimizer)


# ---- attributes of modules


class Rotating(nn.Module):
    """Caches tables for the length that it has seen last, in public attributes, as modded-nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = torch.linspace(0.1, 1, 2)
        self.length_cached: int | None = None
        self.cos_cached: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.longest = 0

    def forward(self, x: Tensor) -> Tensor:
        length = len(x)
        if length != self.length_cached:
            self.length_cached = length
            self.cos_cached = torch.outer(torch.arange(length), self.frequencies).cos().repeat(1, 2)
        if length > self.longest:
            self.longest = length
            self.tables[length] = torch.ones(length, 1) * length
        assert self.cos_cached is not None
        return x * self.cos_cached * self.tables[self.longest][:length]


class Averaging(nn.Module):
    """Has real state in plain attributes: a count, and a mean that is made anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean, self.total = 0, torch.zeros(4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean = self.mean + (x.mean(0) - self.mean) / self.count
            self.total += x.sum(0)
        return x - self.mean + 0.01 * self.total


def _with(layer: nn.Module, run: Run) -> None:
    model = nn.Sequential(layer, *net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.steps(per_epoch=PER_EPOCH):
        learn(model, optimizer)


def caches_tables(run: Run) -> None:
    _with(Rotating(), run)


def averages_in_attributes(run: Run) -> None:
    _with(Averaging(), run)


# ---- tensors


class Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("scale", torch.ones(1, 1).expand(8, 4))
        self.offset = nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale + self.offset)  # type: ignore[no-any-return]


def expands_a_buffer(run: Run) -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == 7:
            model.scale = torch.full((1, 1), 0.5).expand(8, 4)
        learn(model, optimizer)


RESUMED = [
    each.__name__
    for each in (
        adds_a_group, adds_a_group_to_the_first_of_two, appends_a_group, appends_a_parameter, moves_and_removes,
        steps_loose_tensors, replaces_a_layer, caches_tables, averages_in_attributes, expands_a_buffer,
    )
]  # fmt: skip


def unfreezing(how: str = "group") -> Recipe:
    """Return a recipe whose ``after_step`` unfreezes a layer, and gives it a group, or makes a buffer longer."""
    model = net()
    model.register_buffer("seen", torch.zeros(0))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW((model if how == "frozen" else model[3]).parameters(), lr=0.05)
    count = {"steps": 0}

    def after_step() -> None:
        count["steps"] += 1
        if how == "buffer":
            model.seen = torch.cat([model.seen, torch.ones(1)])
        elif count["steps"] == 4:
            model[0].requires_grad_(True)
            if how == "group":
                optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.01})

    class Count:
        def state_dict(self) -> dict[str, Any]:
            return {**count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            count.update(state)

    return Recipe(
        model=model, data=list(torch.eye(4)), optimizer=optimizer, batch_size=2, steps_per_epoch=PER_EPOCH,
        loss=lambda model, x: model(x).square().mean(), after_step=after_step, extras={"count": Count()},
    )  # fmt: skip


# ---- refused


class Dropping(nn.Linear):
    """Leaves its bias out when it loads."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        state_dict = {name: each for name, each in state_dict.items() if name != f"{prefix}bias"}
        super()._load_from_state_dict(state_dict, prefix, *others)


class Forgiving(nn.Sequential):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({name: each for name, each in state_dict.items() if "bias" not in name}, False)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}


def _drop(module: nn.Module, state: dict[str, Any], *others: Any) -> None:
    del state["3.bias"]


def _unsaved(how: str, model: nn.Sequential) -> nn.Sequential:
    """Return a model with a value that can't be saved, or that can't be loaded again."""
    if how == "sparse":
        model.register_buffer("graph", torch.eye(4).to_sparse())
    elif how == "sparse, built anew":
        model.register_buffer("graph", torch.eye(4).to_sparse(), persistent=False)
    elif how == "quantised":
        with warnings.catch_warnings(action="ignore"):
            model.register_buffer("small", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))
    elif how == "complex128":
        model.register_buffer("wave", torch.ones(4, dtype=torch.complex128))
    elif how == "dropping":
        model[3] = Dropping(8, 2)
    elif how == "forgiving":
        return Forgiving(*model)
    elif how == "extra state":
        model[3] = Extra(8, 2)
    elif how == "load hook":
        model.register_load_state_dict_pre_hook(_drop)  # type: ignore[no-untyped-call]
    elif how == "save hook":
        model.register_state_dict_post_hook(_drop)  # type: ignore[no-untyped-call]
    return model


class Late(torch.optim.SGD):
    """Has a state that can't be saved, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["seen"] = {1, 2}
        return found


def cannot_be_saved(run: Run, how: str) -> None:
    model = _unsaved(how, net())
    optimizer = (Late if how == "late" else torch.optim.SGD)(model.parameters(), lr=0.1)
    values = {
        "set": {"a": {1, 2}}, "keys": {"a": {(1, 2): 3}}, "text": {"a": np.array(["x"])},
    }.get(how, {})  # fmt: skip
    run.keep(optimizer=optimizer, values=values, **({} if how == "no model" else {"model": model}))
    for step in run.steps(per_epoch=PER_EPOCH):
        print("step", step.number)
        learn(model, optimizer)


class Low(nn.Module):
    """An adapter of low rank around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.down = inner, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.down(x)  # type: ignore[no-any-return]


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Louder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def changes_its_structure(run: Run, how: str, at: int = 2) -> None:
    """Change the model in the step after ``at`` steps in a way that no resume could build again."""
    model = nn.Sequential(*net(), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=PER_EPOCH):
        if step.number == at:
            if how == "adapter":
                model[0] = Low(model[0])
            elif how == "layer":
                model.append(nn.Linear(2, 2))
            elif how == "removed":
                del model[5]
            elif how == "buffer":
                model.register_buffer("more", torch.zeros(2))
            elif how == "tied":
                model[5].weight = model[4].weight
            elif how == "parametrized":
                parametrize.register_parametrization(model[0], "weight", Doubling())
            elif how == "kind":
                model[0] = copy.copy(model[0])
                model[0].__class__ = Louder
            elif how == "loose":
                optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
            elif how == "left state":
                optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[0].weight]})
                del optimizer.param_groups[0]
            elif how == "stale":
                model[5] = nn.Linear(2, 2)
        learn(model, optimizer)

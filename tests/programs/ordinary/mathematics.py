"""Models beside the usual networks: flows, graphs, clusters, factorisations, functional transforms."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from holdfast import Recipe, Run
from tests.programs.network import LONG_EPOCH, Batch, begin, draw, fit, learn, long_points, make_long, net


def finds_clusters(run: Run) -> None:
    """k-means whose centres come from the data, beside a model of the distances."""
    x = long_points().tensors[0]
    centres = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:4]].clone()
    model, optimizer = begin(run, nn.Linear(4, 1), centres=centres)
    for step in run.steps(per_epoch=LONG_EPOCH):
        chosen = torch.randint(len(x), (16,))
        near = torch.cdist(x[chosen], centres).argmin(1)
        for number in range(4):
            if (near == number).any():
                centres[number].lerp_(x[chosen][near == number].mean(0), 0.2)
        step.log(loss=learn((model(torch.cdist(x[chosen], centres)) - 1).square().mean(), optimizer))


class Coupling(nn.Module):
    def __init__(self, flips: bool) -> None:
        super().__init__()
        self.net, self.flips = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), flips

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x.chunk(2, 1)
        if self.flips:
            one, other = other, one
        scale, shift = self.net(one).chunk(2, 1)
        return torch.cat([one, other * scale.tanh().exp() + shift], 1), scale.tanh().sum(1)


def flows(run: Run) -> None:
    """A normalising flow of four couplings."""
    torch.manual_seed(1)
    model, optimizer = begin(run, nn.ModuleList(Coupling(bool(number % 2)) for number in range(4)))
    for step in run.steps(per_epoch=LONG_EPOCH):
        z, logdet = draw()[0], torch.zeros(8)
        for layer in model:
            z, change = layer(z)
            logdet = logdet + change
        step.log(loss=learn((z.square().sum(1) / 2 - logdet).mean(), optimizer))


def convolves_a_graph(run: Run) -> None:
    """A graph network, whose adjacency is a constant sparse tensor."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(12, (2, 30), generator=generator)
    adjacency = torch.sparse_coo_tensor(edges, torch.ones(30) / 3, (12, 12)).coalesce()
    x, y = torch.randn(12, 8, generator=generator), torch.arange(12) % 3
    torch.manual_seed(1)
    model, optimizer = begin(run, nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)]))
    for step in run.steps(per_epoch=LONG_EPOCH):
        hidden = F.dropout(F.relu(torch.sparse.mm(adjacency, model[0](x))), 0.2)
        out = torch.sparse.mm(adjacency, model[1](hidden))
        step.log(loss=learn(F.cross_entropy(out, y), optimizer))


def factorises(run: Run) -> None:
    """Factors of a matrix as two parameters, without a module."""
    torch.manual_seed(1)
    left, right = torch.randn(10, 3, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    wanted = torch.randn(10, 8, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adagrad([left, right], lr=0.1)
    run.keep(factors=[left, right], optimizer=optimizer)
    for step in run.steps(per_epoch=LONG_EPOCH):
        rows = torch.randint(10, (4,))
        step.log(loss=learn((left[rows] @ right - wanted[rows]).square().mean(), optimizer))


def trains_an_ensemble(run: Run) -> None:
    """Several models at once, by vmap."""
    models = [net(4) for _ in range(3)]
    for number, each in enumerate(models):
        each[0].weight.data.add_(0.1 * number)
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    skeleton = net(4)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01, momentum=0.9)
    run.keep(parameters=parameters, optimizer=optimizer)

    def out(own: Any, x: Tensor) -> Any:
        return functional_call(skeleton, (own, buffers), (x,))

    for step in run.steps(per_epoch=LONG_EPOCH):
        x, y = draw()
        found = vmap(out, in_dims=(0, None))(parameters, x)
        step.log(loss=learn((found - y).square().mean(), optimizer))


def takes_gradients_of_samples() -> Recipe:
    """Clip the gradient of each sample, with noise, as private training does."""
    model = net(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def sample_loss(own: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(model, own, (x[None],)), y[None])

    def step(batch: Batch) -> Tensor:
        own = {name: each.detach() for name, each in model.named_parameters()}
        found = vmap(grad(sample_loss), in_dims=(None, 0, 0))(own, *batch)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in found.values()]).norm(dim=0)
        for name, each in model.named_parameters():
            scale = (1 / norms.clamp(min=1)).view(-1, *[1] * each.ndim)
            each.grad = (found[name] * scale).mean(0) + 0.01 * torch.randn_like(each)
        optimizer.step()
        return fit(model, batch).detach()

    return make_long(None, model, optimizer=optimizer, step=step)


def integrates(run: Run) -> None:
    """A neural ODE by Euler's method, in double precision."""
    torch.manual_seed(1)
    model, optimizer = begin(run, nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    for step in run.steps(per_epoch=LONG_EPOCH):
        x = torch.randn(8, 2, dtype=torch.float64)
        y = x
        for _ in range(10):
            y = y + 0.1 * model(y)
        step.log(loss=learn((y - x.flip(1)).square().mean(), optimizer))


def solves_an_equation(run: Run) -> None:
    """A network with the residual of a differential equation as its loss, and LBFGS."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=LONG_EPOCH):
        x = torch.rand(16, 1, requires_grad=True)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = (slope + y).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        step.log(loss=optimizer.step(closure))  # type: ignore[no-untyped-call]


class Hyper(nn.Module):
    """A network that makes another one's weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.code, self.maker = nn.Parameter(torch.randn(4)), nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(self.code)
        return F.linear(x, made[None, :8], made[8:])


def makes_weights() -> Recipe:
    return make_long(model=Hyper())


def predicts_waves(run: Run) -> None:
    """Predict sines by two LSTM cells whose states begin with zeros in each step."""
    torch.manual_seed(1)
    one, head = nn.LSTMCell(1, 6), nn.Linear(6, 1)
    _, optimizer = begin(run, nn.ModuleList([one, head]))
    for step in run.steps(per_epoch=LONG_EPOCH):
        wave = torch.sin(torch.rand(4, 1) * 6 + torch.arange(10) / 2)
        hidden, cell = torch.zeros(4, 6), torch.zeros(4, 6)
        loss = torch.zeros(())
        for place in range(9):
            hidden, cell = one(wave[:, place, None], (hidden, cell))
            loss = loss + F.mse_loss(head(hidden)[:, 0], wave[:, place + 1])
        step.log(loss=learn(loss, optimizer))


class FakeQuantized(nn.Module):
    """A linear layer whose weights are rounded in training, by a range that a buffer observes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 1)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.training:
            self.largest.copy_(torch.maximum(self.largest * 0.9, weight.detach().abs().max()))  # type: ignore[operator]
        scale = (self.largest / 127).clamp(min=1e-8)  # type: ignore[operator]
        rounded = (weight / scale).round().clamp(-127, 127) * scale
        return F.linear(x, weight + (rounded - weight).detach(), self.linear.bias)


def quantizes_weights() -> Recipe:
    return make_long(model=FakeQuantized())


def penalises_forgetting(run: Run) -> None:
    """Elastic weight consolidation: importances and old weights, kept in dicts of tensors."""
    model = net()
    fisher = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    anchor = {name: each.detach().clone() for name, each in model.named_parameters()}
    model, optimizer = begin(run, model, fisher=fisher, anchor=anchor)
    for step in run.steps(per_epoch=LONG_EPOCH):
        pull = sum((fisher[name] * (each - anchor[name]).square()).sum() for name, each in model.named_parameters())
        x, y = draw()
        loss = learn(F.mse_loss(model(x), y * (1 + step.number // 8)) + pull, optimizer)
        for name, each in model.named_parameters():
            fisher[name].lerp_(each.grad.square(), 0.1)
            if step.number % 8 == 7:
                anchor[name].copy_(each.detach())
        step.log(loss=loss)

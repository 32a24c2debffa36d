"""Tutorials of optimizers and numbers: optimizers written out, closures, several at once; complex, double and half."""

import copy
import math
import random
from collections import OrderedDict, defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

from holdfast import Recipe, Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, Windows, labelled, letters, load, pictures, rows


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs))


class Shampoo(torch.optim.Optimizer):
    """Preconditions by roots of sums of outer products, which are computed anew every few steps."""

    def __init__(self, params, lr=0.01, momentum=0.5, epsilon=0.1, update_freq=3) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "epsilon": epsilon, "update_freq": update_freq})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if not state:
                    state["step"], state["momentum_buffer"] = 0, grad.clone()
                    for i, size in enumerate(grad.size()):
                        state[f"precond_{i}"] = group["epsilon"] * torch.eye(size)
                        state[f"inv_precond_{i}"] = torch.zeros(size, size)
                for i, size in enumerate(grad.size()):
                    turned = grad.transpose(0, i).reshape(size, -1)
                    state[f"precond_{i}"].add_(turned @ turned.t())
                    if state["step"] % group["update_freq"] == 0:
                        u, s, v = torch.linalg.svd(state[f"precond_{i}"])
                        state[f"inv_precond_{i}"] = u @ s.pow(-1 / (2 * grad.ndim)).diag() @ v
                    shape = grad.transpose(0, i).shape
                    grad = (state[f"inv_precond_{i}"] @ turned).reshape(shape).transpose(0, i)
                state["step"] += 1
                state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
                p.add_(state["momentum_buffer"], alpha=-group["lr"])
        return loss


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer; its slow weights are in the states, its counts in the groups."""

    def __init__(self, base_optimizer, alpha=0.5, k=4) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.base_optimizer, self.alpha, self.k = base_optimizer, alpha, k
        self.param_groups = base_optimizer.param_groups
        self.defaults = {**base_optimizer.defaults, "lookahead_alpha": alpha}
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["lookahead_step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % self.k == 0:
                for p in group["params"]:
                    state = self.base_optimizer.state[p]
                    if "slow_buffer" not in state:
                        state["slow_buffer"] = p.clone()
                    state["slow_buffer"].add_(p - state["slow_buffer"], alpha=self.alpha)
                    p.copy_(state["slow_buffer"])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.base_optimizer.state_dict()

    def load_state_dict(self, state_dict) -> None:
        self.base_optimizer.load_state_dict(state_dict)
        self.param_groups = self.base_optimizer.param_groups


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                update = (
                    state["exp_avg"].clone().mul_(group["betas"][0]).add(p.grad, alpha=1 - group["betas"][0]).sign_()
                )
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


class Adan(torch.optim.Optimizer):
    """Adan with restarts, and with counts of steps in its groups."""

    def __init__(self, params, lr=0.01, betas=(0.02, 0.08, 0.01), eps=1e-8, restart_every=9) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "step": 0})
        self.restart_every, self.restarts = restart_every, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            b1, b2, b3 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if "m" not in state or group["step"] % self.restart_every == 0:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["n"], state["prev_grad"] = torch.zeros_like(p), p.grad.clone()
                diff = p.grad - state["prev_grad"]
                state["m"].lerp_(p.grad, b1)
                state["v"].lerp_(diff, b2)
                state["n"].lerp_((p.grad + (1 - b2) * diff).square(), b3)
                p.addcdiv_(state["m"] + (1 - b2) * state["v"], state["n"].sqrt() + group["eps"], value=-group["lr"])
                state["prev_grad"] = p.grad.clone()
            self.restarts += group["step"] % self.restart_every == 0


class KFAC(torch.optim.Optimizer):
    """Curvature by factors that hooks of the modules collect; a running average is in a dict by module."""

    def __init__(self, model: nn.Module, lr=0.02, decay=0.9, damping=1e-2, every=4) -> None:
        self.modules = [m for m in model.modules() if isinstance(m, nn.Linear)]
        super().__init__([{"params": list(m.parameters())} for m in self.modules], {"lr": lr})
        self.decay, self.damping, self.every, self.steps = decay, damping, every, 0
        self.aa = [torch.eye(m.in_features + 1) for m in self.modules]
        self.gg = [torch.eye(m.out_features) for m in self.modules]
        self.inverses = [None for _ in self.modules]
        for number, module in enumerate(self.modules):
            module.register_forward_pre_hook(lambda _, args, number=number: self._save_input(number, args[0]))
            module.register_full_backward_hook(lambda _, gi, go, number=number: self._save_grad(number, go[0]))

    def _save_input(self, number, x) -> None:
        if torch.is_grad_enabled():
            x = torch.cat([x.detach(), x.new_ones(len(x), 1)], 1)
            self.aa[number].mul_(self.decay).add_(x.t() @ x / len(x), alpha=1 - self.decay)

    def _save_grad(self, number, g) -> None:
        self.gg[number].mul_(self.decay).add_(g.t() @ g * len(g), alpha=1 - self.decay)

    @torch.no_grad()
    def step(self, closure=None):
        for number, (group, module) in enumerate(zip(self.param_groups, self.modules)):
            if self.steps % self.every == 0:
                self.inverses[number] = tuple(
                    torch.linalg.inv(each + self.damping * torch.eye(len(each)))
                    for each in (self.gg[number], self.aa[number])
                )
            g_inv, a_inv = self.inverses[number]
            update = g_inv @ torch.cat([module.weight.grad, module.bias.grad[:, None]], 1) @ a_inv
            update *= min(1.0, 1.0 / update.norm())
            module.weight.sub_(update[:, :-1], alpha=group["lr"])
            module.bias.sub_(update[:, -1], alpha=group["lr"])
        self.steps += 1


def _trains(run: Run, model, optimizer) -> None:
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(epoch, loss.item())


def preconditions(run: Run) -> None:
    """Train by Shampoo, whose inverse roots are older than its preconditioners."""
    model = net()
    optimizer = Shampoo(model.parameters())
    run.keep(model=model, optimizer=optimizer)
    _trains(run, model, optimizer)


def looks_ahead(run: Run) -> None:
    """Train by Lookahead around Lion, as a wrapper that doesn't call its base class's constructor."""
    model = net()
    optimizer = Lookahead(Lion(model.parameters(), lr=0.01, weight_decay=0.1))
    run.keep(model=model, optimizer=optimizer)
    _trains(run, model, optimizer)


def restarts_its_moments(run: Run) -> None:
    """Train by Adan, which restarts its moments and counts that in an attribute."""
    model = net()
    optimizer = Adan(model.parameters())
    run.keep(model=model, optimizer=optimizer)
    _trains(run, model, optimizer)


def follows_curvature(run: Run) -> None:
    """Train by K-FAC, whose factors are lists of tensors in the optimizer's attributes."""
    model = net()
    optimizer = KFAC(model)
    run.keep(model=model, optimizer=optimizer)
    _trains(run, model, optimizer)


def searches_lines(run: Run) -> None:
    """LBFGS in double precision with strong Wolfe, and SGD with Armijo's rule from a kept step size, by turns."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 6), nn.Softplus(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe")
    state = {"eta": 0.1}
    run.keep(model=model, optimizer=optimizer, state=state)
    for epoch in run.epochs(load(TensorDataset(*(each.double() for each in rows().tensors)))):
        for number, (x, y) in enumerate(run.batches(), run.batch_number):

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                if loss.requires_grad:
                    loss.backward()
                return loss

            if number % 2:
                loss = optimizer.step(closure)
            else:
                loss = closure()
                weights = [p.detach().clone() for p in model.parameters()]
                slope = sum(p.grad.square().sum() for p in model.parameters())
                state["eta"] *= 2
                with torch.no_grad():
                    for _ in range(10):
                        for p, w in zip(model.parameters(), weights):
                            p.copy_(w - state["eta"] * p.grad)
                        if F.mse_loss(model(x), y) <= loss - 0.1 * state["eta"] * slope:
                            break
                        state["eta"] *= 0.5
            run.log(loss=loss, eta=state["eta"])
        print(epoch, loss.item())


def adds_noise_to_gradients(run: Run, eta: float = 0.1, gamma: float = 0.55) -> None:
    """Add noise from a generator of its own to gradients, in hooks, with a buffer of the mean norm for clipping."""
    model = net()
    generator = torch.Generator().manual_seed(99)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    state = {"step": 0, "history": []}
    run.keep(model=model, optimizer=optimizer, generator=generator, state=state)
    for p in model.parameters():
        p.register_hook(
            lambda g: g + torch.randn(g.shape, generator=generator) * math.sqrt(eta / (1 + state["step"]) ** gamma)
        )
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
            state["history"].append(norm)
            nn.utils.clip_grad_norm_(model.parameters(), float(np.percentile(state["history"], 10)))
            optimizer.step()
            state["step"] += 1
            run.log(loss=loss, norm=norm)
        print(epoch, len(state["history"]))


class ComplexNet(nn.Module):
    """A Fourier layer with complex weights, and modReLU."""

    def __init__(self, modes: int = 4, width: int = 6) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(1, width), nn.Linear(width, 1)
        self.weights = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.bias, self.modes = nn.Parameter(torch.zeros(width, 1)), modes
        self.register_buffer("phase", torch.zeros((), dtype=torch.cfloat))

    def forward(self, x):
        h = self.lift(x[..., None]).transpose(1, 2)
        spectrum = torch.fft.rfft(h)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weights)
        if self.training:
            self.phase = 0.9 * self.phase + 0.1 * out.mean().detach()
        magnitude = out.abs()
        out = F.relu(magnitude + self.bias) * out / (magnitude + 1e-6)
        return self.project(torch.fft.irfft(out, n=x.shape[-1]).transpose(1, 2)).squeeze(-1) + self.phase.abs()


def has_complex_weights(run: Run) -> None:
    """A Fourier operator with complex parameters and a complex buffer, by AdamW."""
    torch.manual_seed(3)
    model = ComplexNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(load(rows())):
        for x, _ in run.batches():
            loss = F.mse_loss(model(x), x.cumsum(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)
        print(epoch, model.phase.item())


def keeps_master_weights(run: Run) -> None:
    """A bf16 model with float32 master weights of its own, stochastic rounding, and a float16 buffer."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 1)).to(torch.bfloat16)
    model.register_buffer("scale", torch.ones((), dtype=torch.float16))
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(master, lr=0.01)
    run.keep(model=model, master=master, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x.bfloat16()).float() * model.scale.float(), y)
            model.zero_grad()
            loss.backward()
            for p, m in zip(model.parameters(), master):
                m.grad = p.grad.float()
            optimizer.step()
            with torch.no_grad():
                for p, m in zip(model.parameters(), master):
                    bits = m.view(torch.int32) + torch.randint(0, 1 << 16, m.shape, dtype=torch.int32)
                    p.copy_((bits & -65536).view(torch.float32))
                model.scale.mul_(0.999)
            run.log(loss=loss)
        print(epoch, model.scale.item())


class Weird(nn.Module):
    """Shared layers at two depths, tied embeddings, a module in a dict in a list, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0, max_norm=2.0)
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({"mix": shared, "norm": nn.LayerNorm(8)}) for _ in range(3))
        self.bn = nn.BatchNorm1d(8, momentum=None)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embed.weight
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.zeros(()))})
        self.register_buffer("running_mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.drops = nn.ModuleList([nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.Dropout1d(0.1)])

    def forward(self, x):
        h = self.embed(x)
        for block, drop in zip(self.blocks, self.drops):
            h = h + drop(torch.tanh(block["mix"](block["norm"](h))))
        h = self.bn(h.transpose(1, 2)).transpose(1, 2) * self.scales["a"] + self.scales["b"]
        if self.training:
            self.calls += 1
            self.running_mean += (h.detach().mean((0, 1)).double() - self.running_mean) / self.calls
        return self.head(h - self.running_mean.float())


def shares_weights(run: Run) -> None:
    """Shared and tied modules, cumulative batch norm, max_norm and every kind of dropout."""
    torch.manual_seed(5)
    model = Weird()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(Windows())):
        model.train()
        for x, y in run.batches():
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        model.eval()
        with torch.no_grad():
            print(epoch, model(letters()[None, :6]).argmax(-1).tolist())


class BayesLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mu, self.rho = (
            nn.Parameter(torch.zeros(outputs, inputs)),
            nn.Parameter(torch.full((outputs, inputs), -3.0)),
        )

    def forward(self, x):
        sigma = F.softplus(self.rho)
        self.kl = (self.mu.square() + sigma.square() - 2 * sigma.log() - 1).sum() / 2
        return F.linear(x, self.mu + sigma * torch.randn_like(sigma))


def weighs_uncertainty(run: Run, kl_warmup: int = 2) -> None:
    """Bayes by backprop: the divergence is an attribute of each pass, weighted by the minibatch and by epoch."""
    torch.manual_seed(6)
    model = nn.Sequential(BayesLinear(8, 10), nn.Tanh(), BayesLinear(10, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for i, (x, y) in enumerate(run.batches(), run.batch_number):
            out = torch.stack([model(x) for _ in range(3)])
            pi = 2 ** (STEPS - i) / (2**STEPS - 1) * min(1, (epoch + 1) / kl_warmup)
            loss = F.mse_loss(out.mean(0), y) + 1e-2 * pi * (model[0].kl + model[2].kl)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(epoch, out.std(0).mean().item())


def samples_by_hamilton(run: Run) -> None:
    """HMC in double precision without an optimizer, with dual averaging of its step size in a kept dict."""
    torch.manual_seed(7)
    x, y = (each.double() for each in rows(40).tensors)
    q = torch.zeros(9, dtype=torch.float64)
    state = {"eps": 0.05, "h_bar": 0.0, "log_eps_bar": 0.0, "t": 0, "accepted": []}
    mean = np.zeros(9)
    run.keep(q=q, state=state, mean=mean)

    def potential(q):
        return (x @ q[:8] + q[8] - y[:, 0]).square().sum() / 2 + q.square().sum() / 200

    def slope(q):
        return torch.autograd.grad(potential(q := q.detach().requires_grad_()), q)[0]

    for step in run.steps(per_epoch=STEPS):
        p = torch.randn_like(q)
        new, momentum = q.clone(), p - state["eps"] / 2 * slope(q)
        for i in range(5):
            new = new + state["eps"] * momentum
            momentum = momentum - state["eps"] * (1 if i < 4 else 0.5) * slope(new)
        energy = potential(q) + p.square().sum() / 2 - potential(new) - momentum.square().sum() / 2
        accept = min(1.0, math.exp(min(0.0, energy.item())))
        if random.random() < accept:
            q.copy_(new)
        t = state["t"] = state["t"] + 1
        state["h_bar"] += (0.65 - accept - state["h_bar"]) / (t + 10)
        log_eps = math.log(0.5) - math.sqrt(t) / 0.05 * state["h_bar"] * 0.1
        state["log_eps_bar"] = t**-0.75 * log_eps + (1 - t**-0.75) * state["log_eps_bar"]
        state["eps"] = min(math.exp(log_eps), 0.1)
        state["accepted"].append(accept)
        mean += (q.numpy() - mean) / t
        step.log(loss=potential(q), accept=np.mean(state["accepted"]))


def is_kept_by_parts() -> Recipe:
    """A recipe with two optimizers of two kinds, sparse and dense, each with a schedule, and bf16 autocast."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(12, 8, sparse=True, mode="mean"), nn.Linear(8, 12)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.head(self.words(x)).float()

    torch.manual_seed(8)
    model = Words()
    sparse = torch.optim.SparseAdam([model.words.weight], lr=0.02)
    dense = torch.optim.Adadelta(model.head.parameters(), lr=0.5)

    def step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y[:, -1])
        for each in (sparse, dense):
            each.zero_grad()
        loss.backward()
        for each in (sparse, dense):
            each.step()
        return {"loss": loss}

    return Recipe(
        model=model, data=Windows(), optimizer={"sparse": sparse, "dense": dense}, step=step, batch_size=BATCH,
        schedule={"sparse": schedules.ExponentialLR(sparse, 0.95), "dense": schedules.StepLR(dense, 5)},
    )  # fmt: skip


def trains_populations(run: Run, size: int = 3) -> None:
    """Population based training: the worst takes the best's weights and perturbed rates at each epoch's end."""
    torch.manual_seed(9)
    members = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES)) for _ in range(size))
    optimizers = [torch.optim.SGD(each.parameters(), lr=10 ** random.uniform(-3, -1), momentum=0.9) for each in members]
    scores = np.zeros(size)
    run.keep(members=members, optimizers=optimizers, scores=scores)
    for epoch in run.epochs(load(labelled())):
        for x, y in run.batches():
            losses = []
            for number, (member, optimizer) in enumerate(zip(members, optimizers)):
                loss = F.cross_entropy(member(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scores[number] = 0.8 * scores[number] + 0.2 * loss.item()
                losses.append(loss.detach())
            run.log(loss=torch.stack(losses).min())
        best, worst = int(scores.argmin()), int(scores.argmax())
        members[worst].load_state_dict(members[best].state_dict())
        optimizers[worst].load_state_dict(copy.deepcopy(optimizers[best].state_dict()))
        optimizers[worst].param_groups[0]["lr"] *= random.choice([0.8, 1.2])
        scores[worst] = scores[best]
        print(epoch, scores.tolist(), [each.param_groups[0]["lr"] for each in optimizers])


def solves_an_equation(run: Run, causal: float = 1.0) -> None:
    """A network for a differential equation: points that are drawn where residuals are large, and adaptive weights."""
    torch.manual_seed(10)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    weights = {"pde": torch.tensor(1.0, dtype=torch.double), "ic": torch.tensor(1.0, dtype=torch.double)}
    points = torch.rand(32, 2, dtype=torch.double)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    run.keep(model=model, optimizer=optimizer, weights=weights, points=points)

    def residual(p):
        p = p.detach().requires_grad_()
        u = model(p)
        (du,) = torch.autograd.grad(u.sum(), p, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 1].sum(), p, create_graph=True)
        return du[:, 0] - 0.1 * ddu[:, 1]

    for step in run.steps(per_epoch=STEPS):
        r = residual(points)
        pde = (torch.exp(-causal * points[:, 0]) * r.square()).mean()
        x = torch.rand(16, dtype=torch.double)
        ic = (model(torch.stack([torch.zeros_like(x), x], 1)).squeeze(1) - torch.sin(math.pi * x)).square().mean()
        last = list(model[-1].parameters())
        norms = {
            name: torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(loss, last, retain_graph=True, allow_unused=True)
                    if g is not None
                ]
            )
            .abs()
            .max()
            for name, loss in (("pde", pde), ("ic", ic))
        }
        for name, norm in norms.items():
            weights[name].mul_(0.9).add_(0.1 * norms["pde"] / (norm + 1e-8))
        loss = weights["pde"] * pde + weights["ic"] * ic
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step.number % 4 == 3:
            fresh = torch.rand(128, 2, dtype=torch.double)
            chosen = torch.multinomial(residual(fresh).detach().abs(), 8)
            points[torch.randperm(32)[:8]] = fresh[chosen]
        step.log(loss=loss, pde=pde, ic=ic)


def renders_rays(run: Run, n_rand: int = 8) -> None:
    """NeRF's way to batch: rays shuffled once, a pointer into them that wraps, and a rate by the step."""
    torch.manual_seed(11)
    picture = pictures(1, 8).tensors[0][0, 0]
    grid = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1).view(-1, 2) / 8
    rays = torch.cat([grid, picture.reshape(-1, 1)], 1)
    rays_rgb, state = rays[torch.randperm(len(rays))].clone(), {"i_batch": 0}
    model = nn.Sequential(nn.Linear(2 * 2 * 3, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.999))
    run.keep(model=model, optimizer=optimizer, rays_rgb=rays_rgb, state=state)
    for step in run.steps(per_epoch=STEPS):
        batch = rays_rgb[state["i_batch"] : state["i_batch"] + n_rand]
        state["i_batch"] += n_rand
        if state["i_batch"] >= len(rays_rgb):
            rays_rgb.copy_(rays_rgb[torch.randperm(len(rays_rgb))])
            state["i_batch"] = 0
        angles = torch.cat([batch[:, :2] * 2**i * math.pi for i in range(3)], 1)
        loss = F.mse_loss(model(torch.cat([angles.sin(), angles.cos()], 1)), batch[:, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for param_group in optimizer.param_groups:
            param_group["lr"] = 0.02 * 0.1 ** (step.number / 100)
        step.log(loss=loss, psnr=-10 * torch.log10(loss))


class DPOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer as a library of differential privacy does: its groups and its state are the other's."""

    def __init__(self, optimizer, noise_multiplier: float, max_grad_norm: float, generator) -> None:
        self.original_optimizer, self.generator = optimizer, generator
        self.noise_multiplier, self.max_grad_norm = noise_multiplier, max_grad_norm

    @property
    def param_groups(self):
        return self.original_optimizer.param_groups

    @property
    def state(self):
        return self.original_optimizer.state

    @property
    def defaults(self):
        return self.original_optimizer.defaults

    def state_dict(self):
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        for p in params:
            p.grad = p.grad + self.noise_multiplier * torch.randn(p.shape, generator=self.generator)
        return self.original_optimizer.step(closure)


def is_private(run: Run) -> None:
    """Train with clipped and noisy gradients by a wrapper that doesn't call torch's constructor, and account for it."""
    model, accountant = net(), {"history": []}
    generator = torch.Generator().manual_seed(17)
    optimizer = DPOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), 0.05, 1.0, generator)
    run.keep(model=model, optimizer=optimizer, generator=generator, accountant=accountant)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accountant["history"].append((0.05, BATCH / len(rows())))
            run.log(loss=loss)
        print(epoch, loss.item(), len(accountant["history"]))


def switches_its_optimizer(run: Run) -> None:
    """Train by Adam first, and by SGD from an epoch on; both step the same parameters, and are kept in a list."""
    model = net()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    sgd = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    run.keep(model=model, optimizers=[adam, sgd])
    for epoch in run.epochs(load(rows())):
        optimizer = adam if epoch < 2 else sgd
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(epoch, loss.item())

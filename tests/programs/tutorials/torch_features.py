"""Tutorials of torch's own features: functions, modes of differentiation, pruning, quantisation, parametrizations."""

import copy

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint_sequential

from holdfast import Recipe, Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, labelled, load, pictures, rows


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs))


class LegendrePolynomial3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * (5 * x**3 - 3 * x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * 1.5 * (5 * x**2 - 1)


def fits_a_polynomial(run: Run) -> None:
    """Fit a sine by a function with its own backward pass, with plain tensors as weights."""
    torch.manual_seed(0)
    x = torch.linspace(-3.14, 3.14, 200)
    y = torch.sin(x)
    a, b, c, d = (torch.full((), value, requires_grad=True) for value in (0.0, -1.0, 0.0, 0.3))
    run.keep(a=a, b=b, c=c, d=d)
    learning_rate = 5e-6
    for step in run.steps(per_epoch=STEPS):
        y_pred = a + b * LegendrePolynomial3.apply(c + d * x)
        loss = (y_pred - y).pow(2).sum()
        if step.number % 10 == 9:
            print(step.number, loss.item())
        loss.backward()
        with torch.no_grad():
            for weight in (a, b, c, d):
                weight -= learning_rate * weight.grad
                weight.grad = None
        step.log(loss=loss)
    print(f"Result: y = {a.item()} + {b.item()} * P3({c.item()} + {d.item()} x)")


def differentiates_each_sample(run: Run, clip: float = 1.0, sigma: float = 0.1) -> None:
    """Clip the gradient of each sample by torch.func, and add noise."""
    model = net(CLASSES)
    params = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    run.keep(params=params)

    def compute_loss(params, sample, target):
        predictions = functional_call(model, params, (sample.unsqueeze(0),))
        return F.cross_entropy(predictions, target.unsqueeze(0))

    ft_per_sample_grads = vmap(grad(compute_loss), in_dims=(None, 0, 0))
    for epoch in run.epochs(load(labelled())):
        for data, targets in run.batches():
            grads = ft_per_sample_grads(params, data, targets)
            norms = torch.stack([each.flatten(1).norm(dim=1) for each in grads.values()]).norm(dim=0)
            factor = (clip / norms).clamp(max=1.0)
            for name, each in grads.items():
                clipped = torch.einsum("b,b...->...", factor, each) + sigma * torch.randn_like(params[name])
                params[name] = params[name] - 0.1 * clipped / BATCH
            with torch.no_grad():
                run.log(loss=F.cross_entropy(functional_call(model, params, (data,)), targets))
        print(epoch, norms.mean().item())


def ensembles_models(run: Run, num_models: int = 3) -> None:
    """Stack the parameters of several models, and train all by one optimizer."""
    torch.manual_seed(2)
    models = [nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in range(num_models)]
    params, buffers = stack_module_state(models)
    base_model = copy.deepcopy(models[0]).to("meta")
    optimizer = torch.optim.Adam(params.values(), lr=0.01)
    run.keep(params=params, optimizer=optimizer)

    def fmodel(params, buffers, x):
        return functional_call(base_model, (params, buffers), (x,))

    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            predictions = vmap(fmodel, in_dims=(0, 0, None), randomness="different")(params, buffers, x)
            loss = (predictions - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, spread=predictions.std(0).mean())
        print(f"epoch {epoch}: {loss.item():.4f}")


def differentiates_forward(run: Run) -> None:
    """Follow directional derivatives by forward-mode differentiation, without a backward pass."""
    model = net()
    run.keep(model=model)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            params = {name: p.detach() for name, p in model.named_parameters()}
            tangents = {name: torch.randn_like(p) for name, p in params.items()}
            with torch.no_grad(), forward_ad.dual_level():
                duals = {name: forward_ad.make_dual(p, tangents[name]) for name, p in params.items()}
                loss = F.mse_loss(functional_call(model, duals, (x,)), y)
                value, slope = forward_ad.unpack_dual(loss)
                for name, p in model.named_parameters():
                    p -= 0.001 * slope * tangents[name]
            run.log(loss=value)
        _, change = jvp(lambda z: functional_call(model, params, (z,)), (x,), (torch.ones_like(x),))
        print(epoch, change.mean().item())


def penalises_curvature(run: Run) -> None:
    """Add a Hutchinson estimate of the Hessian's trace to the loss, and print a true one at each epoch's end."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            weights = list(model.parameters())
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            signs = [torch.randint_like(g, 2) * 2 - 1 for g in grads]
            products = torch.autograd.grad(grads, weights, grad_outputs=signs, create_graph=True)
            trace = sum((s * p).sum() for s, p in zip(signs, products))
            optimizer.zero_grad()
            (loss + 1e-3 * trace.abs()).backward()
            optimizer.step()
            run.log(loss=loss, trace=trace)
        full = hessian(lambda last: F.mse_loss(F.linear(model[:2](x), last, model[2].bias), y))(
            model[2].weight.detach()
        )
        print(epoch, full.flatten(0, 1).flatten(1).trace().item())


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, a):
        return a.triu()


class MatrixExponential(nn.Module):
    def forward(self, x):
        return torch.matrix_exp(x)


class Skew(nn.Module):
    def forward(self, x):
        a = x.triu(1)
        return a - a.transpose(-1, -2)


def parametrises(run: Run) -> None:
    """Train layers whose weights are symmetric, orthogonal, normed or spectrally normed."""
    torch.manual_seed(1)
    symmetric, orthogonal = nn.Linear(8, 8), nn.Linear(8, 8)
    parametrize.register_parametrization(symmetric, "weight", Symmetric())
    parametrize.register_parametrization(orthogonal, "weight", Skew())
    parametrize.register_parametrization(orthogonal, "weight", MatrixExponential())
    last = parametrizations.weight_norm(nn.Linear(8, 6))
    model = nn.Sequential(
        symmetric, orthogonal, nn.Tanh(), parametrizations.orthogonal(nn.Linear(8, 8)), last,
        parametrizations.spectral_norm(nn.Linear(6, 6), n_power_iterations=2), nn.ReLU(), nn.Linear(6, 1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            with parametrize.cached():
                loss = F.mse_loss(model(x), y) + 0.0 * model(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        off = orthogonal.weight @ orthogonal.weight.T - torch.eye(8)
        print(epoch, off.abs().max().item())


def prunes_gradually(run: Run) -> None:
    """Prune the smallest weights of all layers at each epoch's end, and a structure of one."""
    model = net()
    layers = [(model[0], "weight"), (model[2], "weight")]
    for layer, name in layers:
        prune.identity(layer, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.1)
        if epoch == 1:
            prune.ln_structured(model[0], name="weight", amount=0.2, n=2, dim=0)
        zeros = sum(int((layer.weight == 0).sum()) for layer, _ in layers)
        print(f"Sparsity after epoch {epoch}: {zeros}")


def finds_a_lottery_ticket(run: Run) -> None:
    """Rewind the weights that survive to their first values, at each epoch's end."""
    model = net()
    first = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    masks = {name: torch.ones_like(weight) for name, weight in model.named_parameters() if "weight" in name}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    run.keep(model=model, masks=masks, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if name in masks:
                        weight *= masks[name]
            run.log(loss=loss)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in masks:
                    alive = weight[masks[name].bool()].abs()
                    masks[name] = masks[name] * (weight.abs() > alive.quantile(0.2))
                    weight.copy_(first[name] * masks[name])
        print(epoch, {name: int(mask.sum()) for name, mask in masks.items()})


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        self.fc = nn.Linear(4 * 64, CLASSES)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.fc(x.flatten(1)))


def trains_aware_of_quantisation(run: Run) -> None:
    """Train with torch's fake quantisation; freeze observers, then batch norm, after some epochs."""
    torch.manual_seed(3)
    model = Quantised()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    model.train()
    torch.ao.quantization.prepare_qat(model, inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        for image, target in run.batches():
            loss = F.cross_entropy(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        if epoch >= 1:
            model.apply(torch.ao.quantization.disable_observer)
        if epoch >= 2:
            model.bn.eval()
        print(epoch, model.conv.weight_fake_quant.scale.mean().item())


def steps_in_the_backward_pass(run: Run) -> None:
    """Step an optimizer of each parameter in a hook, as soon as its gradient is there."""
    model = net()
    optimizer_dict = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in model.parameters()}

    def optimizer_hook(parameter) -> None:
        optimizer_dict[parameter].step()
        optimizer_dict[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer_hook)
    run.keep(model=model, optimizers=list(optimizer_dict.values()))
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            loss.backward()
            run.log(loss=loss)
        print(epoch, loss.item())


def profiles(run: Run) -> None:
    """Profile some steps by a schedule, as the recipe of the profiler does."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    ready = []
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda prof: ready.append(len(prof.key_averages())),
    ) as prof:  # fmt: skip
        for epoch in run.epochs(load(rows())):
            for x, y in run.batches():
                with record_function("model_inference"):
                    loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                prof.step()
                run.log(loss=loss)
            print(epoch, loss.item(), ready)


def scales_on_a_cpu(run: Run) -> None:
    """Train in bf16 by autocast, with a gradient scaler that is on, unscale, clip and accumulate."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=6)
    run.keep(model=model, optimizer=optimizer, scaler=scaler)
    for epoch in run.epochs(load(rows())):
        for x, y in run.batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            scaler.step(optimizer)
            scaler.update()
            run.log(loss=loss, scale=scaler.get_scale())
        print(epoch, scaler.get_scale())


class LocalisationNet(nn.Module):
    """A spatial transformer, whose last layer begins with the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.drop, self.fc = nn.Dropout2d(0.2), nn.Linear(4 * 64, CLASSES)
        self.localization = nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(True))
        self.fc_loc = nn.Sequential(nn.Linear(3 * 9, 8), nn.ReLU(True), nn.Linear(8, 6))
        self.fc_loc[2].weight.data.zero_()
        self.fc_loc[2].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))

    def stn(self, x):
        theta = self.fc_loc(self.localization(x).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.drop(self.conv(self.stn(x)))).flatten(1)), dim=1)


def transforms_spatially(run: Run) -> None:
    """Train a spatial transformer and test it after each epoch, in two functions."""
    torch.manual_seed(1)
    model = LocalisationNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)

    def train(epoch: int) -> None:
        model.train()
        for batch_idx, (data, target) in enumerate(run.batches(), run.batch_number):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            if batch_idx % 5 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}] Loss: {loss.item():.6f}")

    def test() -> None:
        with torch.no_grad():
            model.eval()
            test_loss, correct = 0.0, 0
            for data, target in load(pictures(16), shuffle=False):
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                correct += output.max(1, keepdim=True)[1].eq(target.view(-1, 1)).sum().item()
            print(f"Test set: Average loss: {test_loss / 16:.4f}, Accuracy: {correct}/16")

    for epoch in run.epochs(load(pictures())):
        train(epoch)
        test()


def recomputes_segments() -> Recipe:
    """Checkpoint a deep network by segments, with dropout, channels_last and accumulation."""
    torch.manual_seed(4)
    layers = [
        nn.Sequential(nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.1))
        for i in range(4)
    ]
    model = nn.ModuleDict({"body": nn.Sequential(*layers), "head": nn.Linear(4, CLASSES)}).to(
        memory_format=torch.channels_last
    )

    def loss(model, batch):
        x, y = batch
        x = x.contiguous(memory_format=torch.channels_last)
        features = checkpoint_sequential(model["body"], 2, x, use_reentrant=False)
        return F.cross_entropy(model["head"](features.mean((2, 3))), y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7, T_mult=2)
    return Recipe(
        model=model, data=pictures(), optimizer=optimizer, schedule=[cosine], loss=loss, batch_size=4, grad_accum=2,
        evaluate=lambda model: {"bias": model["head"].bias.mean()},
    )  # fmt: skip

"""Tutorials of learning itself: several tasks, several clients, few samples, contrast, unlearning and adapters."""

import copy
import math
import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from holdfast import Recipe, Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, Windows, labelled, load, pictures, rows


def net(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, outputs))


def meta_learns(run: Run, inner_lr: float = 0.05, tasks: int = 3) -> None:
    """MAML: adapt by functional calls to sines, with inner rates that are learned, and differentiate twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))
    rates = {name: torch.full((), inner_lr, requires_grad=True) for name, _ in model.named_parameters()}
    meta_opt = torch.optim.Adam([*model.parameters(), *rates.values()], lr=0.005)
    run.keep(model=model, rates=rates, meta_opt=meta_opt)
    for step in run.steps(per_epoch=STEPS):
        meta_opt.zero_grad()
        qry_losses = []
        for _ in range(tasks):
            amplitude, phase = np.random.uniform(0.1, 5.0), np.random.uniform(0, np.pi)
            x = torch.rand(10, 1) * 10 - 5
            y = amplitude * torch.sin(x + phase)
            params = dict(model.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(model, params, (x[:5],)), y[:5])
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                params = {name: p - rates[name] * g for (name, p), g in zip(params.items(), grads)}
            qry_loss = F.mse_loss(functional_call(model, params, (x[5:],)), y[5:])
            (qry_loss / tasks).backward()
            qry_losses.append(qry_loss.detach())
        meta_opt.step()
        step.log(loss=torch.stack(qry_losses).mean())


class EpisodeSampler(Sampler):
    """Yields an episode's indices: some classes, and some samples of each."""

    def __init__(self, labels, n_way: int, n_per: int, episodes: int) -> None:
        self.labels, self.n_way, self.n_per, self.episodes = np.asarray(labels), n_way, n_per, episodes
        self.rng = np.random.RandomState(4)

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self):
        for _ in range(self.episodes):
            classes = self.rng.choice(np.unique(self.labels), self.n_way, replace=False)
            yield [
                int(i) for c in classes for i in self.rng.choice(np.flatnonzero(self.labels == c), self.n_per, False)
            ]


def learns_from_few(run: Run, n_way: int = 3, n_support: int = 2, n_query: int = 3) -> None:
    """A prototypical network, whose batch sampler draws episodes by a generator of its own."""
    torch.manual_seed(1)
    dataset = pictures()
    sampler = EpisodeSampler(dataset.tensors[1], n_way, n_support + n_query, STEPS)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(DataLoader(dataset, batch_sampler=sampler)):
        accuracies = []
        for x, _ in run.batches():
            z = model(x).view(n_way, n_support + n_query, -1)
            prototypes, queries = z[:, :n_support].mean(1), z[:, n_support:].reshape(n_way * n_query, -1)
            log_p = (-torch.cdist(queries, prototypes)).log_softmax(1)
            wanted = torch.arange(n_way).repeat_interleave(n_query)
            loss = F.nll_loss(log_p, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracies.append((log_p.argmax(1) == wanted).float().mean().item())
            run.log(loss=loss)
        scheduler.step()
        print(epoch, sum(accuracies) / len(accuracies))


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = (
            nn.Linear(8, 12),
            nn.ModuleDict({"sum": nn.Linear(12, 1), "label": nn.Linear(12, CLASSES)}),
        )
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        x = self.body(x).relu()
        return {name: head(x) for name, head in self.heads.items()}


def weighs_tasks_by_uncertainty(run: Run) -> None:
    """Two tasks with learned uncertainties, gradients projected in random order, and a loader of both."""
    torch.manual_seed(2)
    (x, y), (_, labels) = rows().tensors, labelled().tensors
    model = MultiTask()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n != "log_vars"]},
            {"params": [model.log_vars], "lr": 0.05},
        ],
        lr=0.01,
    )
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(TensorDataset(x, y, labels))):
        for x, y, label in run.batches():
            out = model(x)
            raw = [F.mse_loss(out["sum"], y), F.cross_entropy(out["label"], label)]
            losses = [loss * torch.exp(-v) + v for loss, v in zip(raw, model.log_vars)]
            shared = list(model.body.parameters())
            grads = [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, shared, retain_graph=True)])
                for loss in losses
            ]
            projected = [g.clone() for g in grads]
            for g in projected:
                for other in random.sample(grads, len(grads)):
                    dot = g @ other
                    if dot < 0:
                        g -= dot / other.square().sum() * other
            optimizer.zero_grad()
            sum(losses).backward()
            nn.utils.vector_to_parameters(sum(projected), [p.grad for p in shared])
            for p, g in zip(shared, sum(projected).split([p.numel() for p in shared])):
                p.grad = g.view_as(p).clone()
            optimizer.step()
            run.log(loss=sum(raw), sum=raw[0], label=raw[1])
        print(epoch, model.log_vars.tolist())


def normalises_gradients(run: Run, alpha: float = 1.5) -> None:
    """GradNorm: weights of tasks with an optimizer of their own, and the losses of the first step."""
    torch.manual_seed(3)
    (x, y), (_, labels) = rows().tensors, labelled().tensors
    model = MultiTask()
    weights = torch.ones(2, requires_grad=True)
    optimizer, weights_optimizer = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam([weights], lr=0.02)
    state = {"initial": None}
    run.keep(model=model, weights=weights, optimizer=optimizer, weights_optimizer=weights_optimizer, state=state)
    for epoch in run.epochs(load(TensorDataset(x, y, labels))):
        for x, y, label in run.batches():
            out = model(x)
            losses = torch.stack([F.mse_loss(out["sum"], y), F.cross_entropy(out["label"], label)])
            if state["initial"] is None:
                state["initial"] = losses.detach().clone()
            optimizer.zero_grad()
            (weights * losses).sum().backward(retain_graph=True)
            weights.grad = None
            norms = torch.stack([
                torch.autograd.grad(w * loss, model.body.weight, retain_graph=True, create_graph=True)[0].norm()
                for w, loss in zip(weights, losses)
            ])  # fmt: skip
            ratio = losses.detach() / state["initial"]
            wanted = (norms.mean() * (ratio / ratio.mean()) ** alpha).detach()
            (gradient,) = torch.autograd.grad((norms - wanted).abs().sum(), weights)
            weights_optimizer.zero_grad()
            weights.grad = gradient
            weights_optimizer.step()
            optimizer.step()
            with torch.no_grad():
                weights.mul_(2 / weights.sum())
            run.log(loss=losses.sum())
        print(epoch, weights.tolist())


class Client:
    """A client of a federation: its own data, its own control variate."""

    def __init__(self, number: int, model: nn.Module) -> None:
        g = torch.Generator().manual_seed(number)
        self.x = torch.randn(32, 8, generator=g) + number / 4
        self.y = self.x.sum(1, keepdim=True) + number / 10
        self.control = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def train(self, weights, control, local_steps: int = 3, lr: float = 0.01):
        model = net()
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(local_steps):
            chosen = torch.randperm(len(self.x))[:BATCH]
            loss = F.mse_loss(model(self.x[chosen]), self.y[chosen])
            optimizer.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                p.grad += control[name] - self.control[name]
            optimizer.step()
        new = OrderedDict((name, p.detach().clone()) for name, p in model.named_parameters())
        for name, p in new.items():
            self.control[name] += (weights[name] - p) / (local_steps * lr) - control[name]
        return new, loss.item(), len(self.x)


def federates(run: Run, share: float = 0.5, num_clients: int = 6) -> None:
    """SCAFFOLD in one process: clients are drawn by NumPy, train copies, and a server with momentum averages."""
    np.random.seed(0)
    global_model = net()
    clients = [Client(number, global_model) for number in range(num_clients)]
    control = {name: torch.zeros_like(p) for name, p in global_model.named_parameters()}
    server = torch.optim.SGD(global_model.parameters(), lr=1.0, momentum=0.5)
    run.keep(global_model=global_model, server=server, control=control)
    run.keep(controls=[client.control for client in clients])
    for step in run.steps(per_epoch=STEPS):
        weights = copy.deepcopy(global_model.state_dict())
        torch.manual_seed(1000 + step.number)
        chosen = np.random.choice(num_clients, max(int(share * num_clients), 1), replace=False)
        results = [clients[i].train(weights, control) for i in chosen]
        total = sum(count for _, _, count in results)
        server.zero_grad()
        for name, p in global_model.named_parameters():
            mean = sum(new[name] * count for new, _, count in results) / total
            p.grad = p.detach() - mean
        server.step()
        for name in control:
            control[name] = torch.stack([client.control[name] for client in clients]).mean(0)
        step.log(loss=sum(loss for _, loss, _ in results) / len(results))


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, r: int = 2, alpha: float = 4.0, dropout: float = 0.1) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = (
            nn.Parameter(torch.zeros(r, base.in_features)),
            nn.Parameter(torch.zeros(base.out_features, r)),
        )
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scaling, self.dropout, self.merged = alpha / r, nn.Dropout(dropout), False

    def forward(self, x):
        if self.merged:
            return self.base(x)
        return self.base(x) + self.dropout(x) @ self.lora_a.T @ self.lora_b.T * self.scaling

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.base.weight += sign * self.scaling * self.lora_b @ self.lora_a
        self.merged = sign > 0


def merges_adapters(run: Run) -> None:
    """LoRA in bf16 beside frozen weights: merge for the validation and unmerge, LoRA+ rates, restart at each epoch."""
    torch.manual_seed(4)
    model = nn.Sequential(LoRALinear(nn.Linear(8, 16)), nn.GELU(), LoRALinear(nn.Linear(16, 1)))
    groups = [
        {"params": [p for n, p in model.named_parameters() if "lora_a" in n], "lr": 0.005},
        {"params": [p for n, p in model.named_parameters() if "lora_b" in n], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups)
    run.keep(model=model, optimizer=optimizer)
    layers = [each for each in model if isinstance(each, LoRALinear)]
    for epoch in run.epochs(load(rows())):
        model.train()
        for x, y in run.batches():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        model.eval()
        for layer in layers:
            layer.merge(1)
        with torch.no_grad():
            print(epoch, F.mse_loss(model(rows(24).tensors[0] * 1.1), rows(24).tensors[1]).item())
        if epoch % 2:  # ReLoRA: keep what is merged, and begin the adapter anew
            for layer in layers:
                nn.init.normal_(layer.lora_a, std=0.2)
                nn.init.zeros_(layer.lora_b)
                layer.merged = False
            optimizer.state.clear()
        else:
            for layer in layers:
                layer.merge(-1)


def clusters_online(run: Run, queue_length: int = 24, epsilon: float = 0.05) -> None:
    """SwAV: prototypes that are normalised and frozen at first, Sinkhorn, and a queue that begins later."""
    torch.manual_seed(5)
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)),
            "prototypes": nn.Linear(6, 5, bias=False),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    state = {"queue": None, "use_the_queue": False}
    run.keep(model=model, optimizer=optimizer, state=state)

    def sinkhorn(scores):
        q = torch.exp(scores / epsilon).T
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(1, keepdim=True) * q.shape[0]
            q /= q.sum(0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).T

    for epoch in run.epochs(load(rows())):
        if epoch >= 1 and state["queue"] is None:
            state["queue"] = torch.zeros(2, queue_length, 6)
        for it, (x, _) in enumerate(run.batches(), run.batch_number):
            with torch.no_grad():
                model["prototypes"].weight.copy_(F.normalize(model["prototypes"].weight, dim=1))
            z = [F.normalize(model["encoder"](x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2)]
            scores = [model["prototypes"](each) for each in z]
            loss = 0
            for i in range(2):
                with torch.no_grad():
                    out = scores[i].detach()
                    if state["queue"] is not None:
                        if state["use_the_queue"] or not torch.all(state["queue"][i, -1] == 0):
                            state["use_the_queue"] = True
                            out = torch.cat([state["queue"][i] @ model["prototypes"].weight.T, out])
                        state["queue"][i, len(x) :] = state["queue"][i, : -len(x)].clone()
                        state["queue"][i, : len(x)] = z[i].detach()
                    q = sinkhorn(out)[-len(x) :]
                loss = loss - (q * (scores[1 - i] / 0.1).log_softmax(1)).sum(1).mean() / 2
            optimizer.zero_grad()
            loss.backward()
            if epoch * STEPS + it < 5:
                model["prototypes"].weight.grad = None
            optimizer.step()
            run.log(loss=loss)
        print(epoch, loss.item(), state["use_the_queue"])


def clusters_deeply(run: Run, k: int = 4) -> None:
    """DeepCluster: k-means of all features before each epoch, and a new head for the assignments."""
    torch.manual_seed(6)
    data = rows().tensors[0]
    model, head = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6)), nn.Linear(6, k)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    head_optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    assigned = torch.zeros(len(data), dtype=torch.long)
    run.keep(model=model, head=head, optimizer=optimizer, head_optimizer=head_optimizer, assigned=assigned)

    def assign() -> None:
        with torch.no_grad():
            features = F.normalize(model(data), dim=1)
            centres = features[torch.randperm(len(features))[:k]]
            for _ in range(5):
                nearest = torch.cdist(features, centres).argmin(1)
                for i in range(k):
                    if (nearest == i).any():
                        centres[i] = features[nearest == i].mean(0)
            assigned.copy_(nearest)
            head.weight.normal_(0, 0.1)
            head.bias.zero_()

    assign()
    for epoch in run.epochs(load(TensorDataset(data, torch.arange(len(data))))):
        for x, index in run.batches():
            loss = F.cross_entropy(head(model(x + 0.1 * torch.randn_like(x))), assigned[index])
            optimizer.zero_grad()
            head_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            head_optimizer.step()
            run.log(loss=loss)
        assign()
        print(epoch, torch.bincount(assigned, minlength=k).tolist())


class CLIP(nn.Module):
    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GELU(), nn.Linear(16, dim))
        self.token_embedding, self.text_projection = nn.Embedding(12, 8), nn.Parameter(torch.randn(8, dim) * 8**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        a = F.normalize(self.visual(image), dim=-1)
        b = F.normalize(self.token_embedding(text).mean(1) @ self.text_projection, dim=-1)
        return a, b, self.logit_scale.exp()


def contrasts_pictures_with_words(run: Run, accum_freq: int = 2) -> None:
    """CLIP with cached features of accumulated batches, a clamped scale, and a schedule of the step."""
    torch.manual_seed(7)
    images, labels = pictures().tensors
    words = (labels[:, None] * 3 + torch.arange(len(labels))[:, None] % 2 + torch.arange(3)) % 12
    model = CLIP()
    gain_or_bias = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": gain_or_bias, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}], lr=0.01
    )
    cache = {"images": [], "texts": []}
    run.keep(model=model, optimizer=optimizer, cache=cache)
    for step in run.steps(load(TensorDataset(images, words))):
        image, text = step.batch
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (step.number + 1) / 8)
        cache["images"].append(image)
        cache["texts"].append(text)
        if len(cache["images"]) < accum_freq:
            continue
        optimizer.zero_grad()
        with torch.no_grad():
            features = [model(i, t)[:2] for i, t in zip(cache["images"], cache["texts"])]
        for j in range(accum_freq):
            a, b, scale = model(cache["images"][j], cache["texts"][j])
            all_a = torch.cat([a if k == j else features[k][0] for k in range(accum_freq)])
            all_b = torch.cat([b if k == j else features[k][1] for k in range(accum_freq)])
            logits = scale * all_a @ all_b.T
            wanted = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        cache["images"], cache["texts"] = [], []
        step.log(loss=loss, scale=scale)


def learns_continually(run: Run, size: int = 16) -> None:
    """A task in each epoch, with a reservoir of earlier samples and their logits, and synaptic intelligence."""
    random.seed(3)
    model = net(CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    memory = {"examples": [], "num_seen": 0}
    path = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    omega = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.keep(model=model, optimizer=optimizer, memory=memory, path=path, omega=omega, old=old)
    for task in run.epochs(load(labelled())):
        angle = task * math.pi / 8
        turn = torch.eye(8)
        turn[:2, :2] = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        for x, y in run.batches():
            x = x @ turn
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            plain = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            if memory["examples"]:
                drawn = random.choices(memory["examples"], k=4)
                buf_x, buf_logits = torch.stack([d[0] for d in drawn]), torch.stack([d[1] for d in drawn])
                loss = loss + 0.5 * F.mse_loss(model(buf_x), buf_logits)
            loss = loss + sum((omega[n] * (p - old[n]).square()).sum() for n, p in model.named_parameters())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for (name, p), g in zip(model.named_parameters(), plain):
                path[name] -= g * (p.detach() - before[name])
            for each, out in zip(x, logits.detach()):
                memory["num_seen"] += 1
                if len(memory["examples"]) < size:
                    memory["examples"].append((each, out))
                elif (place := random.randrange(memory["num_seen"])) < size:
                    memory["examples"][place] = (each, out)
            run.log(loss=loss)
        for name, p in model.named_parameters():
            omega[name] += F.relu(path[name]) / ((p.detach() - old[name]).square() + 1e-3)
            old[name] = p.detach().clone()
            path[name].zero_()
        print(task, memory["num_seen"], sum(float(w.sum()) for w in omega.values()))


def co_teaches(run: Run, forget_rate: float = 0.25) -> None:
    """Two networks choose each other's samples of small loss, at a rate that grows by epoch, with a mean teacher."""
    torch.manual_seed(8)
    one, two = net(CLASSES), net(CLASSES)
    for p in two.parameters():
        nn.init.normal_(p, std=0.2)
    teacher = copy.deepcopy(one).requires_grad_(False)
    optimizers = {
        "one": torch.optim.Adam(one.parameters(), lr=0.01),
        "two": torch.optim.Adam(two.parameters(), lr=0.01),
    }
    state = {"global_step": 0}
    run.keep(one=one, two=two, teacher=teacher, optimizers=optimizers, state=state)
    for epoch in run.epochs(load(labelled())):
        remember = 1 - forget_rate * min(1, epoch / 2)
        for x, y in run.batches():
            y = torch.where(torch.rand(len(y)) < 0.1, torch.randint(CLASSES, y.shape), y)
            losses = [F.cross_entropy(each(x), y, reduction="none") for each in (one, two)]
            count = int(remember * len(y))
            chosen = [loss.argsort()[:count] for loss in losses]
            drawn = F.mse_loss(one(x).softmax(1), teacher(x + 0.1 * torch.randn_like(x)).softmax(1))
            weight = math.exp(-5 * (1 - min(1, state["global_step"] / 20)) ** 2)
            total = losses[0][chosen[1]].mean() + weight * drawn, losses[1][chosen[0]].mean()
            for optimizer, loss in zip(optimizers.values(), total):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            state["global_step"] += 1
            alpha = min(1 - 1 / (state["global_step"] + 1), 0.99)
            for ema, p in zip(teacher.parameters(), one.parameters()):
                ema.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
            run.log(loss=total[0])
        print(epoch, total[0].item(), total[1].item())


class Sampled(Windows):
    """Windows with the pairs that a preference has."""

    def __getitem__(self, index: int):
        prompt, chosen = super().__getitem__(index)
        return prompt, chosen, (chosen * 5 + 1) % 12


def prefers_directly(run: Run, beta: float = 0.1) -> None:
    """DPO: a policy against a frozen reference that is synchronised now and then, with a running reward margin."""
    torch.manual_seed(9)

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True, num_layers=2, dropout=0.1)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, prompt, answer):
            out, _ = self.rnn(self.embed(torch.cat([prompt, answer[:, :-1]], 1)))
            log_p = self.head(out[:, prompt.shape[1] - 1 :]).log_softmax(-1)
            return log_p.gather(2, answer[..., None]).squeeze(2).sum(1)

    policy = Language()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=0.002)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    state = {"margin": 0.0}
    run.keep(policy=policy, reference=reference, optimizer=optimizer, scheduler=scheduler, state=state)
    for step in run.steps(load(Sampled())):
        prompt, chosen, rejected = step.batch
        with torch.no_grad():
            ref_chosen, ref_rejected = reference(prompt, chosen), reference(prompt, rejected)
        rewards = beta * (policy(prompt, chosen) - ref_chosen), beta * (policy(prompt, rejected) - ref_rejected)
        margin = rewards[0] - rewards[1]
        state["margin"] = 0.9 * state["margin"] + 0.1 * margin.mean().item()
        loss = -F.logsigmoid(margin - 0.1 * state["margin"]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        if step.number % 15 == 14:
            for ref, p in zip(reference.parameters(), policy.parameters()):
                ref.data.mul_(0.4).add_(p.data, alpha=0.6)
        step.log(loss=loss, margin=state["margin"])


def attends_to_words(run: Run, teacher_forcing: float = 0.5) -> None:
    """Seq2seq with Bahdanau attention: an encoder and a decoder with an optimizer each, and plot losses in a list."""
    torch.manual_seed(10)
    random.seed(1)
    hidden = 8
    encoder = nn.ModuleDict(
        {"embed": nn.Embedding(14, hidden), "gru": nn.GRU(hidden, hidden, batch_first=True), "drop": nn.Dropout(0.1)}
    )
    decoder = nn.ModuleDict({
        "embed": nn.Embedding(14, hidden), "gru": nn.GRUCell(2 * hidden, hidden), "out": nn.Linear(hidden, 14),
        "wa": nn.Linear(hidden, hidden), "ua": nn.Linear(hidden, hidden), "va": nn.Linear(hidden, 1),
    })  # fmt: skip
    encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
    decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.01)
    run.keep(encoder=encoder, decoder=decoder)
    run.keep(encoder_optimizer=encoder_optimizer, decoder_optimizer=decoder_optimizer)
    plot_losses, total = [], 0.0
    for epoch in run.epochs(load(Windows())):
        for source, target in run.batches():
            keys, state = encoder["gru"](encoder["drop"](encoder["embed"](source)))
            state, word = state[0], torch.full((len(source),), 12)
            is_forced, steps = random.random() < teacher_forcing, []
            for i in range(target.shape[1]):
                scores = decoder["va"](torch.tanh(decoder["wa"](state)[:, None] + decoder["ua"](keys)))
                context = (scores.softmax(1) * keys).sum(1)
                state = decoder["gru"](torch.cat([decoder["embed"](word), context], 1), state)
                steps.append(decoder["out"](state))
                word = target[:, i] if is_forced else steps[-1].argmax(1)
            loss = F.cross_entropy(torch.stack(steps, 1).flatten(0, 1), target.flatten())
            for optimizer in (encoder_optimizer, decoder_optimizer):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (encoder_optimizer, decoder_optimizer):
                optimizer.step()
            total += loss.item()
            run.log(loss=loss)
        plot_losses.append(total / STEPS)
        total = 0.0
        print(epoch, plot_losses)


def walks_graphs(run: Run) -> None:
    """GraphSAGE on neighbours that Python's random chooses, with historical embeddings of all nodes, and DropEdge."""
    random.seed(11)
    torch.manual_seed(11)
    nodes = 40
    neighbours = {
        i: sorted({(i * 3 + 1) % nodes, (i * 7 + 2) % nodes, (i + 1) % nodes, (i - 1) % nodes}) for i in range(nodes)
    }
    features = torch.randn(nodes, 8)
    labels = (features[:, 0] > 0).long()
    model = nn.ModuleDict({"first": nn.Linear(16, 8), "second": nn.Linear(16, 2)})
    history = torch.zeros(nodes, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer, history=history)
    for epoch in run.epochs(load(TensorDataset(torch.arange(nodes)), batch_size=4)):
        for (batch,) in run.batches():

            def mean(table, chosen):
                return torch.stack([table[random.sample(neighbours[int(i)], 2)].mean(0) for i in chosen])

            h = model["first"](torch.cat([features[batch], mean(features, batch)], 1)).relu()
            out = model["second"](torch.cat([h, mean(history, batch)], 1))
            history[batch] = h.detach()
            loss = F.cross_entropy(out, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(epoch, loss.item())


def alternates() -> Recipe:
    """Alternating least squares and gradients: factors that a step solves in closed form beside a network's weights."""

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = (
                nn.Parameter(torch.randn(12, 3)),
                nn.Parameter(torch.randn(10, 3), requires_grad=False),
            )
            self.bias = nn.Parameter(torch.zeros(()))

    torch.manual_seed(12)
    model = Factors()
    target = torch.randn(12, 10)
    optimizer = torch.optim.SGD([model.users, model.bias], lr=0.1)

    def step(batch):
        (rows_,) = batch
        loss = ((model.users[rows_] @ model.items.T + model.bias) - target[rows_]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            u = model.users
            model.items.copy_(torch.linalg.solve(u.T @ u + 0.1 * torch.eye(3), u.T @ (target - model.bias)).T)
        return {"loss": loss}

    return Recipe(
        model=model, data=TensorDataset(torch.arange(12).repeat(5)), optimizer=optimizer, step=step, batch_size=6,
    )  # fmt: skip

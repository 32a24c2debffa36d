"""Tutorials of generative models whose state is unusual: pools of pictures, codebooks, growth, teachers, moments."""

import copy
import math
import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from holdfast import Recipe, Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, load, pictures, rows


class ImagePool:
    """Returns earlier pictures at random, as the buffer of a cycle does."""

    def __init__(self, pool_size: int) -> None:
        self.pool_size, self.num_imgs, self.images = pool_size, 0, []

    def query(self, images):
        chosen = []
        for image in images.detach():
            image = image.unsqueeze(0)
            if self.num_imgs < self.pool_size:
                self.num_imgs += 1
                self.images.append(image)
                chosen.append(image)
            elif random.uniform(0, 1) > 0.5:
                index = random.randint(0, self.pool_size - 1)
                chosen.append(self.images[index].clone())
                self.images[index] = image
            else:
                chosen.append(image)
        return torch.cat(chosen)


def generator(width: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(1, width, 3), nn.InstanceNorm2d(width), nn.ReLU(True), nn.Dropout(0.2),
        nn.Conv2d(width, 1, 3, padding=1), nn.Sigmoid(),
    )  # fmt: skip


def discriminator() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3, padding=1))


def cycles(run: Run, lambda_a: float = 10.0) -> None:
    """CycleGAN: two generators, two discriminators with pools of pictures, and rates that decay by epoch."""
    torch.manual_seed(0)
    random.seed(0)
    g_a, g_b, d_a, d_b = generator(), generator(), discriminator(), discriminator()
    optimizer_g = torch.optim.Adam([*g_a.parameters(), *g_b.parameters()], lr=0.002, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam([*d_a.parameters(), *d_b.parameters()], lr=0.002, betas=(0.5, 0.999))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 1.0 - max(0, epoch - 1) / 4)
        for each in (optimizer_g, optimizer_d)
    ]
    fake_a_pool, fake_b_pool = ImagePool(12), ImagePool(12)
    run.keep(g_a=g_a, g_b=g_b, d_a=d_a, d_b=d_b, optimizer_g=optimizer_g, optimizer_d=optimizer_d)
    run.keep(schedulers=schedulers, fake_a_pool=vars(fake_a_pool), fake_b_pool=vars(fake_b_pool))

    def gan_loss(prediction, is_real: bool):
        return F.mse_loss(prediction, torch.full_like(prediction, float(is_real)))

    for epoch in run.epochs(load(pictures())):
        for real_a, _ in run.batches():
            real_b = 1 - real_a.flip(3)
            fake_b, fake_a = g_a(real_a), g_b(real_b)
            for each in (d_a, d_b):
                each.requires_grad_(False)
            loss_g = gan_loss(d_a(fake_b), True) + gan_loss(d_b(fake_a), True)
            loss_g = loss_g + lambda_a * (F.l1_loss(g_b(fake_b), real_a) + F.l1_loss(g_a(fake_a), real_b))
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
            for each in (d_a, d_b):
                each.requires_grad_(True)
            optimizer_d.zero_grad()
            for net_d, real, fake, pool in ((d_a, real_b, fake_b, fake_b_pool), (d_b, real_a, fake_a, fake_a_pool)):
                loss_d = (gan_loss(net_d(real), True) + gan_loss(net_d(pool.query(fake)), False)) * 0.5
                loss_d.backward()
            optimizer_d.step()
            run.log(loss=loss_g, loss_d=loss_d)
        for scheduler in schedulers:
            scheduler.step()
        print(f"End of epoch {epoch}, learning rate {optimizer_g.param_groups[0]['lr']:.7f}")


class VectorQuantizerEMA(nn.Module):
    """Codes that follow by an average, and restart at random inputs if they are rarely used."""

    def __init__(self, codes: int = 8, dim: int = 4, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(codes, dim))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.embed.clone())
        self.register_buffer("initted", torch.tensor(False))

    def forward(self, z):
        if self.training and not self.initted:
            self.embed.copy_(z.detach()[torch.randperm(len(z))[: len(self.embed)]])
            self.embed_avg.copy_(self.embed)
            self.initted.fill_(True)
        index = torch.cdist(z, self.embed).argmin(1)
        hot = F.one_hot(index, len(self.embed)).type(z.dtype)
        quantised = self.embed[index]
        if self.training:
            with torch.no_grad():
                self.cluster_size.lerp_(hot.sum(0), 1 - self.decay)
                self.embed_avg.lerp_(hot.T @ z, 1 - self.decay)
                self.embed.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-3)[:, None])
                rare = self.cluster_size < 0.2
                if rare.any():
                    self.embed[rare] = z[torch.randint(len(z), (int(rare.sum()),))]
                    self.embed_avg[rare], self.cluster_size[rare] = self.embed[rare], 1.0
        return z + (quantised - z).detach(), F.mse_loss(z, quantised.detach()), index


def quantises_vectors(run: Run) -> None:
    """VQ-VAE whose codes begin with the first batch, and restart when they die."""
    torch.manual_seed(1)
    model = nn.ModuleDict({
        "encoder": nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)),
        "quantizer": VectorQuantizerEMA(),
        "decoder": nn.Sequential(nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1)),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        used = set()
        for x, _ in run.batches():
            z = model["encoder"](x)
            flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
            flat, commitment, index = model["quantizer"](flat)
            z = flat.reshape(len(x), *z.shape[2:], -1).permute(0, 3, 1, 2)
            recon = F.mse_loss(model["decoder"](z), x)
            optimizer.zero_grad()
            (recon + 0.25 * commitment).backward()
            optimizer.step()
            used.update(index.tolist())
            run.log(loss=recon, commitment=commitment)
        print(f"epoch {epoch}: {len(used)} codes, recon {recon.item():.4f}")


class ActNorm(nn.Module):
    """Normalises by the statistics of the first batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.ones(size))
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
            self.initialized.fill_(1)
        return self.scale * (x + self.loc), self.scale.abs().log().sum()


class Glow(nn.Module):
    def __init__(self, size: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ActNorm(size) for _ in range(depth))
        self.mixes = nn.ParameterList(torch.linalg.qr(torch.randn(size, size))[0] for _ in range(depth))
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(size // 2, 12), nn.ReLU(), nn.Linear(12, size)) for _ in range(depth)
        )

    def forward(self, x):
        total = torch.zeros(len(x))
        for norm, mix, net in zip(self.norms, self.mixes, self.nets):
            x, log_det = norm(x)
            total = total + log_det + torch.linalg.slogdet(mix)[1]
            a, b = (x @ mix).chunk(2, 1)
            log_s, t = net(a).chunk(2, 1)
            s = torch.sigmoid(log_s + 2)
            x = torch.cat([a, (b + t) * s], 1)
            total = total + s.log().sum(1)
        return -0.5 * x.square().sum(1) + total - 4 * math.log(2 * math.pi)


def begins_with_its_first_batch(run: Run) -> None:
    """Glow: activation norm that the first batch initialises, and dequantised data."""
    torch.manual_seed(2)
    model = Glow()
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(rows(), drop_last=True)):
        for i, (x, _) in enumerate(run.batches(), run.batch_number):
            loss = -model(x + torch.rand_like(x) / 32).mean() / (8 * math.log(2))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5)
            optimizer.param_groups[0]["lr"] = 0.01 * min(1, (epoch * STEPS + i + 1) / 15)
            optimizer.step()
            run.log(loss=loss)
        print(f"epoch {epoch}: {loss.item():.4f} bits")


class Grower(nn.Module):
    """Fades new resolutions in by a buffer, which the loop raises."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 16), nn.Conv2d(1, 1, 3, padding=1)
        self.register_buffer("alpha", torch.zeros(()))

    def forward(self, z):
        small = self.low(z).view(-1, 1, 4, 4)
        large = F.interpolate(small, scale_factor=2, mode="nearest")
        return torch.tanh((1 - self.alpha) * large + self.alpha * self.high(large))


def grows_progressively(run: Run, ema_decay: float = 0.9) -> None:
    """Fade a higher resolution in, regularise lazily by R1 every fourth step, and follow a path's mean length."""
    torch.manual_seed(3)
    net_g = Grower()
    net_d = nn.Sequential(spectral_norm(nn.Conv2d(1, 4, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1))
    g_ema = copy.deepcopy(net_g).requires_grad_(False)
    g_optim = torch.optim.Adam(net_g.parameters(), lr=0.002, betas=(0.0, 0.99))
    d_optim = torch.optim.Adam(net_d.parameters(), lr=0.008, betas=(0.0, 0.99))
    mean_path_length = torch.zeros(())
    run.keep(net_g=net_g, net_d=net_d, g_ema=g_ema, g_optim=g_optim, d_optim=d_optim, mean_path_length=mean_path_length)
    for step in run.steps(load(pictures())):
        real, _ = step.batch
        net_g.alpha.fill_(min(1.0, step.number / 20))
        fake = net_g(torch.randn(len(real), 6))
        d_loss = F.softplus(net_d(fake.detach())).mean() + F.softplus(-net_d(real)).mean()
        d_optim.zero_grad()
        d_loss.backward()
        d_optim.step()
        if step.number % 4 == 0:
            real = real.clone().requires_grad_()
            (grad_real,) = torch.autograd.grad(net_d(real).sum(), real, create_graph=True)
            d_optim.zero_grad()
            (5 * grad_real.square().flatten(1).sum(1).mean()).backward()
            d_optim.step()
        z = torch.randn(len(real), 6, requires_grad=True)
        fake = net_g(z)
        g_loss = F.softplus(-net_d(fake)).mean()
        if step.number % 4 == 2:
            (grad,) = torch.autograd.grad((fake * torch.randn_like(fake) / 8).sum(), z, create_graph=True)
            lengths = grad.square().sum(1).sqrt()
            mean_path_length.lerp_(lengths.mean().detach(), 0.1)
            g_loss = g_loss + 2 * (lengths - mean_path_length).square().mean()
        g_optim.zero_grad()
        g_loss.backward()
        g_optim.step()
        for (_, mean), (_, weight) in zip(g_ema.named_parameters(), net_g.named_parameters()):
            mean.lerp_(weight.detach(), 1 - ema_decay)
        g_ema.alpha.copy_(net_g.alpha)
        step.log(loss=g_loss, d_loss=d_loss, path=mean_path_length)


class TimeNet(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.randn(4, generator=torch.Generator().manual_seed(1)))
        self.net = nn.Sequential(nn.Linear(size + 8, 16), nn.SiLU(), nn.Linear(16, size))

    def forward(self, x, t):
        angle = t[:, None] * self.freqs * 2 * math.pi
        return self.net(torch.cat([x, angle.sin(), angle.cos()], 1))


def matches_flows(run: Run) -> None:
    """Flow matching whose times follow the losses of earlier times, and sampling by Euler at each epoch's end."""
    torch.manual_seed(4)
    model = TimeNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    weights = torch.ones(8)
    run.keep(model=model, optimizer=optimizer, ema=ema, weights=weights)
    for epoch in run.epochs(load(rows())):
        for x1, _ in run.batches():
            bins = torch.multinomial(weights, len(x1), replacement=True)
            t = (bins + torch.rand(len(x1))) / len(weights)
            x0 = torch.randn_like(x1)
            xt = (1 - t[:, None]) * x0 + t[:, None] * x1
            each = (model(xt, t) - (x1 - x0)).square().mean(1)
            loss = each.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model)
            weights.index_reduce_(0, bins, each.detach(), "mean", include_self=True)
            run.log(loss=loss)
        with torch.no_grad():
            x = torch.randn(4, 8)
            for i in range(5):
                x = x + ema(x, torch.full((4,), i / 5)) / 5
        print(f"epoch {epoch}: samples of norm {x.norm(dim=1).mean():.3f}")


def is_consistent(run: Run, s0: int = 2, s1: int = 12, total: int = 40) -> None:
    """A consistency model: a teacher whose decay and number of steps follow the step."""
    torch.manual_seed(5)
    model = TimeNet()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.01)
    run.keep(model=model, teacher=teacher, optimizer=optimizer)

    def denoise(net, x, t):
        skip = 0.25 / ((t - 0.002) ** 2 + 0.25)
        out = 0.5 * (t - 0.002) / (t**2 + 0.25).sqrt()
        return skip[:, None] * x + out[:, None] * net(x, 0.25 * t.log())

    for step in run.steps(load(rows())):
        x, _ = step.batch
        n = math.ceil(math.sqrt(step.number / total * ((s1 + 1) ** 2 - s0**2) + s0**2) - 1) + 1
        mu = math.exp(s0 * math.log(0.9) / n)
        sigmas = (0.002 ** (1 / 7) + torch.arange(n) / (n - 1) * (80 ** (1 / 7) - 0.002 ** (1 / 7))) ** 7
        i, noise = torch.randint(n - 1, (len(x),)), torch.randn_like(x)
        with torch.no_grad():
            wanted = denoise(teacher, x + sigmas[i][:, None] * noise, sigmas[i])
        got = denoise(model, x + sigmas[i + 1][:, None] * noise, sigmas[i + 1])
        loss = (got - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters()):
                old.mul_(mu).add_(new, alpha=1 - mu)
        step.log(loss=loss, n=float(n))


def plays_adversaries_unequally(run: Run, n_critic: int = 3) -> None:
    """TTUR: two time scales, hinge losses, several critic steps, a balance k_t, and a deque of losses."""
    torch.manual_seed(6)
    net_g = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8))
    net_d = nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(12, 1))
    opt_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=4e-3, betas=(0.0, 0.9))
    fixed_noise = torch.randn(4, 4)
    state = {"k_t": 0.0, "real": deque(maxlen=7), "labels_flipped": 0}
    run.keep(net_g=net_g, net_d=net_d, opt_g=opt_g, opt_d=opt_d, state=state)
    rng = np.random.RandomState(3)
    run.keep(rng=rng)
    for epoch in run.epochs(load(rows())):
        for real, _ in run.batches():
            for _ in range(n_critic):
                fake = net_g(torch.randn(len(real), 4)).detach()
                a, b = (fake, real) if rng.rand() < 0.05 else (real, fake)
                state["labels_flipped"] += a is fake
                loss_d = F.relu(1 - net_d(a)).mean() + (1 + state["k_t"]) * F.relu(1 + net_d(b)).mean()
                opt_d.zero_grad()
                loss_d.backward()
                opt_d.step()
            loss_g = -net_d(net_g(torch.randn(len(real), 4))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            state["real"].append(loss_d.item())
            state["k_t"] = min(max(state["k_t"] + 0.05 * (1.5 - sum(state["real"]) / len(state["real"])), 0), 1)
            run.log(loss=loss_g, loss_d=loss_d)
        net_g.eval()
        print(epoch, net_g(fixed_noise).mean().item(), state["k_t"], state["labels_flipped"])
        net_g.train()


def masks_patches() -> Recipe:
    """A masked autoencoder with fixed positions, a learned token and random masks."""

    class MAE(nn.Module):
        def __init__(self, dim: int = 8) -> None:
            super().__init__()
            self.embed, self.token = nn.Linear(4, dim), nn.Parameter(torch.zeros(1, 1, dim))
            self.register_buffer("pos", torch.randn(1, 16, dim) * 0.1, persistent=False)
            layer = nn.TransformerEncoderLayer(dim, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
            self.decoder = nn.Sequential(nn.Linear(dim, 16), nn.GELU(), nn.Linear(16, 4))

        def forward(self, x, ratio: float = 0.75):
            patches = F.unfold(x, 2, stride=2).transpose(1, 2)
            order = torch.rand(patches.shape[:2]).argsort(1)
            keep = order[:, : int(16 * (1 - ratio))]
            tokens = self.embed(patches) + self.pos
            seen = self.encoder(torch.gather(tokens, 1, keep[..., None].expand(-1, -1, tokens.shape[-1])))
            full = self.token.expand_as(tokens).clone()
            full = full.scatter(1, keep[..., None].expand_as(seen), seen) + self.pos
            mask = torch.ones(patches.shape[:2]).scatter(1, keep, 0)
            off = (self.decoder(full) - patches).square().mean(-1)
            return (off * mask).sum() / mask.sum()

    torch.manual_seed(7)
    model = MAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, betas=(0.9, 0.95))
    return Recipe(
        model=model, data=pictures(), optimizer=optimizer, loss=lambda model, batch: model(batch[0]), batch_size=BATCH,
        schedule=[torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=50)],
        evaluate=lambda model: {"token": model.token.norm()},
    )  # fmt: skip


def relaxes_categories(run: Run, tau0: float = 1.0, anneal_rate: float = 0.02) -> None:
    """Gumbel-softmax whose temperature an array keeps and lowers every few steps, conditioned on labels."""
    torch.manual_seed(8)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64 + CLASSES, 24), nn.ReLU(), nn.Linear(24, 12))
    decoder = nn.Sequential(nn.Linear(12 + CLASSES, 24), nn.ReLU(), nn.Linear(24, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    temperature = np.array(tau0)
    run.keep(encoder=encoder, decoder=decoder, optimizer=optimizer, temperature=temperature)
    for step in run.steps(load(pictures())):
        x, y = step.batch
        c = F.one_hot(y, CLASSES).float()
        logits = encoder(torch.cat([x.flatten(1), c], 1)).view(-1, 3, 4)
        z = F.gumbel_softmax(logits, tau=float(temperature), hard=step.number % 3 == 0)
        recon = F.binary_cross_entropy(decoder(torch.cat([z.flatten(1), c], 1)), x.flatten(1))
        q = logits.softmax(-1)
        kl = (q * (q * 4 + 1e-9).log()).sum((1, 2)).mean()
        optimizer.zero_grad()
        (recon + 0.01 * kl).backward()
        optimizer.step()
        if step.number % 5 == 4:
            temperature[...] = np.maximum(temperature * np.exp(-anneal_rate * step.number), 0.5)
        step.log(loss=recon, kl=kl, tau=float(temperature))

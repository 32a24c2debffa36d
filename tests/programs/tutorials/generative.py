"""Tutorials of generative models: adversaries, autoencoders, diffusion, flows, energies."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from holdfast import Run
from tests.programs.tutorials.data import STEPS, load, pictures, rows


def spell(picture: torch.Tensor) -> str:
    """Return a picture as text."""
    return "\n".join("".join(" .:#"[int(each * 3.99)] for each in row) for row in picture.clamp(0, 1).tolist())


def dcgan(run: Run) -> None:
    """Train a generator and a discriminator by turns, and show what a fixed noise gives."""
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid())
    criterion, fixed_noise = nn.BCELoss(), torch.randn(2, 6)
    theirs = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    ours = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    state = {"iters": 0}  # says when the generator makes pictures, which its batch norm notices
    run.keep(generator=generator, discriminator=discriminator, ours=ours, theirs=theirs, state=state)
    img_list, g_losses, d_losses = [], [], []
    loader = load(pictures())
    for epoch in run.epochs(loader):
        for i, (real, _) in enumerate(run.batches()):
            discriminator.zero_grad()
            label = torch.full((len(real),), 1.0)
            err_real = criterion(discriminator(real.flatten(1)).view(-1), label)
            err_real.backward()
            fake = generator(torch.randn(len(real), 6))
            label.fill_(0.0)
            err_fake = criterion(discriminator(fake.detach()).view(-1), label)
            err_fake.backward()
            theirs.step()
            generator.zero_grad()
            label.fill_(1.0)
            err = criterion(discriminator(fake).view(-1), label)
            err.backward()
            ours.step()
            if i % 5 == 0:
                print(f"[{epoch}][{i}/{len(loader)}]\tLoss_D: {(err_real + err_fake).item():.4f}\tLoss_G: {err:.4f}")
            g_losses.append(err.item())
            d_losses.append((err_real + err_fake).item())
            if state["iters"] % 8 == 0:
                with torch.no_grad():
                    img_list.append(generator(fixed_noise).detach())
            state["iters"] += 1
            run.log(loss=err, loss_d=err_real + err_fake)


def wgan_gp(run: Run, n_critic: int = 5) -> None:
    """Penalise the critic's gradient, and step the generator every few batches."""
    torch.manual_seed(1)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
    ours = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    theirs = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    run.keep(generator=generator, critic=critic, ours=ours, theirs=theirs)
    for step in run.steps(load(rows())):
        real, _ = step.batch
        fake = generator(torch.randn(len(real), 4))
        alpha = torch.rand(len(real), 1)
        between = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        if step.number % n_critic == 0:
            ours.zero_grad()
            (-critic(fake).mean()).backward()
            ours.step()
        step.log(loss=loss, penalty=penalty)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.fc3, self.fc4 = nn.Linear(3, 16), nn.Linear(16, 64)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        return self.decode(mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)), mu, logvar


def vae(run: Run) -> None:
    """Train a variational autoencoder, test it and show samples at each epoch's end."""
    model, loader = VAE(), load(pictures())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.keep(model=model, optimizer=optimizer)

    def loss_function(recon_x, x, mu, logvar):
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
        return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())

    for epoch in run.epochs(loader):
        model.train()
        train_loss = 0
        for batch_idx, (data, _) in enumerate(run.batches()):
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            if batch_idx % 4 == 0:
                print(f"{epoch} [{batch_idx * len(data)}/{len(loader.dataset)}]\tLoss: {loss.item() / len(data):.6f}")
            run.log(loss=loss / len(data))
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(loader.dataset):.4f}")
        model.eval()
        with torch.no_grad():
            test_loss = sum(loss_function(model(x)[0], x, *model(x)[1:]).item() for x, _ in load(pictures(16)))
            run.show(sample=spell(model.decode(torch.randn(1, 3)).view(8, 8)))
        print(f"====> Test set loss: {test_loss / 16:.4f}")


def diffuses(run: Run, steps: int = 20) -> None:
    """Train a denoiser with an average of its weights, and sample from the average at each epoch's end."""
    torch.manual_seed(1)
    betas = torch.linspace(1e-3, 0.2, steps)
    alphas_bar = torch.cumprod(1 - betas, 0)
    model = nn.Sequential(nn.Linear(9, 24), nn.SiLU(), nn.Linear(24, 8))
    ema_model = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model=model, ema_model=ema_model, optimizer=optimizer)

    @torch.no_grad()
    def update_ema(decay=0.9):
        for ours, theirs in zip(ema_model.parameters(), model.parameters()):
            ours.mul_(decay).add_(theirs, alpha=1 - decay)

    @torch.no_grad()
    def sample():
        x = torch.randn(4, 8)
        for t in reversed(range(steps)):
            noise = ema_model(torch.cat([x, torch.full((4, 1), t / steps)], 1))
            x = (x - betas[t] / (1 - alphas_bar[t]).sqrt() * noise) / (1 - betas[t]).sqrt()
            x = x + betas[t].sqrt() * torch.randn_like(x) if t else x
        return x

    for epoch in run.epochs(load(rows())):
        for x, _ in run.batches():
            t, noise = torch.randint(steps, (len(x),)), torch.randn_like(x)
            share = alphas_bar[t][:, None]
            noisy = share.sqrt() * x + (1 - share).sqrt() * noise
            loss = F.mse_loss(model(torch.cat([noisy, t[:, None] / steps], 1)), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_ema()
            run.log(loss=loss)
        print(f"epoch {epoch}: samples have {sample().std():.3f}")


class Sampler:
    """Draws samples by Langevin steps, mostly from those that it drew before."""

    def __init__(self, model, max_len: int = 40) -> None:
        self.model, self.max_len = model, max_len
        self.examples = [torch.rand(1, 8) * 2 - 1 for _ in range(8)]

    def sample_new_exmps(self, steps: int = 4, step_size: float = 0.1):
        n_new = sum(random.random() < 0.05 for _ in range(8))
        rand_imgs = torch.rand(n_new, 8) * 2 - 1
        old_imgs = torch.cat(random.choices(self.examples, k=8 - n_new), dim=0)
        inp = torch.cat([rand_imgs, old_imgs], dim=0).detach()
        for _ in range(steps):
            inp = (inp + 0.005 * torch.randn_like(inp)).requires_grad_(True)
            (slope,) = torch.autograd.grad(-self.model(inp).sum(), inp)
            inp = (inp - step_size * slope.clamp(-0.1, 0.1)).detach().clamp(-1, 1)
        self.examples[:] = [*inp.chunk(8, dim=0), *self.examples][: self.max_len]
        return inp


def learns_energies(run: Run) -> None:
    """Train an energy by contrastive divergence, with a buffer of earlier samples."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))
    sampler = Sampler(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.0, 0.999))
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.97)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, examples=sampler.examples)
    for _ in run.epochs(load(rows())):
        for real, _ in run.batches():
            real = (real + torch.randn_like(real) * 0.005).clamp(-1, 1)
            fake = sampler.sample_new_exmps()
            real_out, fake_out = model(torch.cat([real, fake], dim=0)).chunk(2, dim=0)
            loss = 0.1 * (real_out**2 + fake_out**2).mean() + fake_out.mean() - real_out.mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            run.log(loss=loss)
        scheduler.step()


class Coupling(nn.Module):
    def __init__(self, mask) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 16))
        self.register_buffer("mask", mask)

    def forward(self, x):
        s, t = self.net(x * self.mask).chunk(2, 1)
        s, t = torch.tanh(s) * (1 - self.mask), t * (1 - self.mask)
        return x * s.exp() + t, s.sum(1)


def flows(run: Run) -> None:
    """Train a normalising flow of couplings by its likelihood."""
    torch.manual_seed(1)
    mask = torch.arange(8) % 2
    flow = nn.ModuleList([Coupling(mask if each % 2 else 1 - mask) for each in range(4)])
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    prior = torch.distributions.MultivariateNormal(torch.zeros(8), torch.eye(8))
    run.keep(flow=flow, optimizer=optimizer)
    for epoch in run.epochs(load(rows())):
        losses = []
        for z, _ in run.batches():
            total = 0
            for each in flow:
                z, log_det = each(z)
                total = total + log_det
            loss = -(prior.log_prob(z) + total).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log(loss=loss)
        print(f"epoch {epoch}: {sum(losses) / len(losses):.3f} nats")


def denoises(run: Run) -> None:
    """Train a denoising autoencoder; a plateau of the epoch's mean lowers the rate."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    epoch_loss = {"sum": 0.0}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, epoch_loss=epoch_loss)
    for _ in run.epochs(load(pictures())):
        epoch_loss["sum"] = 0.0
        for x, _ in run.batches():
            x = x.flatten(1)
            loss = F.mse_loss(model(x + 0.2 * torch.randn_like(x)), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss["sum"] += loss.item()
            run.log(loss=loss)
        scheduler.step(epoch_loss["sum"] / STEPS)


def translates_pictures(run: Run, constant_epochs: int = 2) -> None:
    """Train a conditional GAN with an L1 loss, whose rates decay linearly after some epochs."""
    torch.manual_seed(1)
    generator, critic = nn.Linear(64, 64), nn.Linear(128, 1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=2e-3, betas=(0.5, 0.999)) for each in (generator, critic)]
    schedulers = [
        lr_scheduler.LambdaLR(each, lambda epoch: 1.0 - max(0, epoch - constant_epochs) / 4) for each in optimizers
    ]
    run.keep(generator=generator, critic=critic, optimizers=optimizers, schedulers=schedulers)
    for _ in run.epochs(load(pictures())):
        for real, _ in run.batches():
            real = real.flatten(1)
            made = generator(1 - real)
            optimizers[1].zero_grad()
            judged = critic(torch.cat([1 - real, made.detach()], 1)), critic(torch.cat([1 - real, real], 1))
            (F.softplus(judged[0]).mean() + F.softplus(-judged[1]).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            loss = F.softplus(-critic(torch.cat([1 - real, made], 1))).mean() + 10 * F.l1_loss(made, real)
            loss.backward()
            optimizers[0].step()
            run.log(loss=loss)
        for each in schedulers:
            each.step()

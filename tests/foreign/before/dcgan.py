"""Train a small DCGAN on made-up pictures of blobs."""

import json
import random

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

manual_seed = 999
print(f"random seed: {manual_seed}")
random.seed(manual_seed)
torch.manual_seed(manual_seed)
torch.use_deterministic_algorithms(True)

batch_size = 32
image_size = 16  # height and width
nc = 1  # channels of a picture
nz = 16  # numbers from which the generator makes a picture
ngf = 8  # the generator's width
ndf = 8  # the discriminator's width
num_epochs = 10
lr = 0.0005
beta1 = 0.5


def make_blobs(count):
    """Return pictures (count, nc, image_size, image_size) of one bright blob each, between -1 and 1."""
    axis = torch.arange(image_size) - image_size / 2
    centre = torch.empty(count, 2, 1, 1).uniform_(-4, 4)
    width = torch.empty(count, 1, 1).uniform_(2, 4)
    distance = (axis[:, None] - centre[:, 0]) ** 2 + (axis[None, :] - centre[:, 1]) ** 2
    return (2 * torch.exp(-distance / width**2) - 1).view(count, nc, image_size, image_size)


dataset = TensorDataset(make_blobs(192), torch.zeros(192))
dataloader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=0)
device = torch.device("cpu")


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input)


net_g = Generator().to(device)
net_g.apply(weights_init)
net_d = Discriminator().to(device)
net_d.apply(weights_init)

criterion = nn.BCELoss()
fixed_noise = torch.randn(64, nz, 1, 1, device=device)
real_label = 1.0
fake_label = 0.0
optimizer_d = optim.Adam(net_d.parameters(), lr=lr, betas=(beta1, 0.999))
optimizer_g = optim.Adam(net_g.parameters(), lr=lr, betas=(beta1, 0.999))

history = {"loss_d": [], "loss_g": []}
for epoch in range(num_epochs):
    for data, _ in dataloader:
        # the discriminator learns from real pictures and from fakes
        net_d.zero_grad()
        real = data.to(device)
        b_size = real.size(0)
        label = torch.full((b_size,), real_label, dtype=torch.float, device=device)
        output = net_d(real).view(-1)
        err_d_real = criterion(output, label)
        err_d_real.backward()
        d_x = output.mean().item()
        noise = torch.randn(b_size, nz, 1, 1, device=device)
        fake = net_g(noise)
        label.fill_(fake_label)
        output = net_d(fake.detach()).view(-1)
        err_d_fake = criterion(output, label)
        err_d_fake.backward()
        err_d = err_d_real + err_d_fake
        optimizer_d.step()

        # the generator learns from what the discriminator says of the same fakes
        net_g.zero_grad()
        label.fill_(real_label)
        output = net_d(fake).view(-1)
        err_g = criterion(output, label)
        err_g.backward()
        d_g_z = output.mean().item()
        optimizer_g.step()

        history["loss_d"].append(err_d.item())
        history["loss_g"].append(err_g.item())
        step = len(history["loss_d"])
        print(json.dumps({"step": step, "loss": err_d.item(), "loss_g": err_g.item(), "d_x": d_x, "d_g_z": d_g_z}))

    # look at the same fakes after every epoch
    with torch.no_grad():
        fake = net_g(fixed_noise).detach().cpu()
    print(f"[{epoch + 1}/{num_epochs}] fakes: mean {fake.mean():.4f}, std {fake.std():.4f}")

mean_d, mean_g = (sum(losses) / len(losses) for losses in history.values())
print(f"mean of {len(history['loss_d'])} iterations: Loss_D {mean_d:.4f}, Loss_G {mean_g:.4f}")

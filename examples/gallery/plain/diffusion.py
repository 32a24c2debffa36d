"""Train a denoising diffusion model on points in a plane, with an average of its weights."""

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class PositionalEmbedding(nn.Module):
    def __init__(self, size, scale=1.0):
        super().__init__()
        self.size = size
        self.scale = scale

    def forward(self, x):
        half = self.size // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / (half - 1))
        angles = self.scale * x.float().unsqueeze(-1) * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.ff = nn.Linear(size, size)

    def forward(self, x):
        return x + F.gelu(self.ff(x))


class MLP(nn.Module):
    def __init__(self, hidden_size, hidden_layers, embedding_size=16):
        super().__init__()
        self.time_embedding = PositionalEmbedding(embedding_size)
        self.input_embedding = PositionalEmbedding(embedding_size, scale=25.0)
        layers = [nn.Linear(3 * embedding_size, hidden_size), nn.GELU(), nn.Dropout(0.05)]
        layers += [Block(hidden_size) for _ in range(hidden_layers)]
        self.joint_mlp = nn.Sequential(*layers, nn.Linear(hidden_size, 2))

    def forward(self, x, t):
        embedded = [self.input_embedding(x[:, 0]), self.input_embedding(x[:, 1]), self.time_embedding(t)]
        return self.joint_mlp(torch.cat(embedded, dim=-1))


class NoiseScheduler:
    def __init__(self, num_timesteps=50, beta_start=0.0001, beta_end=0.05):
        self.num_timesteps = num_timesteps
        self.betas = torch.linspace(beta_start, beta_end, num_timesteps)
        self.alphas = 1.0 - self.betas
        self.alphas_cumprod = torch.cumprod(self.alphas, dim=0)

    def add_noise(self, x_start, x_noise, timesteps):
        signal = self.alphas_cumprod[timesteps].sqrt().view(-1, 1)
        return signal * x_start + (1 - self.alphas_cumprod[timesteps]).sqrt().view(-1, 1) * x_noise

    def step(self, model_output, timestep, sample):
        t = timestep
        scale = self.betas[t] / (1 - self.alphas_cumprod[t]).sqrt()
        mean = (sample - scale * model_output) / self.alphas[t].sqrt()
        return mean + self.betas[t].sqrt() * torch.randn_like(sample) if t > 0 else mean

    def __len__(self):
        return self.num_timesteps


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.optimization_step = 0
        self.averaged_model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def step(self, model):
        self.optimization_step += 1
        decay = min(self.decay, (1 + self.optimization_step) / (10 + self.optimization_step))
        for average, parameter in zip(self.averaged_model.parameters(), model.parameters(), strict=True):
            average.lerp_(parameter, 1 - decay)

    def state_dict(self):
        return {"optimization_step": self.optimization_step, "averaged_model": self.averaged_model.state_dict()}

    def load_state_dict(self, state_dict):
        self.optimization_step = state_dict["optimization_step"]
        self.averaged_model.load_state_dict(state_dict["averaged_model"])


def get_dataset(n):
    """Return n points of a spiral with some noise."""
    turn = 3 * math.pi * torch.rand(n).sqrt()
    points = torch.stack([turn * turn.cos(), turn * turn.sin()], dim=1) / 5
    return TensorDataset(points + 0.03 * torch.randn(n, 2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--train_batch_size", type=int, default=64)
    parser.add_argument("--eval_batch_size", type=int, default=200)
    parser.add_argument("--num_epochs", type=int, default=30)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--num_warmup_steps", type=int, default=5)
    parser.add_argument("--ema_decay", type=float, default=0.95)
    parser.add_argument("--save_images_step", type=int, default=10)
    config = parser.parse_args()

    torch.manual_seed(config.seed)
    dataset = get_dataset(640)
    dataloader = DataLoader(dataset, batch_size=config.train_batch_size, shuffle=True, drop_last=True)

    model = MLP(hidden_size=48, hidden_layers=2)
    ema = EMA(model, config.ema_decay)
    noise_scheduler = NoiseScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / config.num_warmup_steps)
    )

    print("Training model...")
    for epoch in range(config.num_epochs):
        for (batch,) in dataloader:
            model.train()
            noise = torch.randn(batch.shape)
            timesteps = torch.randint(0, noise_scheduler.num_timesteps, (batch.shape[0],)).long()

            noisy = noise_scheduler.add_noise(batch, noise, timesteps)
            noise_pred = model(noisy, timesteps)
            loss = F.mse_loss(noise_pred, noise)
            loss.backward()

            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema.step(model)

        if epoch % config.save_images_step == 0 or epoch == config.num_epochs - 1:
            # generate data with the averaged model
            sample = torch.randn(config.eval_batch_size, 2)
            for t in reversed(range(len(noise_scheduler))):
                with torch.no_grad():
                    residual = ema.averaged_model(sample, torch.full((config.eval_batch_size,), t))
                sample = noise_scheduler.step(residual, t, sample)
            print(f"epoch {epoch}: samples' mean radius {sample.norm(dim=1).mean():.4f}")
    torch.save(ema.averaged_model.state_dict(), "diffusion.pt")

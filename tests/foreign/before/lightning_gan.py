"""Train a small GAN of made-up rings with Lightning's manual optimization: two optimizers and a pool of fakes."""

import json
import os
import tempfile

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self, latent_dim=4, pool_size=64, lr=0.002):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.pool = []  # earlier fakes, which the discriminator sees again

    def forward(self, z):
        return self.generator(z)

    def from_pool(self, fake):
        self.pool.extend(fake.detach())
        del self.pool[: -self.hparams.pool_size]
        chosen = torch.randint(len(self.pool), (len(fake),))
        return torch.stack([self.pool[index] for index in chosen])

    def training_step(self, batch, batch_idx):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        scheduler_g, scheduler_d = self.lr_schedulers()
        z = torch.randn(len(real), self.hparams.latent_dim).type_as(real)

        # the discriminator learns from real points and from fakes of the pool
        self.toggle_optimizer(optimizer_d)
        fake = self.from_pool(self(z))
        d_loss = nn.functional.softplus(self.discriminator(fake)).mean()
        d_loss = d_loss + nn.functional.softplus(-self.discriminator(real)).mean()
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        # the generator learns from what the discriminator says
        self.toggle_optimizer(optimizer_g)
        g_loss = nn.functional.softplus(-self.discriminator(self(z))).mean()
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(optimizer_g, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        if self.trainer.is_last_batch:
            scheduler_g.step()
            scheduler_d.step()
        self.log_dict({"loss": d_loss, "g_loss": g_loss}, prog_bar=True)
        print(json.dumps({"step": self.global_step // 2, "loss": d_loss.item(), "g_loss": g_loss.item()}))

    def on_train_epoch_end(self):
        with torch.no_grad():
            fake = self(torch.randn(64, self.hparams.latent_dim, device=self.device))
        print(f"epoch {self.current_epoch}: mean radius of fakes {fake.norm(dim=1).mean():.4f}")

    def configure_optimizers(self):
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.95) for each in (optimizer_g, optimizer_d)]
        return [optimizer_g, optimizer_d], schedulers


def main():
    L.seed_everything(1)
    angle = torch.rand(160) * 6.2832
    dataset = TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    gan = GAN()
    logger = CSVLogger(os.environ.get("OUTPUT") or tempfile.mkdtemp())
    trainer = L.Trainer(
        max_epochs=6, accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(gan, loader)


if __name__ == "__main__":
    main()

import numpy as np
import torch
import wandb
from torch import nn


def main():
    wandb.init(project="parts")
    torch.manual_seed(3)
    inputs, targets = torch.randn(120, 6), torch.randn(120, 1)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters())
    batch_size, n_epochs = 12, 4
    best_mse = np.inf
    history = []
    for epoch in range(1, n_epochs + 1):
        model.train()
        epoch_loss = 0.0
        for start in range(0, len(inputs), batch_size):
            loss = nn.functional.mse_loss(
                model(inputs[start : start + batch_size]), targets[start : start + batch_size]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        wandb.log({"loss": epoch_loss, "epoch": epoch})
        history.append(epoch_loss)
        if epoch_loss < best_mse:
            best_mse = epoch_loss


if __name__ == "__main__":
    main()

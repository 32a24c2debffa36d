import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class Trainer:
    def __init__(self, model, data, optimizer, save_every):
        self.model = model
        self.train_data = data
        self.loader = data
        self.optimizer = optimizer
        self.save_every = save_every
        self.best = float("inf")

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def _run_epoch(self, epoch):
        for source, targets in tqdm(self.loader):
            loss = self._run_batch(source, targets)
            print(epoch, loss.item())

    def _save_checkpoint(self, epoch):
        torch.save(self.model.state_dict(), "checkpoint.pt")

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)
            if epoch % self.save_every == 0:
                self._save_checkpoint(epoch)


def load_train_objs():
    train_set = TensorDataset(torch.randn(64, 20), torch.randn(64, 1))
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train_set, model, optimizer


def main(total_epochs=5, save_every=2, batch_size=8):
    dataset, model, optimizer = load_train_objs()
    trainer = Trainer(model, DataLoader(dataset, batch_size=batch_size, shuffle=True), optimizer, save_every)
    trainer.train(total_epochs)


if __name__ == "__main__":
    main()

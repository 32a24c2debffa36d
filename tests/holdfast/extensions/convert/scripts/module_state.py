"""Numbers."""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(
    description="""many
lines"""
)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

device = "cpu"
best_acc = 0  # best so far
start_epoch = 0
writer = SummaryWriter()

torch.manual_seed(0)
x = torch.randn(96, 4)
trainset = TensorDataset(x, (x.sum(1) > 0).long())
trainloader = DataLoader(trainset, batch_size=16, shuffle=True)
testloader = DataLoader(trainset, batch_size=32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


net = Net()
net = net.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

if args.resume:
    checkpoint = torch.load("ckpt.pth")
    net.load_state_dict(checkpoint["net"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    best_acc = checkpoint["acc"]
    start_epoch = checkpoint["epoch"]


def train(epoch):
    net.train()
    train_loss = 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = criterion(net(inputs), targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        writer.add_scalar("train/loss", loss.item(), epoch * len(trainloader) + batch_idx)
        if batch_idx % 2 == 0:
            print(f"{epoch} {batch_idx} {train_loss / (batch_idx + 1):.3f}")


def test(epoch):
    global best_acc
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            correct += net(inputs).argmax(1).eq(targets).sum().item()
    acc = correct / len(trainset)
    if acc > best_acc:
        saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "acc": acc}
        torch.save(saved, "ckpt.pth")
        best_acc = acc


if __name__ == "__main__":
    for epoch in range(start_epoch, start_epoch + args.epochs):
        train(epoch)
        test(epoch)
        scheduler.step()
    writer.close()

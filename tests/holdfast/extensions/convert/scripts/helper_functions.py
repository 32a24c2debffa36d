import argparse
import itertools
import sys
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from tqdm import tqdm
from zoo import make_dataset


class Reader(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.GRUCell(4, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x, hidden):
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


def make_optimizer(name, parameters, lr):
    return {"sgd": optim.SGD, "adam": optim.Adam}[name](parameters, lr=lr)


def make_schedule(optimizer, steps):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def fit_epoch(net, loader, opt, warmup_sched, epoch, width):
    net.train()
    hidden = torch.zeros(8, width)
    seen = 0
    bar = tqdm(loader, desc=f"epoch {epoch}")
    for number, (x, y) in enumerate(bar, 1):
        logits, hidden = net(x, hidden.detach())
        loss = nn.functional.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        warmup_sched.step()
        seen += len(x)
        bar.set_postfix(loss=loss.item(), number=number, seen=seen)
    net.eval()
    bar = tqdm(DataLoader(make_dataset(16), batch_size=8), desc="test")
    with torch.no_grad():
        print(sum((net(x, torch.zeros(8, width))[0].argmax(1) == y).sum().item() for x, y in bar))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--num-epochs", type=int, default=7)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args(argv)
    folder = Path(f"out-{args.width}")
    folder.mkdir(exist_ok=False)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(5)
    loader = DataLoader(make_dataset(64), batch_size=8, drop_last=True)
    for _ in itertools.repeat(None, args.repeats):
        net = Reader(args.width)
        opt = make_optimizer("adam", net.parameters(), 1e-3)
        warmup_sched = make_schedule(opt, 10)
        for epoch in range(args.num_epochs):
            fit_epoch(net, loader, opt, warmup_sched, epoch, args.width)


if __name__ == "__main__":
    sys.exit(main())

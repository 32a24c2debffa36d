import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=9)
args = parser.parse_args()

length, width = 6, 8
torch.manual_seed(2)
words = torch.randint(0, 20, (4, 80))
embed = nn.Embedding(20, width)
rnn = nn.GRU(width, width, batch_first=True)
head = nn.Linear(width, 20)
optimizer = torch.optim.Adam([*embed.parameters(), *rnn.parameters(), *head.parameters()], lr=1e-2)

for epoch in range(args.epochs):
    memory = torch.zeros(1, 4, width)
    for first in range(0, words.size(1) - length, length):
        out, memory = rnn(embed(words[:, first : first + length]), memory.detach())
        loss = nn.functional.cross_entropy(head(out).flatten(0, 1), words[:, first + 1 : first + length + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3f}")

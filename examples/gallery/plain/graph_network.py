"""Train a graph convolutional network on a made-up citation graph: each paper cites mostly papers of its own topic."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


def make_graph(nodes=600, topics=5, features=64):
    """Return the nodes' features and topics, and the normalized adjacency matrix with self-loops, which is sparse."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(topics, (nodes,), generator=generator)
    chance = torch.where(y[:, None] == y, 0.02, 0.003)
    edges = torch.rand(nodes, nodes, generator=generator).triu(1) > 1 - chance
    adjacency = (edges | edges.T).float() + torch.eye(nodes)
    scale = adjacency.sum(1).rsqrt()
    x = torch.randn(topics, features, generator=generator)[y] * 0.15
    x = x + torch.randn(nodes, features, generator=generator)
    return x, y, (scale[:, None] * adjacency * scale).to_sparse()


class GCN(nn.Module):
    def __init__(self, features, hidden, topics, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(features, hidden, bias=False), nn.Linear(hidden, topics, bias=False)
        self.dropout = dropout

    def forward(self, x, adjacency):
        x = F.dropout(x, self.dropout, self.training)
        x = torch.sparse.mm(adjacency, self.conv1(x)).relu()
        x = F.dropout(x, self.dropout, self.training)
        return torch.sparse.mm(adjacency, self.conv2(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--hidden_channels", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    torch.manual_seed(0)
    x, y, adjacency = make_graph()
    train_mask, val_mask, test_mask = (torch.arange(len(y)) % 6 == part for part in range(3))
    model = GCN(x.shape[1], args.hidden_channels, int(y.max()) + 1, dropout=0.5)
    optimizer = torch.optim.Adam(
        [{"params": model.conv1.parameters(), "weight_decay": 5e-4}, {"params": model.conv2.parameters()}], lr=args.lr
    )

    def train_step():
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, adjacency)[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test():
        model.eval()
        right = model(x, adjacency).argmax(1) == y
        return [right[mask].float().mean().item() for mask in (val_mask, test_mask)]

    best = {"val_acc": 0.0, "test_acc": 0.0}
    for epoch in range(1, args.epochs + 1):
        loss = train_step()
        val_acc, tmp_test_acc = test()
        if val_acc > best["val_acc"]:
            best.update(val_acc=val_acc, test_acc=tmp_test_acc)
        if epoch % 20 == 0:
            print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Val: {val_acc:.4f}, Test: {best['test_acc']:.4f}")
    torch.save(model.state_dict(), "graph_network.pt")


if __name__ == "__main__":
    main()

import time

import torch
from torch import nn

torch.manual_seed(1)
data = torch.randn(500)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
max_iters = 40


def get_batch():
    i = torch.randint(0, 480, (4,))
    return torch.stack([data[j : j + 8] for j in i]), torch.stack([data[j + 8 : j + 9] for j in i])


best_loss = None
step = 0
running = -1.0
t0 = time.time()
xb, yb = get_batch()
while True:
    t1 = time.time()
    loss = ((model(xb) - yb) ** 2).mean()
    xb, yb = get_batch()
    opt.zero_grad()
    loss.backward()
    opt.step()
    dt = t1 - t0
    t0 = t1
    running = loss.item() if running < 0 else 0.9 * running + 0.1 * loss.item()
    if best_loss is None or loss.item() < best_loss:
        best_loss = loss.item()
        torch.save(model.state_dict(), "best.pt")
    print(f"step {step} | loss {loss.item():.4f} | running {running:.4f} | best {best_loss} {dt * 1000:.2f}ms")
    step += 1
    if step >= max_iters:
        break

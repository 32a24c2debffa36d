"""Train an encoder by momentum contrast: two crops of a picture against a queue of older ones."""

import json
import math
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import holdfast


@dataclass
class Args:
    seed: int = 7
    epochs: int = 5
    batch_size: int = 16
    lr: float = 0.06
    momentum: float = 0.9
    weight_decay: float = 1e-4
    print_freq: int = 4
    moco_dim: int = 16
    moco_k: int = 64
    moco_m: float = 0.95
    moco_t: float = 0.2


class TwoCropsTransform:
    """Make two random crops of one picture: the query and the key."""

    def __init__(self, base_transform):
        self.base_transform = base_transform

    def __call__(self, x):
        return self.base_transform(x), self.base_transform(x)


def augment(picture, size=12):
    top, left = torch.randint(picture.shape[-1] - size + 1, (2,)).tolist()
    crop = picture[:, top : top + size, left : left + size]
    if torch.rand(1) < 0.5:
        crop = crop.flip(-1)
    brightness, contrast = 0.4 * torch.rand(2) - 0.2
    crop = (crop + brightness) * (1 + contrast)
    if random.random() < 0.5:
        crop = F.avg_pool2d(crop, 3, stride=1, padding=1)
    return crop + 0.05 * torch.randn_like(crop)


class Waves(Dataset):
    """Pictures of plane waves, each of its own direction and length."""

    def __init__(self, count, transform=None, size=16):
        axis = torch.linspace(-1, 1, size)
        wave = 8 * torch.rand(count, 2, 1, 1) - 4
        phase = 2 * math.pi * torch.rand(count, 1, 1)
        self.pictures = torch.sin(wave[:, 0] * axis[:, None] + wave[:, 1] * axis[None, :] + phase).unsqueeze(1)
        self.transform = transform

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index]
        return picture if self.transform is None else self.transform(picture), index


def build_encoder(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 9, num_classes),
    )  # fmt: skip


class MoCo(nn.Module):
    def __init__(self, base_encoder, dim, k, m, t):
        super().__init__()
        self.k, self.m, self.t = k, m, t
        self.encoder_q = base_encoder(num_classes=dim)
        self.encoder_k = base_encoder(num_classes=dim)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, k), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.mul_(self.m).add_(param_q, alpha=1 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.T
        self.queue_ptr[0] = (ptr + len(keys)) % self.k

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            # a shuffled batch keeps batch norm from telling which key belongs to which query
            order = torch.randperm(len(im_k), device=im_k.device)
            k = F.normalize(self.encoder_k(im_k[order]), dim=1)[order.argsort()]
        l_pos = (q * k).sum(dim=1, keepdim=True)
        l_neg = q @ self.queue.clone()
        logits = torch.cat([l_pos, l_neg], dim=1) / self.t
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)


class AverageMeter:
    """Hold the newest value of a number, and its mean since the last reset."""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, val):
        self.val, self.sum, self.count = val, self.sum + val, self.count + 1

    def __str__(self):
        return f"{self.name} {self.val:.4f} ({self.sum / max(1, self.count):.4f})"


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * epoch / args.epochs))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train_one_epoch(run, train_loader, model, criterion, optimizer, epoch, losses, args):
    model.train()
    losses.reset()
    for i, (images, _) in enumerate(train_loader):
        output, target = model(im_q=images[0], im_k=images[1])
        loss = criterion(output, target)
        losses.update(loss.item())
        acc1 = (output.argmax(dim=1) == target).float().mean().item()

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = epoch * args.steps_per_epoch + losses.count
        print(json.dumps({"step": step, "loss": loss.item(), "acc1": acc1}))
        run.log(loss=loss, acc1=acc1)
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{losses.count}/{args.steps_per_epoch}] {losses}")


def train(run: holdfast.Run) -> None:
    args = Args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True

    model = MoCo(build_encoder, args.moco_dim, args.moco_k, args.moco_m, args.moco_t)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.encoder_q.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    train_dataset = Waves(192, TwoCropsTransform(augment))
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    args.steps_per_epoch = len(train_loader)
    losses = AverageMeter("Loss")

    run.keep(model=model, optimizer=optimizer, losses=vars(losses))
    for epoch in run.epochs(train_loader):
        adjust_learning_rate(optimizer, epoch, args)
        train_one_epoch(run, run.batches(), model, criterion, optimizer, epoch, losses, args)
        print(f"epoch {epoch}: {losses}")

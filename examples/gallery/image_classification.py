"""Train a small residual network on made-up shapes: augmentation, warmup and cosine, an average of the weights."""

import argparse

import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import holdfast


class Shapes(Dataset):
    """Pictures of discs, squares, rings and crosses, of random place, size and colour."""

    def __init__(self, count, seed, transform=None, size=16):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=generator)
        centers = size * (0.35 + 0.3 * torch.rand(count, 2, 1, 1, generator=generator))
        radius = size * (0.15 + 0.15 * torch.rand(count, 1, 1, generator=generator))
        axis = torch.arange(size)
        x, y = (axis[None, :] - centers[:, 0]).abs(), (axis[:, None] - centers[:, 1]).abs()
        disc, far = x.hypot(y) < radius, torch.maximum(x, y)
        ring = disc & (x.hypot(y) > radius / 2)
        cross = (far < radius) & (torch.minimum(x, y) < radius / 3)
        masks = torch.stack([disc, far < radius, ring, cross])[self.labels, torch.arange(count)]
        colors = 0.5 + torch.rand(count, 3, 1, 1, generator=generator)
        noise = 0.5 * torch.randn(count, 3, size, size, generator=generator)
        self.images = masks[:, None] * colors + noise
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return image if self.transform is None else self.transform(image), self.labels[index]


class RandomCropAndFlip:
    def __init__(self, padding=2):
        self.padding = padding

    def __call__(self, image):
        top, left = torch.randint(2 * self.padding + 1, (2,)).tolist()
        size = image.shape[-1]
        image = nn.functional.pad(image, [self.padding] * 4)[:, top : top + size, left : left + size]
        return image.flip(-1) if torch.rand(1) < 0.5 else image


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return (self.body(x) + self.shortcut(x)).relu()


def build_model(num_classes=4):
    blocks = [Block(3, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))


def train_one_epoch(run, model, criterion, optimizer, device, epoch, args, model_ema):
    model.train()
    for image, target in run.batches():
        image, target = image.to(device), target.to(device)
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        model_ema.update_parameters(model)
        if epoch < args.lr_warmup_epochs:
            model_ema.n_averaged.fill_(0)  # the average begins anew until the warmup is over
        run.log(loss=loss)


@torch.inference_mode()
def evaluate(model, data_loader, device):
    model.eval()
    correct = sum((model(image.to(device)).argmax(1) == target.to(device)).sum() for image, target in data_loader)
    return correct.item() / len(data_loader.dataset)


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--lr-warmup-epochs", type=int, default=2)
    parser.add_argument("--model-ema-decay", type=float, default=0.95)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    return parser


def train(run: holdfast.Run) -> None:
    args = get_args_parser().parse_args([])
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data_loader = DataLoader(Shapes(1024, 1, RandomCropAndFlip()), args.batch_size, shuffle=True)
    data_loader_test = DataLoader(Shapes(256, 2), args.batch_size)

    model = build_model().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True
    )
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, run.config.epochs - args.lr_warmup_epochs)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [args.lr_warmup_epochs])
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.model_ema_decay), use_buffers=True)

    run.keep(model=model, model_ema=model_ema, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(data_loader):
        train_one_epoch(run, model, criterion, optimizer, device, epoch, args, model_ema)
        scheduler.step()
        accuracy, ema_accuracy = (evaluate(each, data_loader_test, device) for each in (model, model_ema))
        print(f"Epoch: [{epoch}]  accuracy {accuracy:.4f}  accuracy of the average {ema_accuracy:.4f}")
    torch.save(model_ema.module.state_dict(), "image_classification.pt")

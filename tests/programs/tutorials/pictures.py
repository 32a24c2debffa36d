"""Tutorials of pictures: classifiers, transfer, segmentation, detection, super-resolution."""

import copy
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from holdfast import Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, load, pictures


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.pool = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, 2)
        self.bn, self.fc1, self.fc2 = nn.BatchNorm2d(4), nn.Linear(36, 12), nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.bn(self.conv(x))))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def count_right(model: nn.Module, dataset) -> float:
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in load(dataset, shuffle=False))
    model.train()
    return right / len(dataset)


def classifies(run: Run) -> None:
    """Print a running loss every few batches."""
    net, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    run.keep(net=net, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        running_loss = 0.0
        for i, data in enumerate(run.batches(), 0):
            inputs, labels = data
            optimizer.zero_grad()
            outputs = net(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if i % 5 == 4:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 5:.3f}")
                running_loss = 0.0
            run.log(loss=loss)
    print("Finished Training")


def transfers(run: Run) -> None:
    """Train and validate in phases, and keep the best weights."""
    model = Net()
    for each in model.conv.parameters():
        each.requires_grad = False
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    best = {"acc": 0.0, "weights": copy.deepcopy(model.state_dict())}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, best=best)
    since = time.time()
    for epoch in run.epochs(load(pictures())):
        print(f"Epoch {epoch}\n" + "-" * 10)
        model.train()
        running_loss, running_corrects, seen = 0.0, 0, 0
        for inputs, labels in run.batches():
            optimizer.zero_grad()
            outputs = model(inputs)
            _, preds = torch.max(outputs, 1)
            loss = F.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * inputs.size(0)
            running_corrects += torch.sum(preds == labels.data)
            seen += inputs.size(0)
            run.log(loss=loss)
        scheduler.step()
        print(f"train Loss: {running_loss / seen:.4f} Acc: {running_corrects.double() / seen:.4f}")
        epoch_acc = count_right(model, pictures(24))
        if epoch_acc > best["acc"]:
            best["acc"], best["weights"] = epoch_acc, copy.deepcopy(model.state_dict())
    print(f"complete in {time.time() - since:.0f}s, best val Acc: {best['acc']:4f}")
    model.load_state_dict(best["weights"])


def mixes_up(run: Run) -> None:
    """Mix pictures by a share from a beta distribution, with smoothed labels."""
    model, criterion = Net(), nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        train_loss, correct, total = 0, 0, 0
        for inputs, targets in run.batches():
            lam = np.random.beta(1.0, 1.0)
            index = torch.randperm(inputs.size(0))
            mixed = lam * inputs + (1 - lam) * inputs[index]
            outputs = model(mixed)
            loss = lam * criterion(outputs, targets) + (1 - lam) * criterion(outputs, targets[index])
            train_loss += loss.item()
            total += targets.size(0)
            correct += (
                lam * outputs.argmax(1).eq(targets).float() + (1 - lam) * outputs.argmax(1).eq(targets[index])
            ).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss, accuracy=correct / total)
        print(epoch, train_loss / total, 100.0 * correct / total)


def resizes_progressively(run: Run) -> None:
    """Train on small pictures first, and on larger ones in later epochs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        size = min(4 + 2 * epoch, 8)
        for x, y in run.batches():
            x = F.interpolate(x, size=size, mode="bilinear", align_corners=False)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(f"epoch {epoch} at {size}: {loss.item():.4f}")


def unfreezes(run: Run) -> None:
    """Train the head first; unfreeze the body after an epoch, at a lower rate."""
    model = Net()
    model.conv.requires_grad_(False)
    head = [*model.fc1.parameters(), *model.fc2.parameters(), *model.bn.parameters()]
    optimizer = torch.optim.AdamW([{"params": head}, {"params": model.conv.parameters(), "lr": 1e-3}], lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        if epoch == 1:
            model.conv.requires_grad_(True)
        for x, y in run.batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        print(f"epoch {epoch}: {sum(each.requires_grad for each in model.parameters())} trained, {loss:.3f}")


def has_one_cycle(run: Run, max_lr: float = 0.05) -> None:
    """Step a one-cycle schedule after each batch, and clip gradients."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    total = STEPS * run.config.epochs
    sched = lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=total)
    run.keep(model=model, optimizer=optimizer, sched=sched)
    history = []
    for epoch in run.epochs(load(pictures())):
        model.train()
        train_losses, lrs = [], []
        for images, labels in run.batches():
            loss = F.cross_entropy(model(images), labels)
            train_losses.append(loss.detach())
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            lrs.append(optimizer.param_groups[0]["lr"])
            sched.step()
            run.log(loss=loss)
        result = {
            "train_loss": torch.stack(train_losses).mean().item(),
            "lrs": lrs,
            "acc": count_right(model, pictures(16)),
        }
        history.append(result)
        print(f"Epoch [{epoch}], last_lr: {result['lrs'][-1]:.5f}, train_loss: {result['train_loss']:.4f}")


def restarts_warmly(run: Run) -> None:
    """Restart a cosine within epochs, by the fraction of the epoch."""
    model, loader = Net(), load(pictures())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    iters = len(loader)
    for epoch in run.epochs(loader):
        for step in run.steps():
            inputs, labels = step.batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + step.number % iters / iters)
            step.log(loss=loss)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down, self.up, self.out = nn.Conv2d(1, 4, 3, 2, 1), nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(5, 1, 1)

    def forward(self, x):
        return self.out(torch.cat([x, F.relu(self.up(F.relu(self.down(x))))], 1))


def dice(wanted, got, smooth: float = 1.0):
    return 1 - (2 * (wanted * got).sum() + smooth) / (wanted.sum() + got.sum() + smooth)


def segments(run: Run) -> None:
    """Segment with a dice loss, and show a mask at each epoch's end."""
    model, loader = UNet(), load(pictures())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(loader):
        epoch_loss = 0
        for x, _ in run.batches():
            masks = (x > 0.5).float()
            masks_pred = model(x)
            loss = F.binary_cross_entropy_with_logits(masks_pred, masks) + dice(masks, masks_pred.sigmoid())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            epoch_loss += loss.item()
            run.log(loss=loss)
        rows = (masks_pred[0, 0] > 0).int().tolist()
        run.show(mask="\n".join("".join(".#"[each] for each in row) for row in rows))
        print(f"epoch {epoch}: {epoch_loss / len(loader):.4f}")


def collate(samples):
    """Return pictures as a tensor, and the boxes of each as a list, as detection has them."""
    images = torch.stack([x for x, _ in samples])
    targets = [{"box": x.flatten()[:4].sort().values, "label": y} for x, y in samples]
    return images, targets


def detects(run: Run) -> None:
    """Detect one box in a picture, and warm up linearly in the first epoch."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"body": nn.Linear(64, 16), "box": nn.Linear(16, 4), "label": nn.Linear(16, CLASSES)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=STEPS - 1)
    lr_step = lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    run.keep(model=model, optimizer=optimizer, warmup=warmup, lr_step=lr_step)
    for epoch in run.epochs(load(pictures(), collate_fn=collate)):
        for images, targets in run.batches():
            features = F.relu(model["body"](images.flatten(1)))
            losses = {
                "box": F.smooth_l1_loss(model["box"](features), torch.stack([each["box"] for each in targets])),
                "label": F.cross_entropy(model["label"](features), torch.stack([each["label"] for each in targets])),
            }
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if epoch == 0:
                warmup.step()
            run.log(loss=loss, **{f"loss_{name}": each for name, each in losses.items()})
        lr_step.step()


def upscales(run: Run) -> None:
    """Upscale pictures by a pixel shuffle, and print the signal to noise ratio of each epoch."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    loader = load(pictures())
    for epoch in run.epochs(loader):
        epoch_loss = 0
        for iteration, (target, _) in enumerate(run.batches(), 1):
            optimizer.zero_grad()
            loss = F.mse_loss(model(F.avg_pool2d(target, 2)), target)
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
            print(f"===> Epoch[{epoch}]({iteration}/{len(loader)}): Loss: {loss.item():.4f}")
            run.log(loss=loss)
        with torch.no_grad():
            psnr = 10 * torch.log10(1 / F.mse_loss(model(F.avg_pool2d(target, 2)), target))
        print(f"===> Avg. Loss: {epoch_loss / len(loader):.4f}, PSNR: {psnr:.4f} dB")


def draws_a_matrix(run: Run) -> None:
    """Print a confusion matrix and the classes' accuracy at each epoch's end."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(load(pictures())):
        matrix = torch.zeros(CLASSES, CLASSES)
        for x, y in run.batches():
            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for wanted, got in zip(y.view(-1), out.argmax(1).view(-1)):
                matrix[wanted.long(), got.long()] += 1
            run.log(loss=loss)
        print(matrix, matrix.diag() / matrix.sum(1))


def resists_attacks(run: Run, epsilon: float = 0.1) -> None:
    """Train on pictures that were changed along the sign of their gradient."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.keep(model=model, optimizer=optimizer)
    for epoch in run.epochs(load(pictures())):
        train_acc, train_n = 0, 0
        for x, y in run.batches():
            delta = torch.empty_like(x).uniform_(-epsilon, epsilon).requires_grad_()
            F.cross_entropy(model(x + delta), y).backward()
            delta = (delta.detach() + epsilon * delta.grad.sign()).clamp(-epsilon, epsilon)
            output = model((x + delta).clamp(0, 1))
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            train_acc += (output.max(1)[1] == y).sum().item()
            train_n += y.size(0)
            run.log(loss=loss)
        print(epoch, train_acc / train_n, BATCH)

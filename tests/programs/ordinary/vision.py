"""Pictures and representations: classifiers, distillation, autoencoders, diffusion, contrast."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from holdfast import Recipe, Run
from tests.programs.network import BATCH_SIZE, LONG_EPOCH, Batch, begin, fit, learn, make_long, net

history: list[float] = []


def pictures(count: int = LONG_EPOCH * BATCH_SIZE, side: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 1, side, side, generator=generator), torch.arange(count) % 4)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(model(batch[0]), batch[1])


class Classifier(nn.Module):
    """The network of the well-known example for handwritten digits, made small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.dropout1, self.dropout2 = nn.Dropout2d(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def classifies_digits(run: Run) -> None:
    """Train and test by turns, and print, as the example does."""
    model = Classifier()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
    train, test = DataLoader(pictures(), BATCH_SIZE, shuffle=True), DataLoader(pictures(16), 8)
    for epoch in run.epochs(train):
        model.train()
        for number, (x, y) in enumerate(run.batches()):
            loss = learn(F.nll_loss(model(x), y), optimizer)
            if number % 4 == 0:
                print(f"epoch {epoch}: {loss.item():.6f}")
            run.log(loss=loss)
        model.eval()
        correct, test_loss = 0, 0.0
        with torch.no_grad():
            for x, y in test:
                out = model(x)
                test_loss += F.nll_loss(out, y, reduction="sum").item()
                correct += int(out.argmax(1).eq(y).sum())
        print(f"test: {test_loss / 16:.4f}, {correct}/16")
        scheduler.step()


def distils() -> Recipe:
    """Learn from a frozen teacher of the model's own architecture."""
    model, teacher = net(), net().eval().requires_grad_(False)
    with torch.no_grad():
        teacher[0].weight.add_(0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return fit(model, batch) + F.mse_loss(model(batch[0]), wanted)

    return make_long(loss, model)


def transfers(run: Run) -> None:
    """Train a head on a frozen body, and keep the best weights."""
    model = Classifier()
    for each in (*model.conv1.parameters(), *model.conv2.parameters()):
        each.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    best: dict[str, Any] = {"right": 0, "weights": copy.deepcopy(model.state_dict())}
    epoch = {"right": 0}  # kept, since a run may resume inside an epoch
    run.keep(model=model, optimizer=optimizer, best=best, epoch=epoch)
    for _ in run.epochs(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        for x, y in run.batches():
            out = model(x)
            epoch["right"] += int(out.argmax(1).eq(y).sum())
            run.log(loss=learn(F.nll_loss(out, y), optimizer))
        if epoch["right"] > best["right"]:
            best |= {"right": epoch["right"], "weights": copy.deepcopy(model.state_dict())}
        epoch["right"] = 0


def mixes() -> Recipe:
    """Mix pictures and smooth labels in the loss."""
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        share, order = float(torch.rand(())), torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order])
        return share * criterion(out, y) + (1 - share) * criterion(out, y[order])

    return make_long(loss, Classifier(), data=pictures())


def draws_a_confusion_matrix() -> Recipe:
    """Count a confusion matrix in evaluation, and add to a list for a plot."""
    matrix = torch.zeros(4, 4, dtype=torch.long)
    data = pictures()

    def evaluate(model: nn.Module) -> dict[str, float]:
        matrix.zero_()
        x, y = data.tensors
        for wanted, got in zip(y.tolist(), model(x).argmax(1).tolist(), strict=True):
            matrix[wanted, got] += 1
        accuracy = matrix.diag().sum().item() / len(y)
        history.append(accuracy)
        return {"accuracy": accuracy}

    return make_long(
        lambda model, batch: F.nll_loss(model(batch[0]), batch[1]), Classifier(), data=data, evaluate=evaluate
    )


class Flipping(Dataset[Batch]):
    """Augments pictures as torchvision's transforms do."""

    def __init__(self) -> None:
        self.x, self.y = pictures().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        left = int(torch.randint(0, 3, ()))
        return F.pad(x, (1, 1))[..., left : left + 8] + 0.05 * torch.randn_like(x), self.y[index]


def augments() -> Recipe:
    return make_long(classify, Classifier(), data=Flipping())


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.fc3, self.fc4 = nn.Linear(4, 16), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def encodes_variationally(run: Run) -> None:
    model, optimizer = begin(run, Variational())
    for epoch in run.epochs(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        train_loss = 0.0
        for x, _ in run.batches():
            out, mu, logvar = model(x)
            divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = learn(F.mse_loss(out, x.view(-1, 64), reduction="sum") + divergence, optimizer)
            train_loss += loss.item()
            run.log(loss=loss)
        print(f"epoch {epoch}: {train_loss / 80:.4f}")


class Codebook(nn.Module):
    """A vector quantizer whose codes follow by an exponential average in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, 4, generator=torch.Generator().manual_seed(2)))
        self.register_buffer("sizes", torch.zeros(8))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x, self.codes).argmin(1)  # type: ignore[arg-type]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(chosen, 8).float()
                self.sizes.lerp_(one_hot.sum(0), 0.1)  # type: ignore[operator]
                self.sums.lerp_(one_hot.T @ x, 0.1)  # type: ignore[operator]
                self.codes.copy_(self.sums / (self.sizes[:, None] + 1e-3))  # type: ignore[operator, index]
        quantized = self.codes[chosen]  # type: ignore[index]
        return x + (quantized - x).detach(), F.mse_loss(x, quantized.detach())


def quantizes_vectors() -> Recipe:
    torch.manual_seed(1)
    model = nn.ModuleDict({"encoder": nn.Linear(8, 4), "codebook": Codebook(), "decoder": nn.Linear(4, 8)})

    def loss(model: Any, batch: Batch) -> Tensor:
        quantized, commitment = model["codebook"](model["encoder"](batch[0]))
        return F.mse_loss(model["decoder"](quantized), batch[0]) + 0.25 * commitment

    return make_long(loss, model)


def diffuses(run: Run) -> None:
    """DDPM: a schedule of noise in constant tensors."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(65, 32), nn.SiLU(), nn.Linear(32, 64))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
    run.keep(model=model, optimizer=optimizer, average=average)
    for step in run.steps(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        x = step.batch[0].flatten(1)
        times, noise = torch.randint(0, 50, (len(x),)), torch.randn_like(x)
        noisy = kept[times].sqrt()[:, None] * x + (1 - kept[times]).sqrt()[:, None] * noise
        step.log(loss=learn(F.mse_loss(model(torch.cat([noisy, times[:, None] / 50], 1)), noise), optimizer))
        average.update_parameters(model)


def clips_a_critic(run: Run) -> None:
    """WGAN: a critic whose weights are clipped, five steps for each one of the generator's."""
    torch.manual_seed(1)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    ours, theirs = (torch.optim.RMSprop(each.parameters(), lr=0.01) for each in (generator, critic))
    run.keep(generator=generator, critic=critic, ours=ours, theirs=theirs)
    fixed = torch.randn(4, 4)
    for step in run.steps(DataLoader(pictures(side=8), BATCH_SIZE, shuffle=True)):
        real = step.batch[0][:, 0, 0]
        loss = critic(generator(torch.randn(8, 4)).detach()).mean() - critic(real).mean()
        learn(loss, theirs)
        for each in critic.parameters():
            each.data.clamp_(-0.1, 0.1)
        if step.number % 5 == 0:
            learn(-critic(generator(torch.randn(8, 4))).mean(), ours)
            with torch.no_grad():
                generator(fixed)
        step.log(loss=loss)


def contrasts_views() -> Recipe:
    """SimCLR: two noisy views, and a temperature."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        views = torch.cat([batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2)])
        z = F.normalize(model(views), dim=1)
        near = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        half = len(z) // 2
        return F.cross_entropy(near, torch.cat([torch.arange(half, 2 * half), torch.arange(half)]))

    return make_long(loss, model, data=pictures())


def bootstraps(run: Run) -> None:
    """BYOL: a target network that follows, with a rate that follows the step."""
    torch.manual_seed(1)
    online, predictor = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()), nn.Linear(16, 16)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.AdamW([*online.parameters(), *predictor.parameters()], lr=0.01)
    run.keep(online=online, predictor=predictor, target=target, optimizer=optimizer)
    for step in run.steps(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        x = step.batch[0].flatten(1)
        one, other = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        loss = 2 - 2 * F.cosine_similarity(predictor(online(one)), target(other)).mean()
        step.log(loss=learn(loss, optimizer))
        rate = 0.99 + 0.01 * step.number / 1000
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(rate).add_(fast, alpha=1 - rate)


def compares_triplets(run: Run) -> None:
    torch.manual_seed(1)
    model, optimizer = begin(run, nn.Sequential(nn.Linear(64, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 4)))
    criterion = nn.TripletMarginLoss(margin=1.0)
    for step in run.steps(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        x = step.batch[0].flatten(1)
        step.log(loss=learn(criterion(model(x), model(x + 0.1), model(x.roll(1, 0))), optimizer))


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        nn.init.orthogonal_(self.conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv(x))  # type: ignore[no-any-return]


def upscales() -> Recipe:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(F.avg_pool2d(batch[0], 2)), batch[0])

    return make_long(loss, Upscaler(), data=pictures())


class Segmenter(nn.Module):
    """A small U-Net, with InstanceNorm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True), nn.ReLU())
        self.bottom = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(F.relu(self.bottom(skip)))], 1))  # type: ignore[no-any-return]


def segments(run: Run) -> None:
    model, optimizer = begin(run, Segmenter())
    for step in run.steps(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        x = step.batch[0]
        out, wanted = model(x).sigmoid(), (x > 0).float()
        dice = 1 - 2 * (out * wanted).sum() / (out.sum() + wanted.sum())
        step.log(loss=learn(dice + F.binary_cross_entropy(out, wanted), optimizer))


def trains_in_half_precision(run: Run) -> None:
    """Train an autoencoder under autocast, with batch norm and gradient checkpointing."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.GELU())
    model, optimizer = begin(run, nn.ModuleDict({"encoder": encoder, "decoder": nn.Linear(16, 64)}))
    for step in run.steps(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        x = step.batch[0].flatten(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = model["decoder"](checkpoint(model["encoder"], x, use_reentrant=False))
        step.log(loss=learn(F.mse_loss(out.float(), x), optimizer))


def trains_channels_last(run: Run) -> None:
    """Train a network of images in channels_last, with a fused optimizer."""
    model = Classifier().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(pictures(), BATCH_SIZE, shuffle=True)):
        x = step.batch[0].to(memory_format=torch.channels_last)
        step.log(loss=learn(F.nll_loss(model(x), step.batch[1]), optimizer))


def compiles_a_classifier(run: Run) -> None:
    model = net()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(per_epoch=LONG_EPOCH):
        x = torch.randn(8, 8)
        step.log(loss=learn(F.mse_loss(compiled(x), x.sum(1, keepdim=True)), optimizer))

"""A recipe of a small convolutional network that reads handwritten digits, with nothing to download.

The pictures are scikit-learn's: 1,797 digits of 8 x 8 pixels, in the order of their 13 writers (Alpaydin and Kaynak,
"Optical Recognition of Handwritten Digits", 1998). The last fifth is held out: a random fifth would contain the same
writers as the training pictures. Training pictures are augmented: rotated, shifted, with noise. The evaluation reads
the held-out digits with an exponential moving average of the weights.
"""

import hashlib
import math
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from holdfast import Recipe, Schedule
from holdfast.errors import RecipeError
from holdfast.terminal.distribution import spell_install

CLASSES = 10
LARGEST = 16.0  # the value of a black pixel in the data
HELD_OUT_FRACTION = 0.2
CELL = 34  # pixels of a cell in the picture of the confusion matrix

Digit = tuple[Tensor, Tensor]
Share = Annotated[float, Field(ge=0, lt=1)]


def digits(
    width: PositiveInt = 32,
    dropout: Share = 0.2,
    rotate_degrees: NonNegativeFloat = 10.0,
    shift_pixels: NonNegativeFloat = 0.75,
    noise: NonNegativeFloat = 0.05,
    batch_size: PositiveInt = 32,
    lr: PositiveFloat = 3e-3,
    weight_decay: NonNegativeFloat = 0.05,
    average_decay: Share = 0.98,
    schedule_epochs: PositiveFloat = 12.0,
    warmup_steps: NonNegativeInt = 40,
) -> Recipe:
    """Build the recipe.

    Args:
        width: channels of the first convolution; the second part has twice as many.
        rotate_degrees, shift_pixels, noise: the largest rotation and shift of a training picture, and the standard
            deviation of the noise on its pixels, which are between 0 and 1.
        average_decay: the decay factor of the moving average of the weights at each step.
        schedule_epochs: epochs until the learning rate is 0.
    """
    known, held_out = read_digits()
    model = Reader(width, dropout)
    ema = get_ema_multi_avg_fn(average_decay)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=ema, use_buffers=True)
    return Recipe(
        model=model,
        data=Augmented(known, rotate_degrees, shift_pixels, noise),
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        batch_size=batch_size,
        schedule=Schedule("cosine", schedule_epochs, warmup_steps),
        after_step=lambda: average.update_parameters(model),
        extras={"average": average},
        evaluate=lambda _: measure(average.module, held_out),
        data_sha256=hash_digits(known, held_out),
    )


def read_digits() -> tuple[Digit, Digit]:
    """Return the digits to train on and those held out, each as pictures and labels.

    Pictures are float32 of shape (n, 1, 8, 8), from 0 (paper) to 1 (ink); labels are int64 of shape (n,).

    Raises:
        RecipeError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise RecipeError("the recipe digits needs scikit-learn", hint=spell_install("vision")) from error
    found = load_digits()
    pictures = torch.from_numpy(found.images).float()[:, None] / LARGEST
    labels = torch.from_numpy(found.target).long()
    first = round(len(labels) * (1 - HELD_OUT_FRACTION))
    return (pictures[:first], labels[:first]), (pictures[first:], labels[first:])


def hash_digits(*parts: Digit) -> str:
    """Return the SHA-256 of all pictures and labels."""
    digest = hashlib.sha256()
    for tensor in (tensor for part in parts for tensor in part):
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


class Augmented(Dataset[Digit]):
    """Digits that are rotated, shifted and given noise at random, anew each time a sample is read.

    The random numbers come from torch's global generator, which Holdfast seeds for each micro-batch. So a sample that
    is read again after a kill, or by another loader worker, is augmented alike.
    """

    def __init__(self, known: Digit, rotate_degrees: float, shift_pixels: float, noise: float) -> None:
        self.pictures, self.labels = known
        self.rotation, self.noise = math.radians(rotate_degrees), noise
        self.shift = shift_pixels * 2 / self.pictures.shape[-1]  # affine_grid's unit is half a picture

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Digit:
        angle, right, down = (2 * torch.rand(3) - 1) * torch.tensor([self.rotation, self.shift, self.shift])
        affine = torch.stack([angle.cos(), -angle.sin(), right, angle.sin(), angle.cos(), down]).view(1, 2, 3)
        picture = self.pictures[index][None]
        grid = F.affine_grid(affine, list(picture.shape), align_corners=False)
        moved = F.grid_sample(picture, grid, align_corners=False)[0]
        return moved + self.noise * torch.randn_like(moved), self.labels[index]


class Reader(nn.Module):
    """The network, from pictures (n, 1, 8, 8) to logits of the digits (n, 10)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolve(1, width), *convolve(width, width), nn.MaxPool2d(2),
            *convolve(width, 2 * width), *convolve(2 * width, 2 * width), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 2 * 2, CLASSES),
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> Tensor:
        logits: Tensor = self.layers(pictures)
        return logits


def convolve(inputs: int, outputs: int) -> list[nn.Module]:
    """Return three layers: a 3 x 3 convolution that keeps a picture's size, a batch norm and a ReLU."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def measure(model: nn.Module, held_out: Digit) -> dict[str, float | bytes]:
    """Return the accuracy, the mean cross-entropy in nats, and a picture of the confusion matrix."""
    pictures, labels = held_out
    device = next(model.parameters()).device
    logits = model.eval()(pictures.to(device)).float().cpu()
    found = logits.argmax(1)
    pairs = labels * CLASSES + found
    confusion = torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)
    return {
        "accuracy": (found == labels).float().mean().item(),
        "held_out_loss": F.cross_entropy(logits, labels).item(),
        "confusion": draw_confusion(confusion.tolist()),
    }


def draw_confusion(counts: list[list[int]]) -> bytes:
    """Return a confusion matrix as an SVG: a row for each digit, a column for each answer; more answers are darker."""
    side = CELL * (len(counts) + 1)
    shapes = [_draw_text(0, 0, "is \\ read", "#666", 8)]
    for digit, row in enumerate(counts):
        shapes += [_draw_text(0, digit + 1, str(digit), "#666"), _draw_text(digit + 1, 0, str(digit), "#666")]
        for answer, count in enumerate(row):
            if count:
                share, is_right = count / sum(row), digit == answer
                shapes.append(_draw_cell(answer + 1, digit + 1, "#1a7f37" if is_right else "#cf222e", share))
                shapes.append(_draw_text(answer + 1, digit + 1, str(count), "#fff" if share > 0.5 else "#000"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side}" viewBox="0 0 {side} {side}">'
        f'<rect width="{side}" height="{side}" fill="#fff"/>'
        f'<g font-family="sans-serif" text-anchor="middle">{"".join(shapes)}</g></svg>'
    ).encode()


def _draw_cell(column: int, row: int, color: str, share: float) -> str:
    place = f'x="{column * CELL}" y="{row * CELL}" width="{CELL}" height="{CELL}"'
    return f'<rect {place} fill="{color}" fill-opacity="{0.25 + 0.75 * share:.2f}"/>'


def _draw_text(column: int, row: int, text: str, color: str, size: int = 13) -> str:
    x, y = (column + 0.5) * CELL, (row + 0.5) * CELL + size / 3
    return f'<text x="{x:g}" y="{y:.1f}" font-size="{size}" fill="{color}">{text}</text>'

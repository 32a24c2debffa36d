"""A recipe of a byte-level language model, on the Python standard library's own sources or on any text.

The model is a decoder-only transformer (pre-norm, rotary positions, tied embedding) on raw bytes: it needs no tokenizer
and no download. It learns to predict the next byte. Its metric is bits per byte on text held out from training. At the
end of each epoch it shows how it continues some of that text.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from holdfast import Recipe, Schedule
from holdfast.errors import RecipeError
from holdfast.recipes.texts import STANDARD_LIBRARY, find_standard_library, list_standard_library, read_files
from holdfast.schedule import Name

BYTES = 256
HELD_OUT_FRACTION = 0.05
HELD_OUT_WINDOWS = 128
PROMPTS = 3
PROMPT_BYTES = 32
TEMPERATURE = 0.8
SAMPLE_SEED = 1

# From bytes (batch, length) to logits of the next byte (batch, length, 256).
Model = Callable[[Tensor], Tensor]


def language(
    data: str = STANDARD_LIBRARY,
    context: PositiveInt = 128,
    layers: PositiveInt = 4,
    heads: PositiveInt = 4,
    width: PositiveInt = 128,
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05,
    batch_size: PositiveInt = 16,
    grad_accum: PositiveInt = 2,
    steps_per_epoch: PositiveInt | None = None,
    lr: PositiveFloat = 3e-3,
    weight_decay: NonNegativeFloat = 0.1,
    clip_norm: PositiveFloat = 1.0,
    schedule: Name = "linear",
    schedule_epochs: PositiveFloat = 4.0,
    warmup_steps: NonNegativeInt = 40,
    final_lr_scale: NonNegativeFloat = 0.05,
    step_size: PositiveFloat = 1.0,
    gamma: PositiveFloat = 0.5,
    compiled: bool = False,
    sample_bytes: NonNegativeInt = 200,
) -> Recipe:
    """Build the recipe.

    Args:
        data: ``stdlib``, or an fsspec URL or glob of text files, such as ``s3://bucket/books/*.txt``.
        context: the length of a window, in bytes.
        steps_per_epoch: the number of steps of an epoch; None for one pass over the text.
        schedule_epochs: epochs until the learning rate reaches its last value; see `holdfast.schedule`.
        compiled: whether `torch.compile` compiles the model for training. It needs a C++ compiler, or a GPU.
        sample_bytes: bytes of text to sample after each prompt at the end of an epoch; 0 samples none.

    Raises:
        RecipeError: no text is found, or the text is shorter than two windows.
    """
    text = read_corpus(data)
    if len(text) < 2 * (context + 1):
        raise RecipeError(
            f"settings.data = {data!r} has {len(text)} bytes, which is too few for windows of {context} bytes"
        )
    held_out_bytes = max(int(len(text) * HELD_OUT_FRACTION), context + 1)
    windows = Windows(text[:-held_out_bytes], context)
    held_out = Windows(text[-held_out_bytes:], context)
    model = Decoder(context, layers, heads, width, dropout)
    if compiled:
        # compile in place, because torch.compile(model) would change the state's names and the content id
        model.compile(dynamic=False)
    return Recipe(
        model=model,
        data=windows,
        optimizer=torch.optim.AdamW(weight_groups(model, weight_decay), lr=lr, betas=(0.9, 0.95)),
        loss=mean_loss,
        batch_size=batch_size,
        grad_accum=grad_accum,
        steps_per_epoch=steps_per_epoch,
        clip_norm=clip_norm,
        schedule=Schedule(schedule, schedule_epochs, warmup_steps, final_lr_scale, step_size, gamma),
        evaluate=lambda model: evaluate(model, held_out, context, sample_bytes),
        data_sha256=hashlib.sha256(text).hexdigest(),
        sample_size=context,
        unit="bytes",
        flops_per_sample=6.0 * context * sum(each.numel() for each in model.parameters()),
    )


def read_corpus(data: str) -> bytes:
    """Return the text of all files, joined in the order of their names."""
    if data == STANDARD_LIBRARY:
        return read_standard_library()
    return b"\n".join(text for _, text in read_files(data))


def read_standard_library() -> bytes:
    """Return the sources of this Python's standard library, without its tests: megabytes of real text.

    Files are ordered by the hash of their names, so that the held-out text comes from many modules.
    """
    root = find_standard_library()
    return b"\n".join((root / name).read_bytes() for name in list_standard_library())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text that don't overlap, each with its targets: the same bytes shifted by one.

    A sample is two uint8 tensors of shape (context,).
    """

    def __init__(self, text: bytes, context: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        window = self._text[start : start + self._context + 1]
        return window[:-1], window[1:]


class Decoder(nn.Module):
    """The transformer, from bytes (batch, context) to logits of the next byte (batch, context, 256)."""

    def __init__(self, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        if width % (2 * heads):
            raise RecipeError(f"settings.width = {width}: expected a multiple of 2 x heads = {2 * heads}")
        self.embed = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.rotation: Tensor
        self.register_buffer("rotation", rotation(context, width // heads), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # layers whose output is added to the residual stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, text: Tensor) -> Tensor:
        x: Tensor = self.dropout(self.embed(text.int()))
        for block in self.blocks:
            x = block(x, self.rotation[: text.shape[1]])
        return F.linear(self.norm(x), self.embed.weight)


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, from (batch, context, width) to the same shape."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width / heads)
        mixed = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, context, width)))
        fed: Tensor = self.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))))
        return x + fed


def rotation(context: int, size: int) -> Tensor:
    """Return the cosines and sines of every position's angles; shape (context, 2, size / 2).

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the halves of each head's vectors by their position's angles; shape (..., context, size) to the same."""
    cos, sin = rotation.unbind(dim=1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def weight_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the parameter groups: matrices with weight decay, gains without weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    gains = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}]


def mean_loss(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    text, following = batch
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten().long())


def evaluate(model: nn.Module, held_out: Windows, context: int, sample_bytes: int) -> dict[str, float | str]:
    """Return the bits per byte of held-out text and, unless ``sample_bytes`` is 0, samples after prompts from it."""
    device = next(model.parameters()).device
    # Not compiled: each new shape would cost a compilation, which takes longer than the whole evaluation.
    eager = model.forward
    found: dict[str, float | str] = {"bits_per_byte": bits_per_byte(eager, held_out, device)}
    if sample_bytes:
        stride = max(1, len(held_out) // PROMPTS)
        prompts = [held_out[index * stride][0][:PROMPT_BYTES] for index in range(min(PROMPTS, len(held_out)))]
        sampled = sample(eager, torch.stack(prompts).to(device), sample_bytes, context)
        found["samples"] = "\n\n".join(map(describe_sample, prompts, sampled))
    return found


def bits_per_byte(model: Model, held_out: Windows, device: torch.device) -> float:
    """Return the mean bits per byte that the model needs for some `HELD_OUT_WINDOWS` windows of held-out text."""
    stride = max(1, len(held_out) // HELD_OUT_WINDOWS)
    windows = [held_out[index] for index in range(0, len(held_out), stride)]
    losses = [
        mean_loss(model, (text[None].to(device), following[None].to(device))).item() for text, following in windows
    ]
    return sum(losses) / len(losses) / math.log(2)


def sample(model: Model, prompts: Tensor, count: int, context: int) -> Tensor:
    """Sample the bytes that follow some prompts, from a generator that always begins with the same seed.

    So two epochs' samples differ only because the model has changed. The generators of training stay unchanged.

    Args:
        prompts: bytes of shape (n, length).
        count: how many bytes to sample.
        context: how many of the last bytes the model reads.

    Returns:
        Bytes of shape (n, count), on the CPU.
    """
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    text = prompts
    for _ in range(count):
        logits = model(text[:, -context:])[:, -1].float().cpu()
        following = torch.multinomial(F.softmax(logits / TEMPERATURE, dim=-1), 1, generator=generator)
        text = torch.cat([text, following.to(text)], dim=1)
    return text[:, prompts.shape[1] :].cpu()


def describe_sample(prompt: Tensor, sampled: Tensor) -> str:
    """Return a prompt and the bytes that were sampled after it, as text."""
    before, after = (bytes(each.tolist()).decode(errors="replace") for each in (prompt, sampled))
    return f"--- after {before!r}:\n{after}"

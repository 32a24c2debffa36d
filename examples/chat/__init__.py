"""A recipe of supervised fine-tuning: a causal language model learns the assistant's answers in conversations.

By default a small new Qwen2 learns to explain the standard library from its docstrings, with a tokenizer that is
trained on them: nothing is downloaded. Its metric is the perplexity of held-out answers.
"""

import hashlib
import importlib.util
import json
import logging
import math
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from examples.chat.conversations import Conversation, read_conversations
from holdfast import Recipe, Schedule
from holdfast.errors import RecipeError
from holdfast.schedule import Name

log = logging.getLogger(__name__)

LIBRARIES = ("jinja2", "peft", "tokenizers", "transformers")
# One of this many conversations is held out.
HELD_OUT_EVERY = 20
# The target of a token that isn't learned. Source: torch, `cross_entropy`, ignore_index.
NOT_LEARNED = -100

# Tokens and targets, both of shape (length,), or (batch, length) for a batch.
Sample = tuple[Tensor, Tensor]
T = TypeVar("T")


class Settings(BaseModel):
    """The settings of the recipe."""

    data: str = Field("stdlib", description="stdlib, or a URL or glob of files whose lines are conversations")
    limit: int | None = Field(None, ge=1, description="the largest number of conversations; None for all")
    model: str | None = Field(None, description="a folder with a model and its tokenizer; None for a new model")
    template: str = Field("qwen2.5", description="qwen2.5, own for that of the model's folder, or a path")
    max_length: int = Field(256, ge=8, description="the largest number of tokens; further ones are cut off")
    lora_rank: int = Field(0, ge=0, description="the rank of LoRA adapters; 0 to train all weights")
    vocab_size: int = Field(2048, description="the number of tokens of a new model")
    layers: int = Field(2, ge=1, description="the number of layers of a new model")
    heads: int = Field(4, ge=1, description="the number of attention heads of a new model")
    width: int = Field(128, ge=2, description="the size of a token's vector in a new model")
    batch_size: int = Field(16, ge=1, description="the conversations of a micro-batch")
    grad_accum: int = Field(1, ge=1, description="the micro-batches of a step")
    steps_per_epoch: int | None = Field(None, ge=1, description="None for one pass over the conversations")
    lr: float = Field(3e-3, gt=0, description="the learning rate")
    weight_decay: float = Field(0.1, ge=0, description="the weight decay")
    clip_norm: float = Field(1.0, gt=0, description="the largest norm of the gradient")
    schedule: Name = Field("cosine", description="the shape of the learning rate; see holdfast.schedule")
    schedule_epochs: float = Field(2.0, gt=0, description="epochs until the learning rate has its last value")
    warmup_steps: int = Field(40, ge=0, description="steps in which the learning rate rises")
    final_lr_scale: float = Field(0.05, ge=0, description="the last learning rate, as a part of lr")


def chat(settings: Settings) -> Recipe:
    """Build the recipe.

    Raises:
        RecipeError: a library isn't installed; a line of the data is no conversation; there are too few conversations;
            or the template doesn't mark the answers or doesn't suit the tokenizer.
    """
    check_installed()
    from examples.chat import models, tokens  # imported late: these modules import transformers, which takes seconds

    conversations = read_conversations(settings.data, settings.limit)
    tokenizer = make_tokenizer(settings, conversations)
    template: str = tokenizer.chat_template
    encoded = [tokens.encode(each, template, tokenizer, settings.max_length) for each in conversations]
    learned, held_out = choose(encoded, settings)
    if settings.model is None:
        sizes = settings.max_length, settings.layers, settings.heads, settings.width
        model = models.make_model(tokenizer, *sizes)
    else:
        model = models.load_model(settings.model, len(tokenizer))
    if settings.lora_rank:
        model = models.add_lora(model, settings.lora_rank)
    return Recipe(
        model=model,
        data=learned,
        optimizer=make_optimizer(model, settings),
        loss=answer_loss,
        batch_size=settings.batch_size,
        grad_accum=settings.grad_accum,
        steps_per_epoch=settings.steps_per_epoch,
        clip_norm=settings.clip_norm,
        schedule=Schedule(settings.schedule, settings.schedule_epochs, settings.warmup_steps, settings.final_lr_scale),
        evaluate=lambda model: {"perplexity": perplexity(model, held_out, settings.batch_size)},
        collate=pad,
        data_sha256=hash_conversations(conversations),
        content={
            "tokenizer": tokens.hash_tokenizer(tokenizer),
            "chat_template": hashlib.sha256(template.encode()).hexdigest(),
        },
        unit="conversations",
    )


def check_installed() -> None:
    """Check that the recipe's libraries are installed, and keep them from the network.

    Raises:
        RecipeError: a library is missing.
    """
    # set before the import, because huggingface_hub reads the variable when it is imported
    os.environ["HF_HUB_OFFLINE"] = "1"
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise RecipeError(f"the recipe chat needs {', '.join(missing)}", hint=f"pip install {' '.join(missing)}")


def make_tokenizer(settings: Settings, conversations: Sequence[Conversation]) -> Any:
    """Return the tokenizer of the model's folder, or one that is trained on the conversations to learn from.

    It is a ``PreTrainedTokenizerFast`` of transformers, and has the template of the settings.

    Raises:
        RecipeError: the folder has no tokenizer; or the template doesn't mark the answers, or doesn't suit the
            tokenizer.
    """
    from examples.chat import tokens

    if settings.model is None:
        texts = (turn["content"] for each in hold_out(conversations)[0] for turn in each.messages)
        tokenizer = tokens.train_tokenizer(texts, settings.vocab_size)
    else:
        tokenizer = tokens.load_tokenizer(settings.model)
    tokenizer.chat_template = tokens.read_template(settings.template, tokenizer)
    return tokenizer


def hold_out(values: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return the values to learn from, and those that are held out: one of `HELD_OUT_EVERY`."""
    learned = [value for number, value in enumerate(values) if number % HELD_OUT_EVERY]
    return learned, list(values[::HELD_OUT_EVERY])


def choose(encoded: Sequence[tuple[list[int], list[bool]]], settings: Settings) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to learn from and the held-out ones, without those that have no target.

    Raises:
        RecipeError: there are too few samples.
    """
    samples = [make_sample(*each) for each in encoded]
    learned, held_out = (
        [sample for sample in part if (sample[1][1:] != NOT_LEARNED).any()] for part in hold_out(samples)
    )
    if left_out := len(samples) - len(learned) - len(held_out):
        log.warning("%d conversations have no answer in their first %d tokens", left_out, settings.max_length)
    if len(learned) < settings.batch_size or not held_out:
        raise RecipeError(
            f"settings.data = {settings.data!r} has {len(learned)} conversations to learn from and {len(held_out)} to "
            f"hold out, with an answer in their first {settings.max_length} tokens: expected at least "
            f"{settings.batch_size} and 1",
            hint="one of 20 is held out; give more conversations, a larger max_length or a smaller batch_size",
        )
    return learned, held_out


def make_sample(tokens: list[int], is_answer: list[bool]) -> Sample:
    """Return tokens and their targets: the token itself if it is the assistant's, otherwise `NOT_LEARNED`."""
    found = torch.tensor(tokens)
    return found, found.masked_fill(~torch.tensor(is_answer), NOT_LEARNED)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return an AdamW over the weights that are trained: matrices with weight decay, gains and biases without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.lr, betas=(0.9, 0.95))


def pad(samples: Sequence[Sample]) -> Sample:
    """Return tokens and targets of several conversations, padded at their ends; shapes (batch, length)."""
    tokens, targets = ([sample[part] for sample in samples] for part in (0, 1))
    return pad_sequence(tokens, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=NOT_LEARNED)


def answer_losses(model: nn.Module, batch: Sample) -> Tensor:
    """Return the loss of each token of the answers, in nats; shape (number of these tokens,).

    There is no attention mask: the padding comes after all tokens, and no token attends to later ones.
    """
    tokens, targets = batch
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    is_learned = targets[:, 1:] != NOT_LEARNED
    return F.cross_entropy(logits[is_learned].float(), targets[:, 1:][is_learned], reduction="none")


def answer_loss(model: nn.Module, batch: Sample) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens, in nats."""
    return answer_losses(model, batch).mean()


def perplexity(model: nn.Module, held_out: Sequence[Sample], batch_size: int) -> float:
    """Return the perplexity of the held-out answers: e to the power of the mean loss of all their tokens."""
    device = next(model.parameters()).device
    total, count = 0.0, 0
    for start in range(0, len(held_out), batch_size):
        tokens, targets = pad(held_out[start : start + batch_size])
        losses = answer_losses(model, (tokens.to(device), targets.to(device)))
        total, count = total + losses.sum().item(), count + len(losses)
    return math.exp(total / count)


def hash_conversations(conversations: Sequence[Conversation]) -> str:
    """Return the SHA-256 of all messages."""
    lines = (json.dumps(each.messages) for each in conversations)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

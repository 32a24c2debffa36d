"""Texts and sequences: recurrent networks, attention, embeddings, caches of positions."""

import functools
import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler

from holdfast import Recipe, Run
from tests.programs.network import BATCH_SIZE, LONG_EPOCH, begin, learn, make_long

VOCABULARY, LENGTH = 20, 6


class Tokens(Dataset[Any]):
    def __init__(self, count: int = LONG_EPOCH * BATCH_SIZE) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(4))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def predict(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.rnn = nn.Embedding(VOCABULARY, 8), nn.GRU(8, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])  # type: ignore[no-any-return]


def models_letters(run: Run) -> None:
    """Train a character model that begins with zeros, clip, and sample a text now and then."""
    model, optimizer = begin(run, Recurrent())
    all_losses: list[float] = []
    current = 0.0
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        optimizer.zero_grad()
        loss = predict(model, step.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        current += loss.item()
        if step.number % 4 == 3:
            all_losses.append(current / 4)
            current = 0.0
            with torch.no_grad():
                print(torch.multinomial(model(step.batch[0][:1])[0, -1].softmax(0), 3).tolist())
        step.log(loss=loss)


class Attending(nn.Module):
    """A transformer that computes its mask once for each length and keeps it in a private dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.norm = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), nn.Linear(8, VOCABULARY)
        self._masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self._masks:
            self._masks[x.shape[1]] = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        mask = self._masks[x.shape[1]]
        hidden = self.embed(x)
        hidden = hidden + self.attention(self.norm(hidden), self.norm(hidden), hidden, attn_mask=mask)[0]
        return self.head(hidden)  # type: ignore[no-any-return]


def attends() -> Recipe:
    return make_long(predict, Attending(), data=Tokens())


def attends_in_a_loop(run: Run) -> None:
    model, optimizer = begin(run, Attending())
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        step.log(loss=learn(predict(model, step.batch), optimizer))


class Rotary(nn.Module):
    """Rotates by tables that are computed when a longer text comes: a public length, and tensors beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.longest, self.cos, self.sin = 0, None, None

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length > self.longest:
            angles = torch.outer(torch.arange(length), 1 / 100 ** (torch.arange(4) / 4))
            self.longest, self.cos, self.sin = length, angles.cos(), angles.sin()
        one, other = self.embed(x).chunk(2, dim=-1)
        cos, sin = self.cos[:length], self.sin[:length]
        return self.head(torch.cat([one * cos - other * sin, one * sin + other * cos], -1))  # type: ignore[no-any-return]


def rotates(run: Run) -> None:
    model, optimizer = begin(run, Rotary())
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        length = 3 + step.number % 4
        x, y = step.batch
        step.log(loss=learn(predict(model, (x[:, :length], y[:, :length])), optimizer))


@functools.lru_cache
def sinusoids(length: int) -> Tensor:
    """Return a table that depends on its argument alone."""
    places = torch.arange(length)[:, None] / 10 ** torch.arange(8)
    return torch.where(torch.arange(8) % 2 == 0, places.sin(), places.cos())


def remembers_positions() -> Recipe:
    """Take positions from a function with lru_cache, whose results follow from the arguments."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, 8), "head": nn.Linear(8, VOCABULARY)})

    def loss(model: Any, batch: Any) -> Tensor:
        hidden = model["embed"](batch[0]) + sinusoids(batch[0].shape[1])
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), batch[1].flatten())

    return make_long(loss, model, data=Tokens())


def translates(run: Run) -> None:
    """Train a sequence to sequence model, whose decoder is sometimes told the right word."""
    torch.manual_seed(1)
    encoder, decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)
    embed, head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
    model = nn.ModuleList([encoder, decoder, embed, head])
    model, optimizer = begin(run, model)
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        x, y = step.batch
        hidden, word, loss = encoder(embed(x))[1][0], torch.zeros(len(x), dtype=torch.long), torch.zeros(())
        is_told = random.random() < 0.5
        for place in range(LENGTH):
            hidden = decoder(embed(word), hidden)
            out = head(hidden)
            loss = loss + F.cross_entropy(out, y[:, place])
            word = y[:, place] if is_told else out.argmax(1)
        step.log(loss=learn(loss / LENGTH, optimizer))


class Trainer:
    """The trainer of a well-known small GPT: callbacks, times, and a sampler that never ends."""

    def __init__(self, run: Run, model: nn.Module, dataset: Dataset[Any]) -> None:
        self.run, self.model, self.dataset = run, model, dataset
        self.optimizer: Any = None
        self.callbacks: dict[str, list[Any]] = {}
        self.iter_num, self.loss = 0, torch.zeros(())

    def add_callback(self, name: str, callback: Any) -> None:
        self.callbacks.setdefault(name, []).append(callback)

    def trigger(self, name: str) -> None:
        for callback in self.callbacks.get(name, []):
            callback(self)

    def fit(self) -> None:
        decayed = [each for each in self.model.parameters() if each.dim() >= 2]
        others = [each for each in self.model.parameters() if each.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
        self.run.keep(model=self.model, optimizer=self.optimizer)
        sampler = RandomSampler(self.dataset, replacement=True, num_samples=int(1e4))  # type: ignore[arg-type]
        loader = DataLoader(self.dataset, sampler=sampler, batch_size=BATCH_SIZE)
        for step in self.run.steps(loader, per_epoch=LONG_EPOCH):
            self.loss = predict(self.model, step.batch)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            step.log(loss=self.loss)
            self.trigger("on_batch_end")
            self.iter_num += 1


def has_a_trainer(run: Run) -> None:
    trainer = Trainer(run, Attending(), Tokens())

    def say(trainer: Trainer) -> None:
        if trainer.iter_num % 4 == 0:
            print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")

    trainer.add_callback("on_batch_end", say)
    trainer.fit()


def samples_negatives(run: Run) -> None:
    """word2vec: sparse embeddings, and negative samples."""
    torch.manual_seed(1)
    center, context = nn.Embedding(VOCABULARY, 4, sparse=True), nn.Embedding(VOCABULARY, 4, sparse=True)
    optimizer = torch.optim.SparseAdam([*center.parameters(), *context.parameters()], lr=0.05)
    run.keep(center=center, context=context, optimizer=optimizer)
    counts = torch.bincount(Tokens().tokens.flatten(), minlength=VOCABULARY).float() ** 0.75
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        x, y = step.batch[0][:, 0], step.batch[1][:, 0]
        others = torch.multinomial(counts, len(x) * 3, replacement=True).view(len(x), 3)
        right = (center(x) * context(y)).sum(1)
        wrong = (center(x)[:, None] * context(others)).sum(2)
        step.log(loss=learn(-F.logsigmoid(right).mean() - F.logsigmoid(-wrong).mean(), optimizer))


def bags_words() -> Recipe:
    """Classify texts by an EmbeddingBag."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"bag": nn.EmbeddingBag(VOCABULARY, 8, mode="mean"), "head": nn.Linear(8, 4)})

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model["head"](model["bag"](batch[0])), batch[1][:, 0] % 4)

    return make_long(loss, model, data=Tokens(), clip_norm=0.5)


class Masking:
    """Masks words, as a collator does; it has only constants."""

    def __init__(self, probability: float = 0.15) -> None:
        self.probability = probability

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        x = torch.stack([each[0] for each in samples])
        chosen = torch.rand(x.shape) < self.probability
        return x.masked_fill(chosen, 0), x.masked_fill(~chosen, -100)


def models_masked_words() -> Recipe:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")
        return out / 8

    return make_long(loss, Recurrent(), data=Tokens(), collate=Masking())


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T  # type: ignore[no-any-return]


def adapts(run: Run) -> None:
    model = Recurrent().requires_grad_(False)
    model.head = Adapted(model.head)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        step.log(loss=learn(predict(model, step.batch), optimizer))


class Routed(nn.Module):
    """A mixture of experts with a noisy router; the loss of balance is an attribute that each pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.router = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3)
        self.experts, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, VOCABULARY)
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        scores = self.router(hidden)
        if self.training:
            scores = scores + 0.1 * torch.randn_like(scores)
        shares = scores.softmax(-1)
        self.balance = (shares.mean((0, 1)) ** 2).sum() * 3
        mixed = sum(shares[..., number, None] * expert(hidden) for number, expert in enumerate(self.experts))
        return self.head(hidden + mixed)  # type: ignore[no-any-return]


def routes_to_experts() -> Recipe:
    def loss(model: Any, batch: Any) -> Tensor:
        return predict(model, batch) + 0.01 * model.balance

    return make_long(loss, Routed(), data=Tokens())


def packs_sequences(run: Run) -> None:
    """Train on texts of several lengths, packed."""
    torch.manual_seed(1)
    model, optimizer = begin(run, nn.ModuleDict({"rnn": nn.LSTM(4, 8, batch_first=True), "head": nn.Linear(8, 1)}))
    for step in run.steps(per_epoch=LONG_EPOCH):
        lengths = torch.randint(1, LENGTH, (BATCH_SIZE,))
        x = torch.randn(BATCH_SIZE, LENGTH, 4)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(model["rnn"](packed)[0], batch_first=True)
        step.log(loss=learn((model["head"](out).mean((1, 2)) - x.mean((1, 2))).square().mean(), optimizer))


def warms_up(run: Run) -> None:
    """Follow the schedule of the transformer's paper, by LambdaLR."""
    model, optimizer = begin(run, Attending())
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) ** -0.5, (step + 1) * 20**-1.5) * math.sqrt(20)
    )
    run.keep(scheduler=scheduler)
    for step in run.steps(DataLoader(Tokens(), BATCH_SIZE, shuffle=True)):
        loss = learn(predict(model, step.batch), optimizer)
        scheduler.step()
        step.log(loss=loss, lr=scheduler.get_last_lr()[0])

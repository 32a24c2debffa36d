"""Tutorials of sequences: recurrent networks, attention, translation, language models."""

import math
import random
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from holdfast import Run
from tests.programs.tutorials.data import BATCH, CLASSES, STEPS, Windows, letters, load

WORDS = 12


class CharRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.rnn, self.out = nn.Embedding(WORDS, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, WORDS)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.embed(x), hidden)
        return self.out(out), hidden


@torch.no_grad()
def generate(model, length: int = 12) -> str:
    x, hidden, text = torch.zeros(1, 1, dtype=torch.long), None, ""
    for _ in range(length):
        logits, hidden = model(x, hidden)
        x = torch.multinomial(F.softmax(logits[:, -1], dim=-1), 1)
        text += chr(97 + x.item())
    return text


def writes_text(run: Run) -> None:
    """Train on characters, and generate a text at each epoch's end."""
    model = CharRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.keep(model=model, optimizer=optimizer)
    start = time.time()
    for epoch in run.epochs(load(Windows())):
        total = 0
        for inputs, targets in run.batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            total += loss.item()
            run.log(loss=loss)
        run.show(text=generate(model))
        print(f"{time.time() - start:.0f}s ({epoch} {100 * epoch / run.config.epochs:.0f}%) {total / STEPS:.4f}")


def repackage_hidden(hidden):
    return tuple(each.detach() for each in hidden)


def carries_hidden_states(run: Run, bptt: int = 5) -> None:
    """Carry the hidden state through each epoch; a worse validation lowers the rate."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"embed": nn.Embedding(WORDS, 8), "rnn": nn.LSTM(8, 8), "out": nn.Linear(8, WORDS)})
    data = letters().view(4, -1).t().contiguous()
    state = {"hidden": (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)), "lr": 0.5, "best": None}
    run.keep(model=model, state=state)
    for epoch in run.epochs(per_epoch=STEPS):
        state["hidden"] = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
        for step in run.steps():
            i = step.number % STEPS * bptt
            model.zero_grad()
            hidden = repackage_hidden(state["hidden"])
            out, state["hidden"] = model["rnn"](model["embed"](data[i : i + bptt]), hidden)
            state["hidden"] = repackage_hidden(state["hidden"])
            loss = F.cross_entropy(model["out"](out).flatten(0, 1), data[i + 1 : i + 1 + bptt].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for p in model.parameters():
                    p.data.add_(p.grad, alpha=-state["lr"])
            step.log(loss=loss)
        with torch.no_grad():
            out, _ = model["rnn"](model["embed"](data[-8:-1]))
            val_loss = F.cross_entropy(model["out"](out).flatten(0, 1), data[-7:].flatten()).item()
        print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
        if not state["best"] or val_loss < state["best"]:
            state["best"] = val_loss
        else:
            state["lr"] /= 4.0


def translates(run: Run, teacher_forcing_ratio: float = 0.5) -> None:
    """Translate by attention, sometimes with the right word as the decoder's input."""
    torch.manual_seed(1)
    encoder, decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(16, 8)
    embedding, out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
    modules = nn.ModuleList([encoder, decoder, embedding, out])
    encoder_optimizer = torch.optim.Adam([*encoder.parameters(), *embedding.parameters()], lr=0.005)
    decoder_optimizer = torch.optim.Adam([*decoder.parameters(), *out.parameters()], lr=0.005)
    run.keep(modules=modules, encoder_optimizer=encoder_optimizer, decoder_optimizer=decoder_optimizer)
    plot_losses, print_loss_total, plot_loss_total = [], 0, 0
    for epoch in run.epochs(load(Windows())):
        for inputs, targets in run.batches():
            encoder_optimizer.zero_grad()
            decoder_optimizer.zero_grad()
            keys, hidden = encoder(embedding(inputs))
            hidden, word, loss = hidden[0], inputs[:, 0] * 0, 0
            is_forced = random.random() < teacher_forcing_ratio
            for place in range(targets.shape[1]):
                weights = F.softmax((keys @ hidden[:, :, None])[:, :, 0], dim=1)
                context = (weights[:, None] @ keys)[:, 0]
                hidden = decoder(torch.cat([embedding(word), context], 1), hidden)
                logits = out(hidden)
                loss = loss + F.cross_entropy(logits, targets[:, place])
                word = targets[:, place] if is_forced else logits.argmax(1).detach()
            loss.backward()
            encoder_optimizer.step()
            decoder_optimizer.step()
            print_loss_total += loss.item()
            plot_loss_total += loss.item()
            run.log(loss=loss / targets.shape[1])
        print(f"{epoch} {print_loss_total / STEPS:.4f}")
        plot_losses.append(plot_loss_total / STEPS)
        print_loss_total, plot_loss_total = 0, 0


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.ln1, self.ln2, self.qkv = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wte, self.wpe = nn.Embedding(WORDS, 8), nn.Embedding(8, 8)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        logits = self.head(self.blocks(self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def writes_like_nanogpt(run: Run, warmup: int = 5, decay: int = 40, accumulation: int = 3) -> None:
    """Accumulate several random batches for a step, at a rate by the step; estimate losses now and then."""
    model, text, tokens = GPT(), letters(), 0
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    run.keep(model=model, optimizer=optimizer)

    def get_batch(size: int = BATCH):
        ix = torch.randint(len(text) - 7, (size,))
        return torch.stack([text[i : i + 6] for i in ix]), torch.stack([text[i + 1 : i + 7] for i in ix])

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        out = torch.stack([model(*get_batch()) for _ in range(2)]).mean()
        model.train()
        return out

    for step in run.steps(per_epoch=STEPS):
        it = step.number
        lr = 0.01 * it / warmup if it < warmup else 0.005 * (1 + math.cos(math.pi * min(1, it / decay)))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if it % 4 == 0:
            print(f"step {it}: {estimate_loss():.4f}")
        for _ in range(accumulation):
            loss = model(*get_batch()) / accumulation
            loss.backward()
            tokens += BATCH * 6
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step.log(loss=loss * accumulation)
    print(f"{tokens} tokens")


class MoE(nn.Module):
    """Routes each token to two of four experts, and counts their loads in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))
        self.aux_loss = torch.zeros(())

    def forward(self, x):
        scores = F.softmax(self.gate(x), dim=-1)
        top = (scores + self.bias).topk(2, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(1, top, scores.gather(1, top))
        if self.training:
            self.load += F.one_hot(top, 4).sum((0, 1)).float()
        self.aux_loss = 4 * (scores.mean(0) * (weights > 0).float().mean(0)).sum()
        return sum(weights[:, i : i + 1] * each(x) for i, each in enumerate(self.experts))


def mixes_experts(run: Run) -> None:
    """Balance the experts by a bias that follows their loads, and by a loss."""
    moe, head, embed = MoE(), nn.Linear(8, WORDS), nn.Embedding(WORDS, 8)
    optimizer = torch.optim.AdamW([*moe.parameters(), *head.parameters(), *embed.parameters()], lr=0.01)
    run.keep(moe=moe, head=head, embed=embed, optimizer=optimizer)
    for epoch in run.epochs(load(Windows())):
        for inputs, targets in run.batches():
            logits = head(moe(embed(inputs.flatten())))
            loss = F.cross_entropy(logits, targets.flatten()) + 0.01 * moe.aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                moe.bias += 0.01 * torch.sign(moe.load.mean() - moe.load)
                moe.load.zero_()
            run.log(loss=loss, aux=moe.aux_loss)
        print(f"epoch {epoch}: {loss.item():.4f}, bias {moe.bias.tolist()}")


class MaskWords:
    """Masks words by a generator of its own, as a collator of a library does."""

    def __init__(self, seed: int = 3) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, samples):
        x = torch.stack([text for text, _ in samples])
        labels = x.clone()
        masked = torch.bernoulli(torch.full(x.shape, 0.3), generator=self.generator).bool()
        labels[~masked] = -100
        return {"input_ids": x.masked_fill(masked, 0), "labels": labels}


def models_masked_words(run: Run, warmup_steps: int = 6) -> None:
    """Guess masked words, with a linear warm-up and decay; the collator's generator is kept."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, WORDS))
    optimizer, collator, total = torch.optim.AdamW(model.parameters(), lr=5e-3), MaskWords(), STEPS * run.config.epochs
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda it: it / warmup_steps if it < warmup_steps else (total - it) / (total - warmup_steps)
    )
    run.keep(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, generator=collator.generator)
    for epoch in run.epochs(load(Windows(), collate_fn=collator)):
        model.train()
        for batch in run.batches():
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            run.log(loss=loss, rate=lr_scheduler.get_last_lr()[0])
        print(f"epoch {epoch}: perplexity {math.exp(loss.item()):.2f}")


def collate_texts(samples):
    """Return texts of several lengths in one piece, with their offsets."""
    texts = [text[: 2 + int(text[0]) % 4] for text, _ in samples]
    offsets = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
    return torch.tensor([int(text[0]) % CLASSES for text in texts]), torch.cat(texts), offsets


def classifies_texts(run: Run) -> None:
    """Classify bags of words; lower the rate if an epoch's accuracy isn't the best."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"embedding": nn.EmbeddingBag(WORDS, 8, sparse=True), "fc": nn.Linear(8, CLASSES)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    state = {"total_accu": None}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, state=state)
    for epoch in run.epochs(load(Windows(), collate_fn=collate_texts)):
        model.train()
        total_acc, total_count = 0, 0
        for idx, (label, text, offsets) in enumerate(run.batches()):
            optimizer.zero_grad()
            predicted_label = model["fc"](model["embedding"](text, offsets))
            loss = F.cross_entropy(predicted_label, label)
            loss.backward()
            optimizer.step()
            total_acc += (predicted_label.argmax(1) == label).sum().item()
            total_count += label.size(0)
            if idx % 5 == 0 and idx > 0:
                print(f"| epoch {epoch:3d} | {idx:5d} batches | accuracy {total_acc / total_count:8.3f}")
                total_acc, total_count = 0, 0
            run.log(loss=loss)
        with torch.no_grad():
            label, text, offsets = collate_texts([Windows()[i] for i in range(16)])
            accu_val = (model["fc"](model["embedding"](text, offsets)).argmax(1) == label).float().mean().item()
        if state["total_accu"] is not None and state["total_accu"] > accu_val:
            scheduler.step()
        else:
            state["total_accu"] = accu_val


def recognises_speech(run: Run) -> None:
    """Align sounds with letters by CTC, on padded batches."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 8, bidirectional=True), "out": nn.Linear(16, WORDS)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sounds = torch.randn(STEPS * BATCH, 12, 4, generator=torch.Generator().manual_seed(2))
    texts = letters(STEPS * BATCH * 3).view(-1, 3) % (WORDS - 1) + 1
    run.keep(model=model, optimizer=optimizer)
    for _ in run.epochs(load(TensorDataset(sounds, texts))):
        avg = []
        for x, y in run.batches():
            lengths = torch.full((len(x),), 3)
            logits = F.log_softmax(model["out"](model["rnn"](x.transpose(0, 1))[0]), dim=-1)
            loss = F.ctc_loss(logits, y, torch.full((len(x),), 12), lengths)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            avg.append(loss.item())
            run.log(loss=loss)
        print(f"{sum(avg) / len(avg):.4f}")

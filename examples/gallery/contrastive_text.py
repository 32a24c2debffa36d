"""Train two encoders of texts by InfoNCE, so that each question is nearest to its own answer."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import holdfast

PAD, VOCABULARY = 0, 400


class Pairs(Dataset):
    """Made-up questions and answers: an answer is its question in a different language, a third of it lost."""

    def __init__(self, count, seed, topics=40, length=12):
        generator = torch.Generator().manual_seed(seed)
        words = torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(0)) + 1
        topic = torch.randint(topics, (count, 1), generator=generator)
        per_topic = len(words) // topics
        drawn = torch.randint(per_topic, (count, length), generator=generator)
        self.questions = words[topic * per_topic + drawn]
        translation = torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.answers = translation[self.questions - 1].flip(1)
        is_lost = torch.rand(self.answers.shape, generator=generator) < 0.3
        self.answers[is_lost] = torch.randint(1, VOCABULARY, (int(is_lost.sum()),), generator=generator)
        self.lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)

    def __len__(self):
        return len(self.questions)

    def __getitem__(self, index):
        return self.questions[index][: self.lengths[index]], self.answers[index]


def collate(pairs):
    return tuple(
        nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD) for texts in zip(*pairs, strict=True)
    )


class Encoder(nn.Module):
    def __init__(self, width=64, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, dim)

    def forward(self, tokens):
        is_pad = tokens == PAD
        hidden = self.layer(self.embed(tokens), src_key_padding_mask=is_pad).masked_fill(is_pad[..., None], 0)
        return F.normalize(self.head(hidden.sum(1) / (~is_pad).sum(1, keepdim=True)), dim=1)


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.question, self.answer = Encoder(), Encoder()
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, questions, answers):
        return self.log_scale.exp() * self.question(questions) @ self.answer(answers).T


def info_nce(logits):
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@torch.no_grad()
def find_recall(model, loader):
    """Return how often a question's own answer is the nearest among those of its batch."""
    model.eval()
    hits = [model(*batch).argmax(1) == torch.arange(len(batch[0])) for batch in loader]
    model.train()
    return torch.cat(hits).float().mean().item()


def train(run: holdfast.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args([])

    torch.manual_seed(0)
    loader = DataLoader(Pairs(2048, 1), args.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    val_loader = DataLoader(Pairs(256, 2), args.batch_size, collate_fn=collate)
    model = DualEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, epochs=8, steps_per_epoch=len(loader))

    best = {"recall": 0.0, "epoch": -1}
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, best=best)
    for epoch in run.epochs(loader):
        for questions, answers in run.batches():
            loss = info_nce(model(questions, answers))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                model.log_scale.clamp_(max=math.log(100))
            run.log(loss=loss)
        recall = find_recall(model, val_loader)
        if recall > best["recall"]:
            best.update(recall=recall, epoch=epoch)
        print(f"epoch {epoch}: loss {loss.item():.4f}, recall@1 {recall:.4f}, best {best['recall']:.4f}")
    torch.save(model.state_dict(), "contrastive_text.pt")

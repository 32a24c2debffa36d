"""Train a small classifier with Accelerate: gradient accumulation, and an evaluation after every epoch."""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

EVAL_BATCH_SIZE = 32


class Sums(Dataset):
    """Sequences of digits, labelled by how often the digit 3 occurs in them."""

    def __init__(self, count, seed, length=6, num_labels=4):
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(4, (count, length), generator=generator)
        self.labels = (self.input_ids == 3).sum(dim=1).clamp(max=num_labels - 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class SequenceClassifier(nn.Module):
    def __init__(self, num_labels=4, width=32):
        super().__init__()
        self.embedding = nn.Embedding(4, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(width, num_labels)

    def forward(self, input_ids, labels):
        _, hidden = self.encoder(self.embedding(input_ids))
        logits = self.classifier(self.dropout(hidden[0]))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def get_dataloaders(batch_size):
    def collate_fn(examples):
        return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}

    train_dataloader = DataLoader(Sums(240, seed=0), shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(Sums(72, seed=1), shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train_dataloader, eval_dataloader


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def scale(step):
        if step < num_warmup_steps:
            return step / num_warmup_steps
        return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, scale)


if __name__ == "__main__":
    config = {"lr": 2e-2, "num_epochs": 4, "seed": 42, "batch_size": 16, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(gradient_accumulation_steps=config["gradient_accumulation_steps"])
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = SequenceClassifier()
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    updates = len(train_dataloader) * config["num_epochs"] // config["gradient_accumulation_steps"]
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=updates)

    # prepare returns the objects in the order in which they are given
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    history = {"loss": [], "accuracy": []}
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            history["loss"].append(loss.item())
            accelerator.print(json.dumps({"step": len(history["loss"]), "loss": loss.item()}))

        model.eval()
        correct = []
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch)["logits"].argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct.append(predictions == references)
        history["accuracy"].append(torch.cat(correct).float().mean().item())
        accelerator.print(f"epoch {epoch}: accuracy {history['accuracy'][-1]:.4f}")

    accelerator.print(f"best accuracy: {max(history['accuracy']):.4f}")
    accelerator.end_training()

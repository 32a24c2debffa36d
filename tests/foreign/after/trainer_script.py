"""Fine-tune a sequence classifier with Trainer: a loss of one's own, a collator, callbacks, metrics and evaluation."""

import json
import random
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import holdfast
from holdfast.adapters import transformers as held

MASK = 1
NUM_LABELS = 3


class Marked(Dataset):
    """Sequences whose label is the number of times that a mark occurs in them."""

    def __init__(self, count, seed, length=10):
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(2, 9, (count, length), generator=generator)
        self.labels = (self.input_ids == 5).sum(dim=1).clamp(max=NUM_LABELS - 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class MaskingCollator:
    """Batches in which some tokens are masked."""

    def __init__(self, probability, seed):
        self.probability = probability
        self.random = random.Random(seed)

    def __call__(self, features):
        batch = {key: torch.stack([each[key] for each in features]) for key in features[0]}
        for row in batch["input_ids"]:
            if self.random.random() < self.probability:
                row[self.random.randrange(len(row))] = MASK
        return batch


class SmoothedTrainer(Trainer):
    """A Trainer whose loss smooths the labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


class PrintLogs(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        kept = {key: logs[key] for key in ("loss", "eval_loss", "eval_accuracy") if key in logs}
        if kept:
            print(json.dumps({"step": state.global_step, **kept}))


class StopDecay(TrainerCallback):
    """Ends the weight decay when the accuracy has reached a limit twice."""

    def __init__(self, limit):
        self.limit = limit
        self.accuracies = []
        self.times = 0

    def on_evaluate(self, args, state, control, metrics, optimizer=None, **kwargs):
        self.accuracies.append(metrics["eval_accuracy"])
        self.times += metrics["eval_accuracy"] >= self.limit
        if self.times == 2:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0


def compute_metrics(prediction):
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def train(run: holdfast.Run) -> None:
    set_seed(7)
    config = BertConfig(
        vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=NUM_LABELS,
    )  # fmt: skip
    collator = MaskingCollator(probability=0.3, seed=0)
    with tempfile.TemporaryDirectory() as output_dir:
        args = TrainingArguments(
            output_dir=output_dir, num_train_epochs=5, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            learning_rate=5e-3, lr_scheduler_type="cosine", warmup_steps=6, weight_decay=0.01, seed=7,
            logging_steps=1, eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = SmoothedTrainer(
            model=BertForSequenceClassification(config),
            args=args,
            data_collator=collator,
            train_dataset=Marked(184, seed=0),
            eval_dataset=Marked(48, seed=1),
            compute_metrics=compute_metrics,
            callbacks=[PrintLogs(), StopDecay(limit=0.5)],
        )
        run.keep(collator=collator.random)
        held.train(run, trainer)
        trainer.save_model()

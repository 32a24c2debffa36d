"""Fine-tune a causal language model with LoRA: a small Llama, made here, learns to answer sums of digits."""

import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import holdfast

CHARACTERS = " 0123456789+=."


def encode(text):
    return [CHARACTERS.index(character) for character in text]


class Sums(Dataset):
    """Sums such as ``3+9=12.``; the model learns the answer only."""

    def __init__(self, count, seed):
        digits = torch.randint(10, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
        self.examples = [(f"{a}+{b}=", f"{a + b}.".ljust(3)) for a, b in digits]

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        question, answer = map(encode, self.examples[index])
        return {
            "input_ids": torch.tensor(question + answer),
            "labels": torch.tensor([-100] * len(question) + answer),
        }


def load_base_model():
    """Return the model to fine-tune. In your script this is ``AutoModelForCausalLM.from_pretrained(...)``."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@torch.no_grad()
def find_accuracy(model, loader):
    model.eval()
    right = total = 0
    for batch in loader:
        predicted = model(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
        labels = batch["labels"][:, 1:]
        right += ((predicted == labels) | (labels == -100)).all(1).sum().item()
        total += len(labels)
    model.train()
    return right / total


def train(run: holdfast.Run) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--lora_rank", type=int, default=8)
    args = parser.parse_args([])

    torch.manual_seed(0)
    train_dataloader = DataLoader(Sums(1024, 1), args.batch_size, shuffle=True)
    eval_dataloader = DataLoader(Sums(128, 2), args.batch_size)
    peft_config = LoraConfig(
        task_type="CAUSAL_LM", r=args.lora_rank, lora_alpha=2 * args.lora_rank, lora_dropout=0.05,
        target_modules="all-linear", modules_to_save=["lm_head"],
    )  # fmt: skip
    model = get_peft_model(load_base_model(), peft_config)
    model.print_trainable_parameters()

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=args.lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=20, num_training_steps=len(train_dataloader) * run.config.epochs
    )

    run.keep(model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)
    for epoch in run.epochs(train_dataloader):
        model.train()
        for batch in run.batches():
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        print(f"epoch={epoch}: loss={loss.item():.4f} accuracy={find_accuracy(model, eval_dataloader):.4f}")
    model.save_pretrained("fine_tuning")

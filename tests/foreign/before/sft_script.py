"""Fine-tune a causal language model with SFTTrainer: packed sequences, completions after prompts, a linear schedule."""

import json
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make_texts(count):
    for index in range(count):
        start, length = index % 5, 2 + index % 4
        yield " ".join([*NUMBERS[start : start + length], "then", NUMBERS[(start + length) % len(NUMBERS)]])


def make_tokenizer(texts):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


class LogLosses(TrainerCallback):
    """Prints each loss, and remembers the lowest one."""

    def __init__(self):
        self.best = {"loss": float("inf"), "step": 0}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            if logs["loss"] < self.best["loss"]:
                self.best = {"loss": logs["loss"], "step": state.global_step}
            shown = {key: logs[key] for key in ("loss", "entropy", "mean_token_accuracy", "num_tokens")}
            print(json.dumps({"step": state.global_step, **shown}))


if __name__ == "__main__":
    set_seed(3)
    texts = list(make_texts(400))
    tokenizer = make_tokenizer(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attention_dropout=0.1, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                output_dir=output_dir, max_steps=60, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                max_length=32, packing=True, learning_rate=1e-2, warmup_steps=5, seed=3, logging_steps=1,
                save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
            callbacks=[LogLosses()],
        )  # fmt: skip
        trainer.train()
        trainer.save_model()

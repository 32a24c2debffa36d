"""The causal language models that the recipe `chat` fine-tunes: a small new Qwen2, or the model of a folder."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from holdfast.errors import RecipeError


def make_model(tokenizer: PreTrainedTokenizerFast, max_length: int, layers: int, heads: int, width: int) -> nn.Module:
    """Return a new Qwen2 with random weights.

    Args:
        max_length: the largest number of tokens of a conversation.
        width: the size of a token's vector, a multiple of twice the number of heads.
    """
    if width % (2 * heads):
        raise RecipeError(f"settings.width = {width}: expected a multiple of 2 x heads = {2 * heads}")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=max_length,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model: nn.Module = Qwen2ForCausalLM(config)
    return model


def load_model(folder: str, tokens: int) -> nn.Module:
    """Return the model of a folder in float32, whatever precision its files have: small updates would be rounded away.

    Args:
        tokens: the number of the tokenizer's tokens.

    Raises:
        RecipeError: the folder has no model, or one with fewer tokens than the tokenizer.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(f"settings.model = {folder!r}: its model can't be loaded: {reason}") from error
    size = model.get_input_embeddings().num_embeddings
    if size < tokens:
        raise RecipeError(
            f"settings.model = {folder!r}: its tokenizer has {tokens} tokens, its model {size}",
            hint="model.resize_token_embeddings(len(tokenizer)), then save the model again",
        )
    found: nn.Module = model
    return found


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model and give each of its linear layers but the last a LoRA adapter of this rank.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """
    from peft import LoraConfig, get_peft_model  # imported late, because the import takes a second

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config)
    return adapted

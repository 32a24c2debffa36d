"""The recipe chat: small models that learn made-up conversations, in real runs that are killed."""

import importlib.util
import itertools
import json
import math
import random
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples.chat import (
    NOT_LEARNED,
    Settings,
    answer_loss,
    answer_losses,
    make_tokenizer,
    pad,
    perplexity,
)
from examples.chat.conversations import read_conversations
from holdfast.config import load_config
from holdfast.errors import RecipeError
from holdfast.machine.faults import POINTS
from holdfast.proof.result import Proof
from holdfast.recipe import Recipe
from holdfast.recipe.function import build_recipe
from holdfast.testing.faults import fault
from holdfast.training.saving import describe_configs
from tests.conftest import ROOT, Engine, Reference, assert_same_bytes
from tests.support.lives import Lives

RECIPE = "examples.chat:chat"
# Modules that every process of a run would otherwise import by itself.
LATE = (
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2", "peft",
)  # fmt: skip
SIZES = {"max_length": 64, "vocab_size": 300, "layers": 1, "heads": 2, "width": 16, "batch_size": 8}


def write_sums(folder: Path, count: int = 80) -> str:
    """Write conversations about sums to a file; return its path."""
    pairs = itertools.islice(itertools.product(range(10), repeat=2), count)
    turns = [[("system", "add"), ("user", f"{a} + {b}?"), ("assistant", f"{a + b}, of course")] for a, b in pairs]
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in turn]}) for turn in turns]
    path = folder / "sums.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return str(path)


def build(folder: Path, **settings: Any) -> Recipe:
    torch.manual_seed(0)
    return build_recipe(RECIPE, SIZES | {"data": write_sums(folder)} | settings)[0]


# ---- without transformers


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = {name: ModuleSpec(name, None) for name in ("tokenizers", "transformers")}
    monkeypatch.setattr(importlib.util, "find_spec", installed.get)
    with pytest.raises(RecipeError, match=r"^the recipe chat needs jinja2, peft$") as caught:
        build(tmp_path)
    assert caught.value.hint == "pip install jinja2 peft"


class Constant(nn.Module):
    """A model that gives the second of three tokens the logit 2 and the others 0, whatever comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 2.0, 0.0]))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 3))


def test_the_loss_is_that_of_the_answers_alone() -> None:
    skipped = NOT_LEARNED
    samples = [
        (torch.tensor([0, 1, 2]), torch.tensor([skipped, 1, 2])),
        (torch.tensor([0, 0, 1, 0, 1]), torch.tensor([skipped, skipped, 1, skipped, 1])),
    ]
    likely, unlikely = math.log(math.exp(2) + 2) - 2, math.log(math.exp(2) + 2)
    expected = (3 * likely + unlikely) / 4
    assert answer_loss(Constant(), pad(samples)).item() == pytest.approx(expected)
    for batch_size in (1, 2):
        assert perplexity(Constant(), samples, batch_size) == pytest.approx(math.exp(expected))


# ---- with transformers


@pytest.fixture(scope="module")
def ready(nursery: Lives) -> Lives:
    """Return the nursery, which has imported what the recipe needs."""
    for module in LATE:
        nursery.load(module)
    return nursery


def make_engine(nursery: Lives, folder: Path, **settings: Any) -> Engine:
    """Return a driver of a run of 20 steps, in chunks of 2."""
    engine = Engine(folder, {}, nursery=nursery)
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in (SIZES | {"data": write_sums(folder)} | settings).items()
    ]
    text = engine.config.read_text("utf-8").replace("tests.support.toy:toy", RECIPE).replace("epochs = 3", "epochs = 2")
    text = text.replace("steps = 4", "steps = 2")
    engine.config.write_text("\n".join([text, "[settings]", "steps_per_epoch = 10", *lines]), "utf-8")
    return engine


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
@pytest.mark.parametrize(("deaths", "settings"), [(5, {}), (2, {"lora_rank": 2})], ids=["all weights", "adapters"])
def test_killed_again_and_again_it_ends_on_the_same_bytes(
    ready: Lives, tmp_path_factory: pytest.TempPathFactory, deaths: int, settings: dict[str, Any]
) -> None:
    straight = make_engine(ready, tmp_path_factory.mktemp("straight"), **settings)
    reference = Reference.train(straight)
    killed = make_engine(ready, tmp_path_factory.mktemp("killed"), **settings)
    chosen = random.Random(7)
    for death in range(deaths):
        struck = killed.folder / f"struck-{death}"
        victim = chosen.choice(["self", "other", "both"])
        done = killed.run(**fault(chosen.choice(POINTS), chosen.choice([1, 2]), victim, struck))
        assert struck.exists(), done.stderr
    killed.finish()
    assert_same_bytes(killed, reference)


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
def test_two_ranks_are_proved(ready: Lives, tmp_path: Path) -> None:
    config = load_config(make_engine(ready, tmp_path).config, ["compute.ranks=2", 'compute.device="cpu"'])
    done = ready.call("tests.support.forked:prove_mutated", "", config.model_dump(mode="json"), 8, 2, 11)
    proof = Proof.model_validate_json(done.stdout.splitlines()[-1])
    assert proof.is_proved, str(proof)
    assert len(proof.kills) == 2


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
def test_another_template_or_tokenizer_is_refused(ready: Lives, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    text = (ROOT / "examples/chat/chat_template.jinja").read_text("utf-8")
    template.write_text(text, "utf-8")
    chat = make_engine(ready, tmp_path, template=str(template))
    begun = chat.call("train_chunks", load_config(chat.config).model_dump(mode="json"), 1)
    assert begun.returncode == 0, begun.stderr
    smaller = chat.run("settings.vocab_size=260", 'resume.accept_drift=["settings.vocab_size"]')
    template.write_text(text.replace("helpful", "terse"), "utf-8")
    terse = chat.run('resume.accept_drift=["files"]')
    for done, name in ((smaller, "tokenizer"), (terse, "chat_template")):
        assert done.returncode == 1
        assert f"data.content.{name}: saved " in done.stderr


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
def test_held_out_perplexity_falls(ready: Lives, tmp_path: Path) -> None:
    """From that of a guess among all 300 tokens. (The standard library's answers: docs/chat.md.)"""
    chat = make_engine(ready, tmp_path, lr=1e-2, width=32, warmup_steps=0)
    first, last = [line["perplexity"] for line in read_metrics(chat)]
    assert last < first < 150


def read_metrics(driver: Engine) -> list[dict[str, Any]]:
    """Train a run to its end; return the metrics of its epochs."""
    driver.finish()
    journal = driver.journal()
    commits = [journal.read_commit(number) for number in journal.numbers("commits")]
    return [commit.metrics for commit in commits if "perplexity" in commit.metrics]


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
def test_padding_changes_no_loss(ready: Lives, tmp_path: Path) -> None:
    recipe = build(tmp_path)
    short, long = sorted((recipe.data[0], recipe.data[-1]), key=lambda sample: len(sample[0]))  # type: ignore[index]
    longer = tuple(torch.cat([part, part[-1:].repeat(9)]) for part in long)
    assert recipe.loss is not None
    alone = recipe.loss(recipe.model, pad([short])).item()
    losses = answer_losses(recipe.model, pad([short, longer]))
    assert losses[: int((short[1][1:] != NOT_LEARNED).sum())].mean().item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
def test_a_model_folder_is_fine_tuned(ready: Lives, tmp_path: Path) -> None:
    from examples.chat.models import make_model
    from examples.chat.tokens import train_tokenizer

    tokenizer = train_tokenizer(["one and two is three"], 270)
    saved: Any = make_model(tokenizer, 64, 1, 2, 16)
    for each in (saved.half(), tokenizer):
        each.save_pretrained(tmp_path / "model")
    recipe = build(tmp_path, model=str(tmp_path / "model"))
    weights = dict(recipe.model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for name, weight in saved.named_parameters():
        assert torch.equal(weights[name], weight.float())
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(RecipeError, match="its tokenizer has 271 tokens, its model 270"):
        build(tmp_path, model=str(tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
def test_the_tokenizer_of_a_run_can_be_made_again(ready: Lives, tmp_path: Path) -> None:
    from examples.chat.tokens import hash_tokenizer

    settings = Settings(**SIZES, data=write_sums(tmp_path))
    tokenizer = make_tokenizer(settings, read_conversations(settings.data))
    assert hash_tokenizer(tokenizer) == build(tmp_path).content["tokenizer"]
    text: Any = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 2?"}], tokenize=False)
    assert text.endswith("<|im_start|>user\n1 + 2?<|im_end|>\n")


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21 reads it
def test_adapters_alone_are_trained(ready: Lives, tmp_path: Path) -> None:
    recipe = build(tmp_path, lora_rank=2)
    trained = [name for name, weight in recipe.model.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not describe_configs(recipe.model), "from_pretrained would find none of the weights"


@pytest.mark.slow
@pytest.mark.extras("peft", "transformers")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"limit": 9}, "has 8 conversations to learn from and 1 to hold out, with an answer in their first 64 tokens"),
        ({"max_length": 8}, "has 0 conversations to learn from"),
        ({"model": "Qwen/Qwen2.5-0.5B"}, "nothing is downloaded"),
        ({"width": 18, "heads": 4}, "settings.width = 18: expected a multiple of 2 x heads = 8"),
        ({"template": "nowhere.jinja"}, "settings.template = 'nowhere.jinja' can't be read"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_named(ready: Lives, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(tmp_path, **settings | ({"batch_size": 9} if "limit" in settings else {}))
    assert said in caught.value.message

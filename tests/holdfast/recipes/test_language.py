"""The language recipe: real text, a hash of it, and a model that is causal."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import RecipeError
from holdfast.recipe.function import build_recipe
from holdfast.recipes.language import (
    Decoder,
    Windows,
    bits_per_byte,
    evaluate,
    language,
    read_corpus,
    read_standard_library,
    sample,
)


def test_the_standard_library_is_megabytes_and_always_the_same() -> None:
    text = read_standard_library()
    assert len(text) > 5_000_000
    assert read_standard_library() == text


def test_any_glob_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first")
    assert read_corpus(f"{tmp_path}/*.txt") == b"first\nsecond"
    assert read_corpus(f"file://{tmp_path}/a.txt") == b"first"


@pytest.mark.parametrize("data", ["/nowhere/*.txt", "/nowhere/a.txt", "nosuch://a"])
def test_missing_text_is_named(data: str) -> None:
    with pytest.raises(RecipeError, match=data.split("*")[0]):
        read_corpus(data)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"short")
    with pytest.raises(RecipeError, match="too few"):
        language(data=str(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 0}, "settings.heads = 0: Input should be greater than 0"),
        ({"width": 12, "heads": 4}, "settings.width = 12: expected a multiple of 2 x heads = 8"),
        ({"sample_bytes": -1}, "settings.sample_bytes = -1: Input should be greater than or equal to 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_out_of_range_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text " * 200)
    with pytest.raises(RecipeError) as refused:
        build_recipe("holdfast.recipes.language:language", {"data": str(tmp_path / "a.txt"), **settings})
    assert str(refused.value) == message


def test_windows_tile_the_text() -> None:
    windows = Windows(b"abcdefgh", 3)
    assert len(windows) == 2
    assert [bytes(part.tolist()) for part in windows[1]] == [b"def", b"efg"]


def test_the_corpus_hash_is_of_its_bytes(tmp_path: Path) -> None:
    text = b"some text " * 200
    (tmp_path / "a.txt").write_bytes(text)
    recipe = language(data=str(tmp_path / "a.txt"), context=16, width=8, heads=1, layers=1)
    assert recipe.data_sha256 == hashlib.sha256(text).hexdigest()


def test_a_byte_does_not_depend_on_later_bytes() -> None:
    torch.manual_seed(0)
    model = Decoder(context=12, layers=2, heads=2, width=16, dropout=0.5).eval()
    text = torch.randint(0, 256, (1, 12), dtype=torch.uint8)
    changed = text.clone()
    changed[0, 7] ^= 1
    before, after = model(text), model(changed)
    assert before.shape == (1, 12, 256)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_an_untrained_model_needs_about_eight_bits_a_byte() -> None:
    torch.manual_seed(0)
    model = Decoder(context=16, layers=1, heads=1, width=8, dropout=0.0).eval()
    assert bits_per_byte(model, Windows(bytes(range(256)) * 4, 16), torch.device("cpu")) == pytest.approx(8.0, abs=0.1)


def make_small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(context=16, layers=1, heads=1, width=8, dropout=0.0).eval()


def test_samples_follow_from_the_model_alone_and_leave_generators_as_they_are() -> None:
    model, prompts = make_small(), torch.zeros(2, 4, dtype=torch.uint8)
    before = torch.get_rng_state()
    with torch.no_grad():
        sampled = sample(model, prompts, 20, context=16)
        torch.rand(1)
        assert torch.equal(sample(model, prompts, 20, context=16), sampled)
        torch.set_rng_state(before)
        sample(model, prompts, 20, context=16)
    assert torch.equal(torch.get_rng_state(), before)
    assert (sampled.shape, sampled.dtype) == ((2, 20), torch.uint8)


def test_a_sure_model_is_sampled_as_it_is_sure() -> None:
    following = sample(lambda text: 100 * torch.eye(256)[(text.long() + 1) % 256], torch.tensor([[97]]), 3, context=16)
    assert bytes(following[0].tolist()) == b"bcd"


def test_an_epoch_shows_samples_after_held_out_text() -> None:
    held_out = Windows(bytes(range(97, 123)) * 20, 16)
    with torch.no_grad():
        found = evaluate(make_small(), held_out, context=16, sample_bytes=5)
        alone = evaluate(make_small(), held_out, context=16, sample_bytes=0)
    assert alone == {"bits_per_byte": found["bits_per_byte"]}
    assert isinstance(found["samples"], str)
    assert found["samples"].count("--- after ") == 3
    assert found["samples"].startswith("--- after 'abcdefghijklmnop':\n")


@pytest.mark.slow  # importing the compiler takes seconds
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiling_keeps_the_names_of_the_state(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text " * 200)
    settings = {"data": str(tmp_path / "a.txt"), "context": 16, "width": 8, "heads": 1, "layers": 1}
    plain, compiled = (language(**settings, compiled=compiled).model for compiled in (False, True))  # type: ignore[arg-type]
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert (compiled._compiled_call_impl is None, plain._compiled_call_impl is None) == (False, True)

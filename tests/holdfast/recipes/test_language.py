"""The language recipe: real text, a hash of it, and a model that is causal."""

import hashlib
from pathlib import Path

import pytest
import torch

from holdfast.errors import RecipeError
from holdfast.recipes.language import Decoder, Windows, bits_per_byte, language, read_corpus, read_standard_library


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

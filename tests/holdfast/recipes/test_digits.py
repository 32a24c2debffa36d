"""The digits recipe: real data, augmentation that a seed decides, and a picture of the confusion matrix."""

import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

from holdfast import load_config
from holdfast.errors import RecipeError
from holdfast.recipe.function import build_recipe
from holdfast.recipes.digits import Augmented, Reader, digits, draw_confusion, measure, read_digits
from tests.conftest import ROOT

pytestmark = pytest.mark.extras("sklearn")

SVG = "{http://www.w3.org/2000/svg}"


def test_the_last_fifth_is_held_out() -> None:
    known, held_out = read_digits()
    assert (known[0].shape, held_out[0].shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    assert (held_out[0].min(), held_out[0].max()) == (0, 1)
    assert set(held_out[1].tolist()) == set(range(10))


def test_augmentation_follows_from_the_seed() -> None:
    known, _ = read_digits()
    data = Augmented(known, 10.0, 0.75, 0.05)

    def read(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return data[5][0]

    assert torch.equal(read(1), read(1))
    assert not torch.equal(read(1), read(2))
    assert (read(1) - known[0][5]).abs().mean() < 0.3


def test_without_augmentation_a_picture_stays_as_it_is() -> None:
    known, _ = read_digits()
    picture, label = Augmented(known, 0.0, 0.0, 0.0)[7]
    assert torch.allclose(picture, known[0][7], atol=1e-6)
    assert label == known[1][7]


def test_a_shift_of_a_pixel_is_at_most_a_pixel() -> None:
    dot = torch.zeros(1, 1, 8, 8)
    dot[0, 0, 4, 4] = 1
    data = Augmented((dot, torch.zeros(1)), 0.0, 1.0, 0.0)
    torch.manual_seed(0)
    seen = torch.stack([data[0][0] for _ in range(50)]).amax(0)[0]
    assert seen[3:6, 3:6].min() > 0
    seen[3:6, 3:6] = 0
    assert seen.max() == 0


def test_the_evaluation_reads_with_the_average_of_the_weights() -> None:
    recipe = digits(width=2)
    assert recipe.evaluate is not None
    before = recipe.evaluate(recipe.model)
    torch.nn.init.zeros_(recipe.model.layers[-1].weight)  # type: ignore[union-attr, index, arg-type]
    assert recipe.evaluate(recipe.model) == before
    assert recipe.after_step is not None
    for _ in range(200):
        recipe.after_step()
    assert recipe.evaluate(recipe.model) != before


def test_the_configuration_keeps_the_best_by_a_metric_of_the_recipe() -> None:
    config = load_config(ROOT / "holdfast/recipes/digits.toml")
    _, held_out = read_digits()
    found = measure(Reader(2, 0.0), held_out)
    assert config.retention.keep_best is not None
    assert (config.retention.keep_best.mode, found.keys()) == ("max", {"accuracy", "held_out_loss", "confusion"})
    assert config.retention.keep_best.metric in found


def test_the_picture_has_every_count_in_its_row_and_column() -> None:
    counts = [[0] * 10 for _ in range(10)]
    counts[3][8], counts[3][3], counts[7][7] = 2, 35, 36
    tree = ElementTree.fromstring(draw_confusion(counts))
    found = {(text.text, text.get("x"), text.get("y")) for text in tree.iter(f"{SVG}text")}
    assert {("2", "323", "157.3"), ("35", "153", "157.3"), ("36", "289", "293.3")} <= found
    assert len([*tree.iter(f"{SVG}rect")]) == 1 + 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "settings.width = 0: Input should be greater than 0"),
        ({"dropout": 1.0}, "settings.dropout = 1.0: Input should be less than 1"),
        ({"average_decay": 2}, "settings.average_decay = 2: Input should be less than 1"),
        ({"noise": -0.1}, "settings.noise = -0.1: Input should be greater than or equal to 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        build_recipe("holdfast.recipes.digits:digits", settings)
    assert str(refused.value) == message


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RecipeError, match="needs scikit-learn") as caught:
        digits()
    assert caught.value.hint == "pip install 'holdfast-train[vision]'"

"""A metric of ``retention.keep_best`` that no commit would have is refused as soon as that is known."""

import dataclasses
from pathlib import Path

import pytest

from holdfast import Recipe
from holdfast.config import KeepBest, Retention
from holdfast.errors import ConfigError
from holdfast.training import Training
from tests.support import trainings
from tests.support.toy import toy
from tests.support.trainings import train_to

pytestmark = pytest.mark.usefixtures("same_process")

STEPS_PER_EPOCH = 3


def evaluated() -> Recipe:
    return dataclasses.replace(toy(), steps_per_epoch=STEPS_PER_EPOCH, evaluate=lambda model: {"accuracy": 0.5})


def plain() -> Recipe:
    return dataclasses.replace(toy(), evaluate=None)


def make(folder: Path, metric: str, recipe: str = "evaluated") -> Training:
    training = trainings.make(folder, f"{__name__}:{recipe}")
    config = training.config.model_copy(update={"retention": Retention(keep_best=KeepBest(metric=metric))})
    return Training(config)


def test_without_an_evaluation_it_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"retention.keep_best.metric = 'accuracy': expected avg_loss, or a metric"
    ) as caught:
        train_to(make(tmp_path, "accuracy", "plain"), 1)
    assert caught.value.hint == "known: avg_loss"
    train_to(make(tmp_path, "avg_loss", "plain"), 1)


def test_with_an_evaluation_it_is_refused_at_the_end_of_the_first_epoch(tmp_path: Path) -> None:
    training = make(tmp_path, "acuracy")
    train_to(training, STEPS_PER_EPOCH - 1)
    with pytest.raises(ConfigError, match="'acuracy': expected avg_loss") as caught:
        train_to(training, STEPS_PER_EPOCH)
    assert caught.value.hint == "did you mean accuracy?"


@pytest.mark.parametrize("metric", ["accuracy", "avg_loss", "earlier"])
def test_a_metric_that_is_known_trains_on(tmp_path: Path, metric: str) -> None:
    """An evaluation may give some metrics in some epochs only."""
    training = make(tmp_path, metric)
    training.progress.history = [{"avg_loss": 1.0, "lrs": [0.1], "metrics": {"earlier": 0.1}, "anneals": {}}]
    train_to(training, STEPS_PER_EPOCH)
    assert training.progress.history[-1]["metrics"] == {"accuracy": 0.5}

"""``holdfast compare`` names the difference that was planted in a run: where it shows first, and what explains it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.extensions.compare.ancestry import read_ancestry
from holdfast.extensions.compare.comparing import compare_trainings
from holdfast.extensions.compare.report import Comparison
from holdfast.journal.finding import open_journal
from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.planted import LOSS, Planted

pytestmark = pytest.mark.slow

# Plants a difference and returns the run with it.
Plant = Callable[[Planted], str]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, nursery: Lives) -> Planted:
    """A folder with the run ``a``, in which nothing is planted."""
    planted = Planted(tmp_path_factory.mktemp("planted"), nursery).write()
    planted.train("a")
    return planted


def compare(planted: Planted, run: str, *, is_replayed: bool = False) -> Comparison:
    lines = [read_ancestry(open_journal(each), name) for each, name in ((f"{planted.folder}/runs/a", "a"), (run, "b"))]
    return compare_trainings(*lines, is_replayed=is_replayed)


def set_to(**changed: Any) -> Plant:
    """Plant a setting, in a run of other chunks."""
    return lambda planted: planted.train("b", chunk__steps=4, **changed)


def change_late(**changed: Any) -> Plant:
    """Plant a setting that changes after the sixth step."""

    def plant(planted: Planted) -> str:
        planted.train("b", until=6)
        return planted.train("b", **changed)

    return plant


def write(**changed: Any) -> Plant:
    """Plant a different content of the recipe's files."""
    return lambda planted: planted.write(**changed).train("b")


def flip(tensor: str, at: int) -> Plant:
    return lambda planted: planted.train("b", flip=tensor, flip_at=at)


UNRECORDED = ""

# The plant; the first step whose line differs (None for none) and its first field; the recorded difference that has to
# be named first; the first step at which both have a checkpoint and the content ids differ.
PLANTS: dict[str, tuple[Plant, int | None, str, str, int]] = {
    "a rate": (set_to(settings__lr=0.03), 1, "lrs", "settings.lr", 6),
    "a weight decay": (set_to(settings__weight_decay=0.2), 2, "loss", "settings.weight_decay", 6),
    "a dropout rate": (set_to(settings__dropout=0.2), 1, "loss", "settings.dropout", 6),
    "a width": (set_to(settings__width=80), 1, "loss", "settings.width", 6),
    "a batch size": (set_to(settings__batch_size=2), 1, "samples", "settings.batch_size", 6),
    "a clipping norm": (set_to(settings__clip_norm=0.5), 2, "loss", "settings.clip_norm", 6),
    "a schedule": (set_to(settings__schedule="cosine"), 4, "lrs", "settings.schedule", 6),
    "an anneal": (set_to(settings__heat=2.0), 1, "anneals", "settings.heat", 6),
    "a seed": (set_to(seed=7), 1, "samples", "seed", 6),
    "a thread count": (set_to(determinism__threads=2), 1, "loss", "determinism.threads", 6),
    "a precision": (set_to(compute__mixed_precision="bf16"), 1, "loss", "compute.mixed_precision", 6),
    "a late rate": (change_late(settings__lr=0.01), 7, "lrs", "settings.lr", 9),
    "a late decay": (change_late(settings__weight_decay=0.3), 8, "loss", "settings.weight_decay", 9),
    "a late seed": (change_late(seed=7), 7, "samples", "seed", 9),
    "a sample's value": (write(other=17), 5, "batch content", "files.points.npy", 6),
    "one sample more": (write(samples=49), 5, "samples", "data.samples", 6),
    "the loss's code": (write(code=LOSS.replace("+ large", "+ 2 * large")), 1, "loss", "sources.planted_loss", 3),
    "a package": (write(scale=1.5, version="2.0"), 1, "lrs", "packages.planted-package", 3),
    "a bit of a weight": (flip("model.4.weight", at=9), None, "model.4.weight", UNRECORDED, 9),
    "a bit of a moment": (flip("optimizer.0.weight.exp_avg", at=8), None, "optimizer.", UNRECORDED, 9),
    "a bit of an extra": (flip("average.weight", at=6), None, "extras.0.average.weight", UNRECORDED, 6),
    "a bit of a bias": (flip("model.4.bias", at=7), 8, "loss", UNRECORDED, 9),
}


@pytest.mark.parametrize("plant", PLANTS if IS_SOAK else [*PLANTS][::2])
def test_the_planted_difference_is_named_first(planted: Planted, plant: str, tmp_path: Path) -> None:
    make, step, first, name, different_at = PLANTS[plant]
    folder = Planted(tmp_path, planted.nursery).write()
    found = compare(planted, make(folder))
    assert not found.is_equal
    assert found.different_at == different_at
    assert found.equal_until < (step or different_at) <= different_at
    assert found.first_step == step
    if step is None:
        assert found.different[0].startswith(first)
    else:
        assert found.first_differs_in[0] == first
    best = [each.change.name for each in found.suspects if each.tier != "unlikely"]
    assert best[:1] == ([name] if name else [])
    assert ("no difference on record explains" in str(found)) == (not name)


def test_runs_of_other_chunks_and_attempts_are_equal(planted: Planted, tmp_path: Path) -> None:
    folder = Planted(tmp_path, planted.nursery).write()
    folder.train("b", until=4, chunk__steps=4)
    found = compare(planted, folder.train("b", chunk__steps=5, log__every=7))
    assert found.is_equal
    assert (found.equal_until, found.common, found.compared_until) == (12, 2, 12)
    assert [each.change.name for each in found.suspects] == ["chunk.steps", "log.every"]
    assert found.one.content_id == found.other.content_id != ""


def test_a_run_that_goes_on_further_is_equal_as_far_as_both_go(planted: Planted, tmp_path: Path) -> None:
    folder = Planted(tmp_path, planted.nursery).write()
    found = compare(planted, folder.train("b", until=5, chunk__steps=5))
    assert found.is_equal
    assert (found.equal_until, found.common, found.compared_until) == (0, 0, 5)
    assert "no common checkpoint" in str(found)
    found = compare(planted, folder.train("b", until=6, chunk__steps=5))
    assert (found.equal_until, found.common, found.compared_until) == (6, 1, 6)
    assert "a continues to step 12, b ends at step 6" in str(found)


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_ranks: None) -> None:
    """Let a replay's ranks find the recipe."""
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("importable")
def test_a_replay_names_the_first_tensor(planted: Planted, tmp_path: Path) -> None:
    folder = Planted(tmp_path, planted.nursery).write()
    found = compare(planted, folder.train("b", settings__weight_decay=0.2), is_replayed=True)
    assert not found.notes
    assert [(each.start, each.stop, each.is_identical) for each in found.replays] == [(0, 3, True), (0, 3, True)]
    assert (found.first_step, found.first_differs_in[0]) == (1, "optimizer")
    assert found.first_tensors[0].startswith("model.0.")
    assert not found.first_values  # those of the trail's first difference, the loss of step 2, don't belong to step 1
    assert not found.notes


@pytest.mark.usefixtures("importable")
def test_a_replay_tells_the_run_that_doesnt_follow_from_its_records(planted: Planted, tmp_path: Path) -> None:
    folder = Planted(tmp_path, planted.nursery).write()
    found = compare(planted, folder.train("b", flip="model.4.bias", flip_at=7), is_replayed=True)
    assert [each.is_identical for each in found.replays] == [True, False]
    assert found.first_step == 8
    assert found.notes == [
        "trained again, b gives different bytes, with the settings, code, data and machine on record"
    ]

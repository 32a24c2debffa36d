"""What of a checkpoint continues with a different number of ranks: the generators, extras and position of each."""

import copy
from pathlib import Path
from typing import Any

import pytest

from holdfast import state
from holdfast.errors import ConfigError, GateTripped
from holdfast.recipe.probe import Probe, compare_probes
from holdfast.training import Gate, Training, capturing, resume
from holdfast.training.probing import measure_probe
from holdfast.training.recording import read_lines
from tests.support.trainings import Saved, make, save_state, train_to

pytestmark = pytest.mark.usefixtures("same_process")

STEPS = 3


def save_as(ranks: int, training: Training, folder: Path, **parts: list[Any]) -> Saved:
    """Save a checkpoint in the form in which this number of ranks would have saved it.

    Args:
        parts: the parts of components by rank; by default all ranks have the same.
    """
    payload, metadata = save_state(training, folder)
    saved: dict[str, Any] = state.from_payload(payload)
    alike = {name: [copy.deepcopy(saved[name][0]) for _ in range(ranks)] for name in ("rng", "data")}
    probe = measure_probe(training, ranks)
    changed = metadata.model_copy(update={"probe": probe, "rank_probes": [probe]})
    return state.to_payload(saved | alike | parts), changed


def go_on(folder: Path, recipe: str, saved: Saved, **settings: Any) -> Training:
    training = make(folder, f"tests.support.{recipe}", **settings)
    resume(training, *saved, Gate("tolerance", 1e-3), lambda *skipped: None)
    return training


def test_generators_follow_from_seed_step_and_rank(tmp_path: Path) -> None:
    training = make(tmp_path, "tests.support.varied:averaged")
    digests = []
    for step in (1, 1, 2):
        train_to(training, step)
        saved = save_as(2, training, tmp_path)
        digests.append(go_on(tmp_path, "varied:averaged", saved).generators.digest())
    own = go_on(tmp_path, "varied:averaged", save_as(1, training, tmp_path)).generators.digest()
    assert digests[0] == digests[1]
    assert len({*digests, own, training.generators.digest()}) == 3, "only the same number of ranks restores its own"


def test_the_gate_compares_the_micro_batch_that_was_saved(tmp_path: Path) -> None:
    """With two ranks the probe's batch is half of the micro-batch: the loss on all of it is no sign of a fault."""
    training = make(tmp_path, "tests.support.numbered:numbered")
    train_to(training, STEPS)
    saved = save_as(2, training, tmp_path)
    assert compare_probes(saved[1].probe, measure_probe(training), 1e-3), "another part gives other outputs"
    assert go_on(tmp_path, "numbered:numbered", saved).progress.step == STEPS
    wrong: Probe = measure_probe(make(tmp_path, "tests.support.numbered:numbered"), 2)
    with pytest.raises(GateTripped, match="the probe differs by"):
        go_on(tmp_path, "numbered:numbered", (saved[0], saved[1].model_copy(update={"rank_probes": [wrong]})))


def test_an_extra_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    training = make(tmp_path, "tests.support.varied:normalised")
    train_to(training, STEPS)
    extras = [{"normaliser": {"mean": mean}} for mean in (0.5, 0.25)]
    with pytest.raises(ConfigError, match=r"which 2 ranks saved, .* the extra 'normaliser' differs between the ranks"):
        go_on(tmp_path, "varied:normalised", save_as(2, training, tmp_path, extras=extras))
    assert go_on(tmp_path, "varied:normalised", save_as(2, training, tmp_path)).progress.step == STEPS


def test_a_stream_goes_on_if_all_ranks_are_at_one_position(tmp_path: Path) -> None:
    training = make(tmp_path, "tests.support.varied:streamed")
    train_to(training, STEPS)
    saved = save_as(2, training, tmp_path)
    train_to(training, 2 * STEPS)
    other = go_on(tmp_path, "varied:streamed", saved)
    train_to(other, 2 * STEPS)
    lines = [[line["samples"] for line in read_lines(each)[-STEPS:]] for each in (training, other)]
    assert lines[0] == lines[1]
    position = state.from_payload(saved[0])["data"][0]
    elsewhere = save_as(2, training, tmp_path, data=[position, capturing.capture(training)["data"][0]])
    with pytest.raises(ConfigError, match="each rank has a position of its own in the data"):
        go_on(tmp_path, "varied:streamed", elsewhere)


def test_a_stream_that_is_read_again_is_refused(tmp_path: Path) -> None:
    """Each rank has read different samples, so that it can't be told whether the stream gives the same ones again."""
    training = make(tmp_path, "tests.support.varied:streamed", keeps_position=False)
    train_to(training, STEPS)
    with pytest.raises(ConfigError, match=r"compute.ranks = 1: .* a position of its own") as refused:
        go_on(tmp_path, "varied:streamed", save_as(2, training, tmp_path), keeps_position=False)
    assert refused.value.hint.startswith("continue with compute.ranks = 2; ")

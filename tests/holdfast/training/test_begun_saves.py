"""A rank that doesn't write the saves finds the newest durable one, and has the trail since then."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint import Saved
from holdfast.state import to_payload
from holdfast.store import Store, open_store
from holdfast.training.begun_saves import BegunSave, BegunSaves
from tests.support.makers import METADATA_FIELDS, STEPS_PER_EPOCH

FINGERPRINT = "f" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return open_store(str(tmp_path)).inside("r")


def save(folder: Store, step: int, **changes: Any) -> Saved:
    """Save a checkpoint of a step, as the main rank does."""
    fields = METADATA_FIELDS | {"optimizer_steps_total": step, "config_fingerprint": FINGERPRINT} | changes
    return checkpoint.save(folder, to_payload({"step": torch.tensor(step)}), fields, "")


def lines(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step} for step in range(first, last + 1)]


def begin(*steps: int) -> BegunSaves:
    """Begin a save after each of these steps, in a rank that begins with the run."""
    saves, last = BegunSaves(), 0
    for step in steps:
        saves.add(BegunSave(step, None, lines(last + 1, step), f"{step};".encode(), 1.0))
        last = step
    return saves


@pytest.mark.parametrize("durable", [(), (3,), (3, 5), (5,)])
def test_the_newest_durable_save_is_found_with_the_trail_since_then(folder: Store, durable: tuple[int, ...]) -> None:
    ids = {0: ""} | {step: save(folder, step).metadata.checkpoint_sha256 for step in durable}
    found = begin(3, 5).find_durable(folder, STEPS_PER_EPOCH, FINGERPRINT)
    assert found is not None
    assert (found.step, found.content_id) == max(ids.items())
    assert found.lines == lines(found.step + 1, 5)
    assert found.shown == b"".join(f"{step};".encode() for step in (3, 5) if step > found.step)
    assert found.train_s == sum(step > found.step for step in (3, 5))


def test_a_restored_checkpoint_is_known_without_the_store(folder: Store) -> None:
    saves = BegunSaves()
    saves.restart(4, "a" * 64)
    saves.add(BegunSave(6, None, lines(5, 6)))
    found = saves.find_durable(folder, STEPS_PER_EPOCH, FINGERPRINT)
    assert found is not None
    assert (found.step, found.content_id, found.lines) == (4, "a" * 64, lines(5, 6))


def test_only_the_last_saves_are_remembered(folder: Store) -> None:
    """The main rank has waited for all but the last two."""
    save(folder, 3)
    assert begin(3, 5, 7).find_durable(folder, STEPS_PER_EPOCH, FINGERPRINT) is not None
    assert begin(3, 5, 7, 9).find_durable(folder, STEPS_PER_EPOCH, FINGERPRINT) is None


def test_a_checkpoint_of_other_settings_is_none_of_these_saves(folder: Store) -> None:
    save(folder, 3, config_fingerprint="e" * 64)
    found = begin(3).find_durable(folder, STEPS_PER_EPOCH, FINGERPRINT)
    assert found is not None
    assert found.step == 0

"""The scripts of the gallery: killed and stopped, they end on the bytes of a straight run, and on the plain weights."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from holdfast.testing.faults import fault
from tests.conftest import ROOT
from tests.programs.trials import list_warnings
from tests.support.gallery import COMMAND, ENTRIES, GALLERY, RECORDED, Entry
from tests.support.lives import Lives
from tests.support.rehearsed import REHEARSED, Program
from tests.support.stopped import STOP


@dataclass(frozen=True)
class Short:
    """A shortened run.

    Args:
        chunk: its steps in a chunk. SIGKILL comes at the end of the first one.
        stop: the step in which SIGTERM comes.
        plain: the same length in the plain script.
    """

    epochs: int
    chunk: int
    stop: int
    plain: int


SHORT = {
    "image_classification": Short(3, 16, 29, 3),
    "language_model": Short(2, 15, 33, 40),
    "diffusion": Short(3, 8, 15, 3),
    "fine_tuning": Short(1, 12, 20, 1),
    "contrastive_text": Short(1, 12, 20, 1),
    "graph_network": Short(2, 15, 33, 40),
    "soft_actor_critic": Short(1, 70, 85, 100),
    "lightning_module": Short(1, 12, 21, 1),
}
# Its samples draw random numbers, which Holdfast seeds by the batch's number: the weights aren't those of the script.
DRAWS_IN_SAMPLES = {"image_classification"}


def read_weights(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the weights that a script has written at its end."""
    if name == "fine_tuning":
        return load_file(folder / name / "adapter_model.safetensors")
    weights: dict[str, Tensor] = torch.load(folder / f"{name}.pt")
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [pytest.param(each, marks=pytest.mark.extras(*each.needs) if each.needs else (), id=each.name) for each in ENTRIES],
)
def test_killed_and_stopped_it_ends_on_the_same_bytes(nursery: Lives, tmp_path: Path, entry: Entry) -> None:
    for module in entry.late:
        nursery.load(module)
    name = entry.name
    short, recipe = SHORT[name], f"{GALLERY / name}.py:train"
    straight, program = (
        Program(nursery, tmp_path / folder, recipe, {}, short.epochs, f"steps = {short.chunk}", COMMAND)
        for folder in ("straight", "killed")
    )
    done = straight.train("proof.rehearse=off")
    assert done.returncode == 0, done.stderr
    killed = program.train(*REHEARSED, **fault("commit-recorded", 1, "both", tmp_path / "first"))
    told = program.train(*REHEARSED, **{STOP: f"SIGTERM:{short.stop}:{tmp_path}/second"})
    assert (killed.returncode, told.returncode) == (-9, 143), told.stderr
    assert program.find_step() >= short.stop  # a busy machine may have trained on
    done = program.train(*REHEARSED)
    assert done.returncode == 0, done.stderr
    assert list_warnings([killed.stderr, told.stderr, done.stderr]) == []
    assert any(program.journal.read_commit(number).rehearsals for number in program.journal.numbers("commits"))
    assert program.find_content() == straight.find_content()

    (folder := tmp_path / "plain").mkdir()
    alone = nursery.call("tests.support.gallery:run_plain", name, short.plain, str(folder))
    assert alone.returncode == 0, alone.stderr
    weights, expected = read_weights(program.folder, name), read_weights(folder, name)
    assert weights.keys() == expected.keys()
    is_equal = all(torch.equal(weights[key], value) for key, value in expected.items())
    assert is_equal == (name not in DRAWS_IN_SAMPLES)


def test_every_script_is_on_the_page() -> None:
    names = {entry.name for entry in ENTRIES}
    assert names == SHORT.keys()
    for folder, suffix in ((GALLERY, "py"), (GALLERY / "plain", "py"), (GALLERY, "toml"), (RECORDED, "svg")):
        assert {path.stem for path in folder.glob(f"[a-z]*.{suffix}")} == names


def test_the_page_of_reinforcement_learning_has_the_gallerys_script() -> None:
    page = (ROOT / "docs" / "reinforcement-learning.md").read_text("utf-8")
    _, _, script = (GALLERY / "soft_actor_critic.py").read_text("utf-8").partition("\n\n")
    assert f"```python\n{script}```" in page

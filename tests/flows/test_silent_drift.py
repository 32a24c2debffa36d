"""Tests of changes that no setting shows: refused by name, accepted by name. Harmless changes pass."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast import checkpoint
from tests.conftest import IS_SOAK, ROOT, Engine

pytestmark = pytest.mark.slow

RECIPE = """
import os
import numpy as np
import torch
from pathlib import Path
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from holdfast import Recipe
from silent_pack import rates

HERE = Path(__file__).parent
WARMUP = int(os.environ.get("SILENT_WARMUP", "3"))

def own() -> Recipe:
    x = torch.from_numpy(np.load(HERE / "data" / "x.npy"))
    momentum = float(os.environ.get("SILENT_MOMENTUM", "0.1"))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4, momentum=momentum), torch.nn.Dropout(rates.DROPOUT),
        torch.nn.Linear(4, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=float(os.environ.get("SILENT_DECAY", "0")))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    smoothing = float(os.environ.get("SILENT_SMOOTHING", "0"))

    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[1] * (1 - smoothing))

    def after_step():
        from silent_pack import lazy
        import silent_installed
        lazy.follow(model)

    return Recipe(
        model=model, data=TensorDataset(x, x.sum(1, keepdim=True)), optimizer=optimizer, loss=loss, batch_size=8,
        clip_norm=float(os.environ.get("SILENT_CLIP", "1.0")), schedule=schedule, after_step=after_step,
        sources=["kernel.json"],
    )
"""
HELPERS = {
    "silent_pack/__init__.py": "",
    "silent_pack/rates.py": "DROPOUT = 0.1\n",
    "silent_pack/lazy.py": "def follow(model):\n    pass\n",
    "kernel.json": '{"tile": 16}\n',
    "site-packages/silent_installed/__init__.py": "",
    "site-packages/silent_installed-1.0.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: silent-installed\nVersion: 1.0\n"
    ),
    "site-packages/silent_installed-1.0.dist-info/RECORD": "silent_installed/__init__.py,,\n",
}
STEPS_PER_EPOCH = 4


@dataclass
class Project:
    """A user's checkout, with a recipe that trains within a second."""

    engine: Engine
    folder: Path

    def write(self, name: str, text: str) -> None:
        """Write a file with a time in the next second, because Python compares bytecode by whole seconds."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)

    def write_data(self, seed: int) -> None:
        """Write a data file whose size and times never change."""
        import numpy as np

        path = self.folder / "data" / "x.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.random.default_rng(seed).standard_normal((32, 8), dtype=np.float32))
        os.utime(path, (1_000_000_000, 1_000_000_000))

    def train(self, epochs: int, *settings: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        path = os.pathsep.join([str(self.folder), str(self.folder / "site-packages")])
        return self.engine.run(
            "recipe=silent_recipe:own", f"epochs={epochs}", *settings, PYTHONPATH=path, **environment
        )


@pytest.fixture
def project(engine: Engine) -> Project:
    made = Project(engine, engine.folder / "checkout")
    made.write("silent_recipe.py", RECIPE)
    for name, text in HELPERS.items():
        made.write(name, text)
    made.write_data(1)
    return made


@dataclass(frozen=True)
class Case:
    """A change that no setting shows.

    Args:
        change: a function that makes the change in the files of the checkout.
        named: a text that the refusal must contain.
        accept: a name that allows it.
        environment: variables of the process, if that is the change.
    """

    named: str
    accept: str
    change: Callable[[Project], None] = lambda project: None
    environment: tuple[tuple[str, str], ...] = ()


CASES = {
    "a helper module's constant": Case(
        "sources.silent_pack.rates: its code has changed", "silent_pack.rates",
        lambda project: project.write("silent_pack/rates.py", "DROPOUT = 0.4\n"),
    ),
    "a lazily imported helper": Case(
        "sources.silent_pack.lazy: its code has changed", "sources",
        lambda project: project.write(
            "silent_pack/lazy.py", "def follow(model):\n    for each in model.parameters(): each.data.div_(2)\n"
        ),
    ),
    "a listed JSON file": Case(
        "sources.kernel.json: its code has changed", "kernel.json",
        lambda project: project.write("kernel.json", '{"tile": 32}\n'),
    ),
    "a data file of equal size and time": Case(
        "files.data/x.npy: its content has changed", "files", lambda project: project.write_data(2)
    ),
    "clip_norm": Case(
        "built.clip_norm: saved 1.0, now 0.5", "built.clip_norm", environment=(("SILENT_CLIP", "0.5"),)
    ),
    "a LambdaLR's function": Case(
        "built.scheduler.0.lr_lambdas.0.captured.WARMUP: saved 3, now 30", "built",
        environment=(("SILENT_WARMUP", "30"),),
    ),
    "BatchNorm's momentum": Case(
        "built.model.1.momentum: saved 0.1, now 0.3", "built", environment=(("SILENT_MOMENTUM", "0.3"),)
    ),
    "the optimizer's weight decay": Case(
        "built.optimizer.0.weight_decay: saved 0.0, now 0.1", "optimizer.0.weight_decay",
        environment=(("SILENT_DECAY", "0.1"),),
    ),
    "a number that the loss has captured": Case(
        "built.loss.captured.smoothing: saved 0.0, now 0.2", "built", environment=(("SILENT_SMOOTHING", "0.2"),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES if IS_SOAK else [*CASES][::2])
def test_a_silent_change_is_refused_by_name_and_allowed_by_name(project: Project, name: str) -> None:
    case = CASES[name]
    done = project.train(1)
    assert done.returncode == 0, done.stderr
    case.change(project)
    done = project.train(2, **dict(case.environment))
    assert done.returncode == 1, done.stderr
    assert case.named in done.stderr
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert project.engine.standing().attempts == 1
    done = project.train(2, f'resume.accept_drift=["{case.accept}"]', **dict(case.environment))
    assert done.returncode == 0, done.stderr
    assert f"warning: drift: {case.named}" in done.stderr
    standing = project.engine.standing()
    assert (standing.complete, standing.step) == (True, 2 * STEPS_PER_EPOCH)
    assert case.named.partition(":")[0] in project.engine.journal().read_attempt(standing.attempts).lineage["drift"]
    # The accepted change belongs to the run now, and needs no further acceptance.
    done = project.train(3, **dict(case.environment))
    assert done.returncode == 0, done.stderr
    assert "warning: drift" not in done.stderr


def test_another_version_of_an_imported_package_is_not_promised(project: Project) -> None:
    assert project.train(1).returncode == 0
    old = project.folder / "site-packages" / "silent_installed-1.0.dist-info"
    new = old.rename(old.with_name("silent_installed-1.1.dist-info"))
    (new / "METADATA").write_text((new / "METADATA").read_text().replace("1.0", "1.1"))
    done = project.train(2, "resume.environment=refuse")
    assert done.returncode == 1, done.stderr
    assert "silent-installed: saved '1.0', here '1.1'" in done.stderr
    done = project.train(2)
    assert done.returncode == 0, done.stderr
    assert "warning: drift: packages.silent-installed: saved '1.0', now '1.1'" in done.stderr
    lineage = project.engine.journal().read_attempt(2).lineage
    assert lineage["environment"]["promise"] == "not promised"
    assert lineage["drift"]["packages.silent-installed"]["kind"] == "package"


def test_an_imported_package_that_was_edited_in_place_is_not_promised(project: Project) -> None:
    """Its RECORD has the hash of each file."""
    folder = project.folder / "site-packages"
    sha256 = base64.urlsafe_b64encode(hashlib.sha256(b"").digest()).decode().rstrip("=")
    record = folder / "silent_installed-1.0.dist-info" / "RECORD"
    record.write_text(f"silent_installed/__init__.py,sha256={sha256},0\n")
    assert project.train(1).returncode == 0
    (folder / "silent_installed" / "__init__.py").write_text("x = 1\n")
    done = project.train(2)
    assert done.returncode == 0, done.stderr
    assert "warning: drift: packages.silent-installed: saved '1.0, installed files" in done.stderr
    assert "edited since: silent_installed/__init__.py" in done.stderr
    assert project.engine.journal().read_attempt(2).lineage["environment"]["promise"] == "not promised"


def move(project: Project) -> None:
    project.folder = project.folder.rename(project.folder.with_name("moved"))


def add_an_unrelated_module(project: Project) -> None:
    project.write("silent_pack/unrelated.py", "x = 1\n")
    project.write("silent_unrelated.py", "x = 1\n")


def comment(project: Project) -> None:
    for name in ("silent_recipe.py", "silent_pack/rates.py", "silent_pack/lazy.py"):
        project.write(name, "# A comment.\n\n" + (project.folder / name).read_text())


@pytest.mark.parametrize("change", [lambda project: None, move, add_an_unrelated_module, comment])
def test_a_harmless_change_is_no_drift(project: Project, change: Callable[[Project], None]) -> None:
    assert project.train(1).returncode == 0
    change(project)
    done = project.train(2)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    attempt = project.engine.journal().read_attempt(2)
    assert attempt.lineage["drift"].keys() == {"epochs"}
    assert attempt.lineage["environment"]["promise"] == "identical"


def test_a_checkpoint_has_the_whole_record(project: Project) -> None:
    assert project.train(1).returncode == 0
    journal = project.engine.journal()
    commit = journal.newest()
    assert commit
    metadata = checkpoint.read_metadata(journal.store, commit.path)
    assert metadata
    environment = metadata.environment
    assert environment["sources"].keys() == {
        "silent_recipe", "silent_pack", "silent_pack.rates", "silent_pack.lazy", "kernel.json",
    }  # fmt: skip
    assert environment["packages"] == {"silent-installed": "1.0"}
    assert environment["files"].keys() == {"data/x.npy"}
    assert environment["built"]["model.1.momentum"] == 0.1


def test_code_edited_while_an_attempt_lives_is_refused_by_new_ranks(project: Project) -> None:
    """An attempt that lost its ranks starts new ones, which import the code as it is then."""
    dies = RECIPE.replace(
        "        lazy.follow(model)\n",
        "        lazy.follow(model)\n"
        "        if not (HERE / 'died').exists():\n"
        "            (HERE / 'died').write_text('')\n"
        "            (HERE / 'silent_pack' / 'rates.py').write_text('DROPOUT = 0.45\\n')\n"
        "            os.kill(os.getpid(), 9)\n",
    )
    project.write("silent_recipe.py", dies)
    done = project.train(1, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1, done.stderr
    assert "sources.silent_pack.rates: its code has changed" in done.stderr


def test_a_listed_source_that_is_missing_is_refused(project: Project) -> None:
    (project.folder / "kernel.json").unlink()
    done = project.train(1)
    assert done.returncode == 1, done.stderr
    assert "the recipe's sources: there is no module and no file 'kernel.json'" in done.stderr


def test_the_file_of_faults_lists_every_case() -> None:
    """The file has a row for each case, with the name that the refusal prints."""
    text = (ROOT / "docs" / "data" / "faults.csv").read_text("utf-8")
    table = dict(re.findall(r"^([\w' ]+),drift,(.+)$", text, re.MULTILINE))
    assert table.items() >= {name: case.named.partition(":")[0] for name, case in CASES.items()}.items()

"""Tests of the wheel alone, without Prefect, in its own environment: train, prove, verify and audit."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import COMMAND_WITHIN_S, IN_SOAK, ROOT
from tests.project.test_dependencies import CORE

pytestmark = pytest.mark.slow

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast import Recipe


def line(lr: float = 0.01) -> Recipe:
    model = nn.Linear(3, 1)
    return Recipe(
        model=model,
        data=TensorDataset(torch.linspace(0, 1, 96).reshape(32, 3)),
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        loss=lambda model, batch: (model(batch[0]) - 1).square().mean(),
        batch_size=8,
    )
"""
TEMPLATE = "holdfast/cli/templates/recipe.py.txt"
# Functions that take a model of the user's own class.
SUBCLASS = """
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points * self.scale


def loss(model: Net, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model.forward(batch[0]), batch[0])


def evaluate(model: Net) -> dict[str, float]:
    return {"scale": model.scale.mean().item()}


def scaled(lr: float = 0.1) -> Recipe:
    model = Net()
    return Recipe(
        model=model,
        data=TensorDataset(torch.ones(8, 2)),
        optimizer={"only": torch.optim.SGD(model.parameters(), lr=lr)},
        loss=loss,
        evaluate=evaluate,
        probe=evaluate,
    )
"""
# Typed as strictly as torch allows: `Tensor.backward` and the step of an optimizer's own class have no types there.
LOOP = """
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast import Limits, Run


def descend(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()


def train(run: Run, lr: float = 2e-3, noise_size: int = 8) -> None:
    model = run.wrap(nn.Sequential(nn.Linear(noise_size, 32), nn.ReLU(), nn.Linear(32, 2))).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    noise = run.generator("noise")
    state = {"best": float("inf")}
    run.keep(model=model, optimizer=optimizer, state=state)
    run.observe(evaluate=lambda model: {"best": state["best"]}, health={"loss": Limits(max=100.0)})
    for step in run.steps(per_epoch=100):
        made: Tensor = model(torch.randn(64, noise_size, generator=noise).to(run.device))
        loss = (made.square().sum(1) - 1).square().mean()
        descend(optimizer, loss)
        norm = run.clip_grad_norm_(model.parameters(), max_norm=1.0)
        state["best"] = min(state["best"], loss.item())
        step.log(loss=loss)
        if step.is_last_of_epoch and not step.is_rehearsal:
            print(step.number, step.epoch, norm.item(), run.rank, run.world_size, run.config.compute.virtual_ranks)
"""
OBSERVER = """
from holdfast import AttemptView, Commit, HoldfastError, Observer, Progress, live, load_config


class Printer(Observer):
    def opened(self, attempt: AttemptView) -> None:
        print(attempt.number, attempt.total_steps)

    def progressed(self, attempt: AttemptView, progress: Progress) -> None:
        print(progress.step, progress.loss_text, progress.steps_per_s)

    def committed(self, attempt: AttemptView, commit: Commit) -> None:
        print(commit.step, commit.metrics, commit.checkpoint_sha256)


def main() -> int:
    config = load_config("my_loop.toml", ["epochs=2"])
    try:
        return 0 if live(config, [Printer()]).complete else 3
    except HoldfastError as error:
        print(error, error.hint)
        return error.exit_code
"""
WRONG = """
from torch import nn

from holdfast import Run


def train(run: Run, model: nn.Module) -> None:
    run.keep(model, "name")
    for step in run.steps():
        step.log("loss")
    run.config.compute.virtual_ranks.upper()
"""
PYRIGHT = ROOT / ".venv" / "node_modules" / "pyright" / "index.js"
CONFIG = 'recipe = "my_line:line"\nrun = "line"\nepochs = 3\n'


def list_required(names: set[str]) -> dict[str, Distribution]:
    """Return the installed distributions of these names and of all their requirements, by name."""
    found: dict[str, Distribution] = {}
    waiting = [*names]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = distribution(name)
        needed = [Requirement(each) for each in found[name].requires or ()]
        waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link(found: Distribution, site: Path) -> None:
    """Link an installed distribution's top-level entries into another folder of packages."""
    for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        target = Path(str(found.locate_file(entry)))
        if target.exists() and not (site / entry).exists():  # several distributions may share a namespace
            (site / entry).symlink_to(target)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command without this environment's own paths and return its output."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=cwd, env=own | {"PIP_NO_INDEX": "1"}, capture_output=True, text=True, timeout=COMMAND_WITHIN_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bin/ of an environment with the wheel, its core dependencies and their requirements alone."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    (site,) = folder.glob("venv/lib/python*/site-packages")
    for found in list_required(CORE).values():
        link(found, site)
    # pip may use no index, so it fails if the wheel requires anything but the core dependencies.
    run(sys.executable, "-m", "pip", "--python", folder / "venv/bin/python", "install", "--quiet", wheel)
    return folder / "venv" / "bin"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small recipe and its configuration."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "my_line.py").write_text(RECIPE)
    (folder / "my_line.toml").write_text(CONFIG)
    return folder


def test_neither_prefect_nor_the_checkout_is_there(binaries: Path, recipe: Path) -> None:
    program = (
        "import importlib.util, holdfast\n"
        "print([name for name in ('prefect', 'fastapi', 'flows', 'tasks', 'pytest') if importlib.util.find_spec(name)])"
        "\nprint(holdfast.__file__)"
    )
    found, file = run(binaries / "python", "-c", program, cwd=recipe).splitlines()
    assert found == "[]"
    assert Path(file).is_relative_to(binaries.parent)


def test_every_module_of_the_engine_can_be_imported(binaries: Path, recipe: Path) -> None:
    """Modules of extras are exempt: stores of clouds, recipes, adapters, sinks, Ray, and the suites for pytest."""
    program = (
        "import holdfast, importlib, pkgutil\n"
        "for module in pkgutil.walk_packages(holdfast.__path__, 'holdfast.'):\n"
        "    try:\n"
        "        if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "    except ImportError as error: print(module.name, error.name)"
    )
    missing = dict(line.split() for line in run(binaries / "python", "-c", program, cwd=recipe).splitlines())
    adapters = {"lightning": ("", "_loop", "_state"), "torchtitan": ("", "_parts"), "transformers": ("",)}
    assert missing == {
        "holdfast.store.azure": "azure",
        "holdfast.store.gcs": "aiohttp",
        "holdfast.testing.stores": "pytest",
        "holdfast.adapters.trainer_arguments": "transformers",
        **{f"holdfast.adapters.{name}{part}": name for name, parts in adapters.items() for part in parts},
        **{f"holdfast.extensions.ray.{name}": "ray" for name in ("carrying", "placing", "relaying")},
        "holdfast.extensions.metrics.otlp": "opentelemetry",
        "holdfast.extensions.metrics.prometheus": "prometheus_client",
        **{f"holdfast.extensions.sinks.{name}": name for name in ("tensorboard", "wandb")},
    }


def test_the_recipes_files_are_there(binaries: Path, recipe: Path) -> None:
    program = "from importlib.resources import files\nfor each in files('holdfast.recipes').iterdir(): print(each.name)"
    found = run(binaries / "python", "-c", program, cwd=recipe).split()
    assert {"language.toml", "digits.toml"} <= {*found}


@IN_SOAK
def test_the_wheel_proves(binaries: Path, recipe: Path) -> None:
    options = ["--steps", "8", "--kills", "1", "--seed", "7"]
    said = run(binaries / "holdfast", "prove", "my_line.toml", *options, cwd=recipe)
    assert said.startswith("proved: 8 steps of my_line:line end on the same bytes, straight and with SIGKILL in step ")


def test_the_wheel_trains_verifies_and_audits(binaries: Path, recipe: Path) -> None:
    holdfast = binaries / "holdfast"
    said = run(holdfast, "train", "my_line.toml", cwd=recipe)
    assert said.startswith("run line is complete: step 12, epoch 3")
    said = run(holdfast, "train", "my_line.toml", "--set", "epochs=4", cwd=recipe)
    assert said.startswith("run line is complete: step 16, epoch 4")
    assert "0 problems" in run(holdfast, "verify", "runs/line", cwd=recipe)
    assert "replayed to the same bytes" in run(holdfast, "audit", "runs/line", "--random", "1", cwd=recipe)


def test_the_commands_of_the_packages_own_page_run(binaries: Path, tmp_path: Path) -> None:
    """Those of its first session; the tests above and below prove and kill."""
    lines = (ROOT / "docs" / "quickstart.md").read_text("utf-8").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("holdfast ") and "run=killed" not in line]
    assert [command[1] for command in commands] == ["new", "train", "prove", "show", "report", "verify", "export"]
    for _, name, *rest in commands:
        if name != "prove":
            run(binaries / "holdfast", name, *rest, *(["--set", "epochs=1"] if name == "train" else []), cwd=tmp_path)
    assert {"my_run.html", "my_run.safetensors"} <= {path.name for path in tmp_path.iterdir()}
    assert "queue" in run(binaries / "holdfast", "docs", "slurm", cwd=tmp_path)


# ---- the type hints


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a user's recipe, own loop and observer, to be checked as strictly as checkers can."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "my_recipe.py").write_text(f"{(ROOT / TEMPLATE).read_text('utf-8')}\n{SUBCLASS}")
    (folder / "my_loop.py").write_text(LOOP)
    (folder / "my_observer.py").write_text(OBSERVER)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict", "include": ["my_*.py"]}')
    return folder


def test_mypy_finds_no_error_in_a_users_code(binaries: Path, typed: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", binaries / "python"]
    said = run(*mypy, "my_recipe.py", "my_loop.py", "my_observer.py", cwd=typed)
    assert said == "Success: no issues found in 3 source files\n"


@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed: make test installs it with npm")
def test_pyright_finds_no_error_in_a_users_code(binaries: Path, typed: Path) -> None:
    said = run("node", PYRIGHT, "--pythonpath", binaries / "python", cwd=typed)
    assert said == "0 errors, 0 warnings, 0 informations\n"


def test_a_checker_finds_what_is_wrong(binaries: Path, typed: Path) -> None:
    """So that the tests above don't pass because everything is Any."""
    (typed / "wrong.py").write_text(WRONG)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", binaries / "python", "wrong.py"]
    done = subprocess.run(mypy, cwd=typed, capture_output=True, text=True, check=False, timeout=COMMAND_WITHIN_S)
    found = re.findall(r"^wrong.py:(\d+): error: (.*)  \[", done.stdout, re.M)
    assert dict(reversed(found)) == {  # the first error of each line
        "8": 'Too many arguments for "keep" of "Run"',
        "10": 'Too many arguments for "log" of "Step"',
        "11": '"int" has no attribute "upper"',
    }


def test_the_example_of_run_trains(binaries: Path, recipe: Path) -> None:
    """Its documentation has it, as `help(holdfast.Run)` shows."""
    program = "import holdfast, inspect; print(inspect.getdoc(holdfast.Run))"
    (example,) = re.findall(r"^    def train.*?(?=^``recipe)", run(binaries / "python", "-c", program), re.M | re.S)
    (recipe / "my_loop.py").write_text(f"import torch\nfrom torch import nn\n\nimport holdfast\n\n{dedent(example)}")
    (recipe / "my_loop.toml").write_text('recipe = "my_loop.py:train"\nrun = "loop"\nepochs = 1\n')
    said = run(binaries / "holdfast", "train", "my_loop.toml", cwd=recipe)
    assert said.startswith("run loop is complete: step 100, epoch 1")

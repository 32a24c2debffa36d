"""A strict process is made deterministic before a model is built, and nothing that changes it back goes unnoticed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from holdfast.config import Determinism
from holdfast.determinism import PREAMBLE, preamble
from tests.conftest import ROOT

WITHIN_S = 120

# What a recipe may do to torch, and what is said of it.
CHANGES = {
    "torch.use_deterministic_algorithms(False)": "torch.use_deterministic_algorithms is off",
    "torch.use_deterministic_algorithms(True, warn_only=True)": "torch.use_deterministic_algorithms only warns",
    "torch.backends.cudnn.benchmark = True": "torch.backends.cudnn.benchmark is on",
    "torch.backends.cudnn.deterministic = False": "torch.backends.cudnn.deterministic is off",
    "torch.set_float32_matmul_precision('high')": "float32 matrices are multiplied in a lower precision",
    "torch.backends.cuda.matmul.allow_tf32 = True": "float32 matrices are multiplied in a lower precision",
    "torch.set_num_threads(1)": "there are 1 threads, not 2",
}


def run(program: str, environment: dict[str, str], *arguments: str) -> Any:
    """What a program prints as JSON, in a process that was started with this environment and no other of the kind."""
    kept = {name: value for name, value in os.environ.items() if name not in preamble(Determinism())}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_preamble_names_what_is_read_when_a_process_starts() -> None:
    assert preamble(Determinism(threads=3)) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0", "TORCHINDUCTOR_DETERMINISTIC": "1",
        "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3",
    }  # fmt: skip
    assert preamble(Determinism(mode="fast"))["TORCHINDUCTOR_DETERMINISTIC"] == "0"


CHECKED = """
import json, os, random, sys
import numpy, torch
from holdfast import determinism
from holdfast.config import Determinism
from holdfast.errors import DeterminismError

settings, said = Determinism(threads=2), {}

def check(settings):
    try:
        determinism.check(settings)
    except DeterminismError as error:
        return str(error)
    return ""

def draw():
    return [random.random(), numpy.random.random(), torch.rand(()).item()]

said["never made so"] = check(settings)
determinism.apply(settings, 2**62 + 5)
drawn = draw()
said["made so"] = check(settings)
said["loaded"] = sorted({"torch._inductor", "torch._dynamo"} & sys.modules.keys())
for change in json.loads(sys.argv[1]):
    exec(change)
    said[change] = check(settings)
    said["fast: " + change] = check(Determinism(mode="fast", threads=2))
    determinism.apply(settings, 2**62 + 5)
    said["again"] = check(settings)
said["refuses"] = ""
try:
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))  # which of the two is last is anyone's guess
except RuntimeError as error:
    said["refuses"] = str(error)
again = draw()
import torch._inductor.config
said["compiles"] = torch._inductor.config.deterministic

refused = {}
for missing in determinism.PREAMBLE:
    torch.use_deterministic_algorithms(False)
    kept = os.environ.pop(missing)
    try:
        determinism.apply(settings, 1)
    except DeterminismError as error:
        refused[missing] = [str(error), error.hint, torch.are_deterministic_algorithms_enabled()]
    determinism.apply(Determinism(mode="fast"), 1)
    os.environ[missing] = kept
print(json.dumps([said, drawn, again, refused, hash("a")]))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    return run(CHECKED, preamble(Determinism(threads=2)), json.dumps(list(CHANGES)))


@pytest.mark.slow
def test_every_change_back_is_noticed(found: Any) -> None:
    said, *_ = found
    assert "torch.use_deterministic_algorithms is off and " in said["never made so"]
    assert (said["made so"], said["again"]) == ("", "")
    for change, expected in CHANGES.items():
        assert said[change] == f"the model would be built, or has been, while {expected}"
        assert said[f"fast: {change}"] == ""


@pytest.mark.slow
def test_what_has_no_deterministic_form_raises(found: Any) -> None:
    assert "deterministic implementation" in found[0]["refuses"]


@pytest.mark.slow
def test_torchs_compiler_is_deterministic_and_not_loaded_for_that(found: Any) -> None:
    assert (found[0]["loaded"], found[0]["compiles"]) == ([], True)


@pytest.mark.slow
def test_every_generator_is_seeded(found: Any) -> None:
    _, drawn, again, _, hashed = found
    assert drawn == again
    assert hashed == run("print(hash('a'))", {"PYTHONHASHSEED": "0"})


@pytest.mark.slow
def test_a_process_without_the_preamble_is_refused(found: Any) -> None:
    refused = found[3]
    assert refused.keys() == PREAMBLE.keys()
    for name, (message, hint, is_on) in refused.items():
        assert message == f"this process was started without {name}"
        assert "holdfast.launch" in hint
        assert not is_on


# ---- recipes

RECIPE = """
import torch
from torch import nn
from holdfast import Recipe, determinism
from holdfast.config import Determinism

{before}

def build() -> Recipe:
    built.append("{name}")
    model = nn.Linear(2, 1)
    {within}
    return Recipe(
        model=model, data=list(torch.eye(2)), optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=1,
        loss=lambda model, x: model(x).sum(),
    )
"""

BUILT = """
import builtins, json, os, sys
import torch
from holdfast import RunConfig, determinism
from holdfast.errors import HoldfastError
from holdfast.training import Training

sys.path.insert(0, sys.argv[1])
builtins.built = []
said = {}

def train(name):
    try:
        Training(RunConfig(recipe=name + ":build", run="a", store=sys.argv[1]))
        said[name] = ["", "", name in built]
    except HoldfastError as error:
        said[name] = [type(error).__name__, str(error), name in built]

for name in ("harmless", "before", "within", "harmless"):
    train(name)
torch.use_deterministic_algorithms(False)
apply, determinism.apply = determinism.apply, lambda settings, seed: None
determinism.apply_at_last = apply
train("late")
determinism.apply = apply
os.environ["PYTHONHASHSEED"] = "random"
train("stray")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How the training of each recipe was refused, if it was, and whether its model had been built by then."""
    folder = tmp_path_factory.mktemp("recipes")
    change = "torch.backends.cudnn.benchmark = True"
    for name, before, within in (
        ("harmless", "", "pass"),
        ("before", change, "pass"),
        ("within", "", change),
        ("late", "", "determinism.apply_at_last(Determinism(), 1)"),
        ("stray", "", "pass"),
    ):
        (folder / f"{name}.py").write_text(RECIPE.format(name=name, before=before, within=within))
    return run(BUILT, preamble(Determinism()), str(folder))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_recipe_that_leaves_the_process_alone_is_built(trained: dict[str, Any]) -> None:
    assert trained["harmless"] == ["", "", True]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before", "within"])
def test_a_recipe_that_changes_the_process_is_refused(trained: dict[str, Any], place: str) -> None:
    kind, message, _ = trained[place]
    assert (kind, "torch.backends.cudnn.benchmark is on" in message) == ("DeterminismError", True)


@pytest.mark.slow
def test_a_process_that_would_be_made_deterministic_after_the_model_was_built_is_refused(
    trained: dict[str, Any],
) -> None:
    """Its weights would have been drawn, and its kernels chosen, before."""
    kind, message, is_built = trained["late"]
    assert (kind, "torch.use_deterministic_algorithms is off" in message, is_built) == ("DeterminismError", True, False)


@pytest.mark.slow
def test_a_training_that_was_not_started_as_a_rank_is_refused(trained: dict[str, Any]) -> None:
    assert trained["stray"] == ["DeterminismError", "this process was started without PYTHONHASHSEED", False]

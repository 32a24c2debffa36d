"""A process in strict mode is made deterministic before a model is built, and any later change is noticed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import ChunkLength, Compute, Determinism, RunConfig
from holdfast.errors import ConfigError
from holdfast.journal import Journal
from holdfast.machine.determinism import PREAMBLE, preamble
from holdfast.store import open_store
from holdfast.training import Training
from tests.conftest import ROOT
from tests.support.lives import Lives

WITHIN_S = 600

# A recipe's change of torch's settings, and the message about it: first what strict mode demands, then what it leaves
# to the recipe, as long as that stays.
DEMANDED = {
    "torch.use_deterministic_algorithms(False)": "torch.use_deterministic_algorithms is False, not True",
    "torch.use_deterministic_algorithms(True, warn_only=True)": (
        "warn_only of torch.use_deterministic_algorithms is True, not False"
    ),
    "torch.backends.cudnn.benchmark = True": "torch.backends.cudnn.benchmark is True, not False",
    "torch.backends.cudnn.deterministic = False": "torch.backends.cudnn.deterministic is False, not True",
    "torch.set_num_threads(1)": "torch.set_num_threads is 1, not 2",
}
CHOSEN = {
    "torch.set_default_dtype(torch.float64)": "torch.set_default_dtype is torch.float64, not torch.float32",
    "torch.set_flush_denormal(True)": "torch.set_flush_denormal is True, not False",
    "torch.backends.cuda.enable_math_sdp(False)": "torch.backends.cuda.enable_math_sdp is False, not True",
}
TF32 = "torch.backends.cuda.matmul.fp32_precision is tf32, not ieee"
CHOSEN |= {
    "torch.backends.cuda.matmul.allow_tf32 = True": TF32,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": TF32,
    "torch.backends.mkldnn.conv.fp32_precision = 'bf16'": "torch.backends.mkldnn.conv.fp32_precision is bf16, not ieee",
}
CHANGES = DEMANDED | CHOSEN
RESET = "torch.set_default_dtype(torch.float32); torch.set_flush_denormal(False); "
RESET += "torch.backends.cuda.enable_math_sdp(True); torch.backends.mkldnn.conv.fp32_precision = 'none'; "
RESET += "torch.backends.cuda.matmul.fp32_precision = 'none'"


def run(program: str, environment: dict[str, str], *arguments: str) -> Any:
    """Run a program in a process with this environment, without other determinism variables; return its JSON output."""
    kept = {name: value for name, value in os.environ.items() if name not in preamble(Determinism())}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_preamble_has_the_variables_that_are_read_at_start() -> None:
    assert preamble(Determinism(threads=3)) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0", "TORCHINDUCTOR_DETERMINISTIC": "1",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES": "0", "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
        "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3",
    }  # fmt: skip
    assert preamble(Determinism(mode="fast"))["TORCHINDUCTOR_DETERMINISTIC"] == "0"


CHECKED = """
import json, os, random, sys
import numpy, torch
from holdfast.machine import determinism
from holdfast.config import Determinism
from holdfast.errors import DeterminismError

settings, said = Determinism(threads=2), {}

def told(check, *arguments):
    try:
        check(*arguments, "after step 3")
    except DeterminismError as error:
        return str(error)
    return ""

def check(settings):
    return told(determinism.check, settings)

def draw():
    return [random.random(), numpy.random.random(), torch.rand(()).item()]

said["never made so"] = check(settings)
determinism.apply(settings, 2**62 + 5)
drawn = draw()
said["made so"] = check(settings)
flags = determinism.read_flags()
said["loaded"] = sorted({"torch._inductor", "torch._dynamo"} & sys.modules.keys())
for change in json.loads(sys.argv[1]):
    exec(change)
    said[change] = check(settings)
    said["since: " + change] = told(determinism.check_unchanged, settings, flags)
    fast = Determinism(mode="fast", threads=2)
    said["fast: " + change] = check(fast) + told(determinism.check_unchanged, fast, flags)
    exec(sys.argv[2])
    determinism.apply(settings, 2**62 + 5)
    said["again"] = check(settings) + told(determinism.check_unchanged, settings, flags)
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
    return run(CHECKED, preamble(Determinism(threads=2)), json.dumps(list(CHANGES)), RESET)


@pytest.mark.slow
def test_every_changed_flag_is_noticed(found: Any) -> None:
    said, *_ = found
    assert "torch.use_deterministic_algorithms is False, not True and " in said["never made so"]
    assert (said["made so"], said["again"]) == ("", "")
    for change, expected in CHANGES.items():
        assert said[change] == (f"after step 3, {expected}" if change in DEMANDED else "")
        assert said[f"since: {change}"] == f"after step 3, {expected}"
        assert said[f"fast: {change}"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("change", ["torch.set_num_threads(3)", "torch.backends.cudnn.deterministic = False"])
def test_a_loss_that_changes_a_flag_ends_the_run_in_that_step(nursery: Lives, tmp_path: Path, change: str) -> None:
    (tmp_path / "unruly.py").write_text(UNRULY.format(change=change))
    config = RunConfig(recipe="unruly:build", run="a", store=str(tmp_path / "runs"), chunk=ChunkLength(steps=2))
    done = nursery.call("tests.support.lives:live", config.model_dump(mode="json"), 0, 0, PYTHONPATH=str(tmp_path))
    assert "DeterminismError: after step 3, torch." in done.stderr
    journal = Journal(open_store(config.store), config.run)
    assert [commit.step for commit in journal.candidates()] == [2]


@pytest.mark.slow
def test_an_operation_without_a_deterministic_form_raises(found: Any) -> None:
    assert "deterministic implementation" in found[0]["refuses"]


@pytest.mark.slow
def test_torchs_compiler_is_deterministic_without_being_imported(found: Any) -> None:
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
        assert message == f"this training process was started without the variables {name}"
        assert "holdfast.rank.launching" in hint
        assert not is_on


# ---- recipes

UNRULY = """
import torch
from torch import nn
from holdfast import Recipe

calls = []

def build() -> Recipe:
    model = nn.Linear(2, 1)

    def loss(model, x):
        calls.append(x)
        if len(calls) == 4:  # the third step's, because one call is the gate's, after the chunk of two steps
            {change}
        return model(x).sum()

    return Recipe(
        model=model, data=list(torch.eye(2)), optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=1,
        steps_per_epoch=8, loss=loss,
    )
"""

RECIPE = """
import torch
from torch import nn
from holdfast import Recipe
from holdfast.machine import determinism
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
from holdfast import RunConfig
from holdfast.machine import determinism
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
    """Return for each recipe the error that refused its training, if any, and whether its model was built before."""
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
    assert (kind, "torch.backends.cudnn.benchmark is True, not False" in message) == ("DeterminismError", True)


@pytest.mark.slow
def test_a_process_made_deterministic_after_the_model_is_refused(
    trained: dict[str, Any],
) -> None:
    """Otherwise weights would be drawn, and kernels chosen, before the process is deterministic."""
    kind, message, is_built = trained["late"]
    assert (kind, "torch.use_deterministic_algorithms is False, not True" in message, is_built) == (
        "DeterminismError",
        True,
        False,
    )


@pytest.mark.slow
def test_a_training_that_was_not_started_as_a_rank_is_refused(trained: dict[str, Any]) -> None:
    assert trained["stray"] == [
        "DeterminismError",
        "this training process was started without the variables PYTHONHASHSEED",
        False,
    ]


def test_fp16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    """torch would train in float32 there, under another fingerprint."""
    compute = Compute(device="cpu", mixed_precision="fp16")
    config = RunConfig(recipe="tests.support.toy:toy", run="a", store=str(tmp_path), compute=compute)
    with pytest.raises(ConfigError, match=r'compute.mixed_precision = "fp16": .* this is a CPU'):
        Training(config)

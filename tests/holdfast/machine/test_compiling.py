"""A compiled kernel doesn't depend on what its process has computed before, or it is named."""

import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from holdfast.config import ChunkLength, Determinism, RunConfig
from holdfast.journal import Journal
from holdfast.machine.compiling import CONFIG, STEADY, find_autotuners, steady_compiler
from holdfast.store import open_store
from tests.support.lives import Lives

# This backend's kernel for any size, its kernel for one size, and the function that isn't compiled give different bits,
# as a compiler's may. The differences are large, because a difference in the last bit is lost in small updates.
LENGTHS = """
import torch
from torch import nn
from holdfast import Recipe

LENGTHS = [8, 8, 16, 8, *range(17, 29)]

class Texts:
    def __iter__(self):
        for length in LENGTHS:
            yield torch.linspace(0, 1, length)[:, None] * torch.ones(4)

def backend(graph, inputs):
    sizes = [size for each in inputs if isinstance(each, torch.Tensor) for size in each.shape]
    factor = 1.25 if any(isinstance(each, torch.SymInt) for each in (*inputs, *sizes)) else 1.5
    return lambda *arguments: [each * factor for each in graph(*arguments)]

@torch.compile(backend=backend)
def compute(model, x):
    return model(x).square().mean()

def build() -> Recipe:
    model = nn.Linear(4, 4)
    return Recipe(
        model=model, data=Texts(), optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=1,
        steps_per_epoch=len(LENGTHS), loss=lambda model, x: compute(model, x[0]),
    )
"""


@pytest.mark.slow
def test_texts_of_several_lengths_end_on_the_same_bytes_when_killed(nursery: Lives, tmp_path: Path) -> None:
    (tmp_path / "lengths.py").write_text(LENGTHS)

    def train(name: str, *kills: int) -> str:
        config = RunConfig(recipe="lengths:build", run=name, store=str(tmp_path / "runs"), chunk=ChunkLength(steps=3))
        for kill in (*kills, 0):
            done = nursery.call(
                "tests.support.lives:live", config.model_dump(mode="json"), kill, 0, PYTHONPATH=str(tmp_path)
            )
            assert done.returncode == (-signal.SIGKILL if kill else 0), done.stdout + done.stderr
        return next(Journal(open_store(config.store), name).candidates()).checkpoint_sha256

    # After 3, the first length comes again. After 13, more lengths were seen than torch compiles by default.
    assert train("killed", 4, 14) == train("straight")


@pytest.mark.parametrize("mode", ["strict", "fast"])
def test_only_strict_mode_changes_the_compiler(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    config: Any = ModuleType(CONFIG)
    config.automatic_dynamic_shapes = True  # an earlier version, which lacks the other settings
    monkeypatch.setitem(sys.modules, CONFIG, config)
    steady_compiler(Determinism(mode=mode))
    assert config.automatic_dynamic_shapes is (mode == "fast")
    assert not hasattr(config, "recompile_limit")
    monkeypatch.delitem(sys.modules, CONFIG)
    steady_compiler(Determinism(mode=mode))
    assert CONFIG not in sys.modules  # loading it takes 2 s


def test_every_setting_of_the_compiler_is_known_to_this_torch() -> None:
    from torch._dynamo import config

    assert all(hasattr(config, name) for name in STEADY)


def test_kernels_that_are_chosen_by_timing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_autotuners() == []

    class Autotuner:
        def __init__(self, configs: int) -> None:
            self.configs = [object()] * configs

    class Heuristics:
        def __init__(self, fn: Any) -> None:
            self.fn = fn

    for each in (Autotuner, Heuristics):
        each.__module__ = "triton.runtime.autotuner"
    triton, package = ModuleType("triton.runtime.autotuner"), ModuleType("package.kernels")
    vars(triton)["Autotuner"] = Autotuner
    vars(package).update(one=Autotuner(1), rotary=Autotuner(3), norm=Heuristics(Autotuner(2)), other=3)
    for module in (triton, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert find_autotuners() == ["package.kernels.norm", "package.kernels.rotary"]

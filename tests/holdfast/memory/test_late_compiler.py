"""A process that doesn't compile doesn't load torch's compiler, and its optimizers compute what torch's own do."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from holdfast.memory import WITHOUT_VARIABLE

# Trains with each optimizer of torch, loads torch's compiler, and trains on. Prints what was computed.
PROGRAM = """
import hashlib, importlib, json, sys

import torch

from holdfast.memory.late_compiler import load_compiler_late

load_compiler_late()
LOADED = "torch._dynamo"


def train(name, steps):
    model, optimizer = trained[name]
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 32).reshape(2, 16)
        model(inputs).square().mean().backward()
        optimizer.step()
        assert torch.is_grad_enabled()
    optimizer.load_state_dict(optimizer.state_dict())
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()


def build(kind):
    torch.manual_seed(3)
    model = torch.nn.Linear(16, 16)
    return model, getattr(torch.optim, kind)(model.parameters())


kinds = "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
trained = {kind: build(kind) for kind in kinds}
before, is_loaded = {name: train(name, 3) for name in trained}, LOADED in sys.modules
importlib.import_module(LOADED)
print(json.dumps([is_loaded, before, {name: train(name, 3) for name in trained}]))
"""


def run(program: str, without: str) -> Any:
    """Return what a program prints as JSON."""
    environment = os.environ | {WITHOUT_VARIABLE: without}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_optimizers_compute_the_same_without_the_compiler() -> None:
    (is_loaded, *late), (was_loaded, *usual) = run(PROGRAM, ""), run(PROGRAM, "late compiler")
    assert (is_loaded, was_loaded) == (False, True)
    assert late == usual


def test_a_rank_loads_the_compiler_only_for_a_program_that_uses_it() -> None:
    program = """
import json, sys
from pathlib import Path

from holdfast.memory.late_compiler import load_compiler_late
from tests.support.trainings import make, train_to

load_compiler_late()
training = make(Path("unused"), "tests.support.toy:toy")
train_to(training, 3)
print(json.dumps(sorted({"sympy", "torch._dynamo", "torch.distributed.tensor"} & sys.modules.keys())))
"""
    assert run(program, "") == []

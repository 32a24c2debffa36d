"""Only training draws from training's generators."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import state
from holdfast.checkpoint import differences
from holdfast.config import ChunkLength, RunConfig
from holdfast.errors import StateError
from holdfast.journal import Journal
from holdfast.state import capture_rng, generator_memory, generators
from holdfast.store import open_store
from holdfast.training import Training, capturing
from holdfast.training.recording import read_lines
from tests.conftest import ROOT
from tests.support.lives import Lives
from tests.support.trainings import make, train_to

STEPS = 8

# A recipe whose loss draws from the global generator while other threads draw from it too, if NOISE is set.
NOISY = """
import os, random, threading
import torch
from torch import nn
from holdfast import Recipe

def draw() -> None:
    while True:
        random.random(), random.gauss(), random.shuffle([1, 2, 3])

def build() -> Recipe:
    model = nn.Linear(2, 1)
    for _ in range(2 if os.environ.get("NOISE") else 0):
        threading.Thread(target=draw, daemon=True).start()

    def loss(model, x):
        return (model(x) * random.gauss() * sum(random.random() for _ in range(10_000))).sum()

    return Recipe(
        model=model, data=list(torch.eye(2)), optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=1,
        steps_per_epoch=20, loss=loss,
    )
"""

SEPARATED = """
import _thread, json, sys
import holdfast.rank
import random
from holdfast.machine.determinism import separate_threads

named = [
    f"{module.__name__}.{name}"
    for module in list(sys.modules.values()) if module is not random
    for name, value in list(vars(module).items()) if getattr(value, "__self__", None) is random._inst
]
random.seed(3)
before = [random.random(), random.getstate(), random.gauss(), random.choices("abc", k=3), random.getrandbits(40)]
separate_threads()
separate_threads()
random.seed(3)
after = [random.random(), random.getstate(), random.gauss(), random.choices("abc", k=3), random.getrandbits(40)]

random.seed(3)
drawn, done = [], _thread.allocate_lock()
done.acquire()
_thread.start_new_thread(lambda: (drawn.append(random.random()), done.release()), ())  # as torch starts its own
done.acquire()
print(json.dumps([named, before == after, drawn == before[:1]]))
"""


def draw() -> None:
    """Advance every global generator."""
    random.random(), np.random.random(), torch.rand(3), np.random.normal()


def trained(folder: Path, recipe: str, disturb: Any) -> Training:
    """Train a run, and call `disturb` wherever the engine does something between two steps."""
    training = make(folder, recipe)

    def report(*done: float) -> None:
        disturb()

    def is_stopping() -> bool:
        disturb()
        return False

    for stop in (1, 4, STEPS):
        train_to(training, stop, is_stopping, report)
        disturb()
    return training


@pytest.mark.parametrize(
    "recipe", ["tests.support.varied:pythonic", "tests.support.varied:averaged", "tests.support.varied:streamed"]
)
def test_draws_between_two_steps_do_not_change_training(tmp_path: Path, recipe: str) -> None:
    quiet, disturbed = trained(tmp_path, recipe, lambda: None), trained(tmp_path, recipe, draw)
    assert differences(*(state.to_payload(capturing.capture(each)) for each in (quiet, disturbed))) == []
    assert read_lines(quiet) == read_lines(disturbed)


def test_an_evaluation_draws_from_a_copy_of_trainings_states(tmp_path: Path) -> None:
    training = make(tmp_path, "tests.support.varied:pythonic")
    train_to(training, 2)
    before = training.generators.digest()
    with training.generators.borrowed():
        first = random.random(), np.random.random(), torch.rand(())
        draw()
    with training.generators.borrowed():
        assert first == (random.random(), np.random.random(), torch.rand(()))
    with training.generators.borrowed(7):
        draw()
    assert training.generators.digest() == before


def test_separated_threads_do_not_advance_the_training_threads_generator() -> None:
    done = subprocess.run([sys.executable, "-c", SEPARATED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], True, True]


class Gpus:
    """The generators of a machine's GPUs, as torch has them: 8 bytes of the seed, then 8 of how far they were drawn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, own: int = 0, seed: int = 3) -> None:
        self.states = [torch.tensor([seed, 0]).view(torch.uint8) for _ in range(count)]
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda number: self.states[number].clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, number: self.states[number].copy_(state))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: own)
        monkeypatch.setattr(generators, "_has_gpus", True)

    def draw(self, number: int) -> None:
        self.states[number].view(torch.int64)[1] += 4

    @property
    def drawn(self) -> list[int]:
        return [int(state.view(torch.int64)[1]) for state in self.states]


@pytest.mark.parametrize(("count", "own"), [(1, 0), (2, 0), (2, 1), (8, 5)])
def test_the_state_of_a_ranks_gpu_is_the_same_among_any_number_of_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, own: int
) -> None:
    """A GPU that only other ranks draw from is no part of this rank's state."""
    Gpus(monkeypatch, 4, own=3).draw(3)
    saved = capture_rng()
    gpus = Gpus(monkeypatch, count, own, seed=8)
    held = state.Generators()
    held.load_state_dict(saved)
    with held.training():
        assert gpus.drawn == [4 * (number == own) for number in range(count)]
    assert differences(*(state.to_payload(each) for each in (saved, held.state_dict()))) == []
    assert held.digest() == state.digest_rng(saved)


def test_every_gpu_that_a_process_draws_from_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, 3, own=1)
    gpus.draw(2)
    saved = capture_rng()
    for number in range(3):
        gpus.draw(number)
    state.restore_rng(saved)
    assert gpus.drawn == [0, 0, 4]
    Gpus(monkeypatch, 1)
    state.restore_rng(saved)


def test_a_run_moves_between_a_gpu_and_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = state.Generators()
    gpus = Gpus(monkeypatch, 2)
    gpus.draw(0)
    on_gpu = state.Generators()
    from_cpu, from_gpu = on_cpu.state_dict(), on_gpu.state_dict()
    on_gpu.load_state_dict(from_cpu)
    assert len(on_gpu.state_dict()["cuda"]) == 1
    on_cpu.load_state_dict(from_gpu)
    assert on_cpu.state_dict()["cuda"] == []


def test_a_run_on_a_cpu_leaves_the_gpus_of_its_machine_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    training = make(tmp_path, "tests.support.varied:averaged")
    assert training.generators.state_dict()["cuda"] == []


@pytest.mark.slow
def test_threads_that_draw_during_a_step_change_no_byte(nursery: Lives, tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    ends = []
    for noise in ("", "yes"):
        config = RunConfig(recipe="noisy:build", run=f"noise{noise}", store=str(tmp_path), chunk=ChunkLength(steps=4))
        settings, environment = config.model_dump(mode="json"), {"PYTHONPATH": str(tmp_path), "NOISE": noise}
        done = nursery.call("tests.support.forked:train_chunks", settings, 2, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        newest = Journal(open_store(config.store), config.run).newest()
        assert newest is not None
        ends.append((newest.step, newest.checkpoint_sha256))
    assert ends[0] == ends[1]
    assert ends[0][0] == STEPS


@pytest.mark.parametrize("made", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_a_restored_generator_spawns_what_the_saved_one_would_have_spawned(made: Any) -> None:
    """NumPy's own state of a generator lacks the number of generators that it has spawned."""
    saved = np.random.Generator(made(3))
    built = state.read_generator(saved)
    assert "spawned" not in built
    saved.spawn(2)
    known = state.read_generator(saved)
    for restored in (np.random.Generator(made(3)), saved):
        restored.spawn(restored is saved)
        state.write_generator(restored, known)
        assert restored.spawn(1)[0].random() == np.random.Generator(made(3)).spawn(3)[2].random()
    state.write_generator(saved, built)
    assert saved.spawn(1)[0].random() == np.random.Generator(made(3)).spawn(1)[0].random()


class OnGpu(torch.Generator):
    """A generator that says it is on a GPU if it is made there, and computes on the CPU."""

    def __new__(cls, device: str = "cpu") -> "OnGpu":
        return super().__new__(cls)

    def __init__(self, device: str = "cpu") -> None:
        self.on = torch.device(device)

    @property
    def device(self) -> torch.device:
        return self.on


OnGpu.__module__, OnGpu.__name__ = torch.Generator.__module__, torch.Generator.__name__


@pytest.mark.parametrize("built", ["nothing", "a generator on the CPU"])
def test_a_generator_made_on_a_gpu_after_keep_is_made_there_again(monkeypatch: pytest.MonkeyPatch, built: str) -> None:
    monkeypatch.setitem(generators.KINDS, OnGpu, generators.KINDS[torch.Generator])
    monkeypatch.setattr(torch, "Generator", OnGpu)

    def build() -> tuple[dict[str, Any], Any]:
        kept = {} if built == "nothing" else {"generator": OnGpu()}
        return kept, state.as_stateful("kept", kept)

    kept, stateful = build()
    kept["generator"] = OnGpu("cuda").manual_seed(7)
    saved = state.from_payload(state.to_payload(stateful.state_dict()))
    again, restored = build()
    restored.load_state_dict(saved)
    assert (again["generator"].device, again["generator"].initial_seed()) == (torch.device("cuda"), 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_generator_of_a_missing_device_is_refused() -> None:
    with pytest.raises(StateError, match="on the device 'cuda', which this machine doesn't have"):
        generators.make_generator({"kind": "torch.Generator", "device": "cuda"})


DRAWS = {
    "random.random": random.random,
    "random.gauss": random.gauss,
    "random.seed": lambda: random.seed(random.random()),
    "np.random.random": np.random.random,
    "np.random.standard_normal": np.random.standard_normal,
    "np.random.seed": lambda: np.random.seed(np.random.randint(2**31)),
    "torch.rand": lambda: torch.rand(()),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_training_sees_each_draw_and_undoes_those_between_its_steps(draw: str) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = state.Generators()
    digests, before = [found.digest()], capture_rng()
    for number in range(6):
        with found.training():
            assert state.digest_rng(capture_rng()) == digests[-1], "draws between steps are undone"
            if number != 3:
                DRAWS[draw]()
            after = capture_rng()
        assert found.digest() == state.digest_rng(found.state_dict()) == state.digest_rng(after)
        assert (found.digest() == digests[-1]) == (number == 3)
        digests.append(found.digest())
        DRAWS[draw]()
    found.load_state_dict(before)
    with found.training():
        assert state.digest_rng(capture_rng()) == digests[0] == found.digest()


def test_the_memory_of_generators_can_be_read_here() -> None:
    """Otherwise each step takes a quarter of a millisecond longer."""
    assert generator_memory.read_python() is not None
    assert generator_memory.read_numpy() is not None

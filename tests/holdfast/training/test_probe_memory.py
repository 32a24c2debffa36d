"""A probe needs no memory of the device that a step doesn't need, and a lack of memory shows after the first step."""

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast import Recipe
from holdfast.checkpoint import Payload
from holdfast.config import Determinism
from holdfast.errors import GateTripped
from holdfast.state import as_stateful
from holdfast.training import Gate, Training, capturing, resume, resuming
from holdfast.training.probing import has_noise
from holdfast.training.undisturbed import undisturbed
from tests.support import trainings
from tests.support.pretended import GPU
from tests.support.trainings import save_state, train_to

MIB = 2**18  # as a number of float32


class Live(TorchDispatchMode):
    """The most bytes on the pretended GPU that were alive at once, beside those of tensors that were there before."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.most = 0
        self._before = {StorageWeakRef(each.untyped_storage()) for each in before}
        self._found: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.device == GPU:
                storage = each.untyped_storage()
                self._found[StorageWeakRef(storage)] = storage.nbytes()
        alive = {ref: size for ref, size in self._found.items() if ref not in self._before and not ref.expired()}
        self.most = max(self.most, sum(alive.values()))
        return found


class Averages(nn.Module):
    """A model with a large buffer, which no step copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device=GPU)
        self.register_buffer("average", torch.empty(4 * MIB, device=GPU))
        self.other = nn.Parameter(torch.empty(4 * MIB, device=GPU))  # another optimizer's


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_copies_for_a_probe_are_in_the_hosts_memory_and_come_back_to_the_device() -> None:
    with FakeTensorMode():
        model = Averages()
        average = {"weights": [torch.empty(4 * MIB, device=GPU), torch.empty(4 * MIB, device=GPU)]}
        extras = {"average": as_stateful("average", average)}
        training: Any = SimpleNamespace(recipe=SimpleNamespace(extras=extras))
        known = [*model.parameters(), *model.buffers(), *average["weights"]]
        with Live(known) as live, undisturbed(model, torch.optim.SGD(model.layer.parameters())):
            put_back = capturing.copy_extras(training)
            assert live.most < MIB
            average["weights"][0] = average["weights"][0].cpu()
            put_back()
        assert [each.device for each in average["weights"]] == [GPU, GPU]
        assert {each.device for each in (*model.parameters(), *model.buffers())} == {GPU}


# ---- a recipe on the CPU


class Failing:
    """A loss that raises as a GPU without free memory does, in given calls."""

    calls = 0
    fails_in: tuple[int, ...] = ()

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        type(self).calls += 1
        if self.calls in self.fails_in:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(x).square().sum()  # type: ignore[no-any-return]


def recipe(noisy: bool = False) -> Recipe:
    model: nn.Module = nn.Linear(2, 2)
    noise = Noisy.apply
    loss: Any = (lambda model, x: noise(model(x)).square().sum()) if noisy else Failing()
    return Recipe(
        model=model, data=list(torch.eye(2)), optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=1,
        steps_per_epoch=8, loss=loss,
    )  # fmt: skip


class Noisy(torch.autograd.Function):
    """A kernel whose gradient differs in its last bits, each time that it is computed."""

    calls = 0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        Noisy.calls += 1
        return gradient * (1 + 2**-20 * Noisy.calls)


def make(folder: Path, **settings: Any) -> Training:
    return trainings.make(folder, f"{__name__}:recipe", **settings)


def test_a_probe_that_runs_out_of_memory_frees_memory_and_tries_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = list[int]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    training = make(tmp_path)
    train_to(training, 2)
    before = Failing.calls
    monkeypatch.setattr(Failing, "fails_in", (before + 1,))
    probe = resuming.measure_probe(training)
    assert (freed, bool(probe.gradient)) == ([1], True)
    monkeypatch.setattr(Failing, "fails_in", range(Failing.calls + 1, Failing.calls + 9))
    with pytest.raises(torch.OutOfMemoryError):
        resuming.measure_probe(training)
    assert freed == [1, 1]


def test_on_a_gpu_the_probe_is_measured_right_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[int]()
    monkeypatch.setattr("holdfast.training.probing._measure", lambda each, by: measured.append(each.progress.step))
    for device in ("cpu", "cuda"):
        training = make(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(type(training.accelerator), "device", torch.device(device))
            patched.setattr(torch.accelerator, "synchronize", lambda: None)
            patched.setattr("holdfast.training.build.send_to_device", lambda batch, device: batch)
            patched.setattr("holdfast.training.probing.has_noise", lambda training: False)
            patched.setattr(torch, "zeros", lambda *size, device=None, zeros=torch.zeros: zeros(*size))
            train_to(training, 3)
        assert measured == ([1] if device == "cuda" else [])


def test_the_payload_is_freed_before_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make(tmp_path)
    train_to(training, 2)
    saved = [*save_state(training, tmp_path)]
    metadata: Any = saved.pop()
    refs: list[Any] = [weakref.ref(saved[0])]
    decode, measure = capturing.decode, resuming.measure_probe

    def decode_noted(payload: Payload) -> dict[str, Any]:
        found = decode(payload)
        refs.extend(map(weakref.ref, found["model"].values()))
        return found

    def check(*arguments: Any) -> Any:
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        return measure(*arguments)

    monkeypatch.setattr(capturing, "decode", decode_noted)
    monkeypatch.setattr(resuming, "measure_probe", check)
    resume(make(tmp_path), saved.pop(), metadata, Gate(), lambda done, total: None)  # type: ignore[arg-type]
    assert len(refs) == 3


# ---- kernels that don't repeat their bits


def make_strict(folder: Path, **settings: Any) -> Training:
    training = make(folder, **settings)
    training.config = training.config.model_copy(update={"determinism": Determinism()})
    return training


def test_a_noisy_kernel_is_found_after_the_first_step_and_named_by_the_gate(tmp_path: Path) -> None:
    training = make_strict(tmp_path, noisy=True)
    train_to(training, 1)
    assert has_noise(training)
    saved = save_state(training, tmp_path)
    with pytest.raises(GateTripped, match="computed twice it differs, too: an operation in the loss or its backward"):
        resume(make(tmp_path, noisy=True), *saved, Gate(), lambda done, total: None)
    quiet = make_strict(tmp_path)
    train_to(quiet, 1)
    assert not has_noise(quiet)


# ---- outputs that the next pass overwrites, as with torch.compile's "reduce-overhead"


class Graphed(nn.Module):
    """A model that writes each output to the same memory, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        graph.resize_(found.shape).copy_(found.detach())
        return graph if not torch.is_grad_enabled() else found  # type: ignore[no-any-return]


graph = torch.empty(0)


def graphed() -> Recipe:
    model = Graphed()
    return Recipe(
        model=model, data=list(torch.eye(2)), optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=1,
        steps_per_epoch=8, loss=lambda model, x: (model(x) - model(2 * x)).square().sum() + model(x).sum(),
    )  # fmt: skip


def test_outputs_are_read_before_the_next_pass_overwrites_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trainings.make(tmp_path, f"{__name__}:graphed")
    monkeypatch.setattr("holdfast.training.probing.is_on_device", lambda tensor: True)
    monkeypatch.setattr("holdfast.training.probing.clone_on_host", lambda tensor: tensor.detach().clone())
    probe = resuming.measure_probe(training)
    x = training.probe_batch()
    with torch.no_grad():
        outputs = [training.model.layer(each) for each in (x, 2 * x, x)]  # type: ignore[operator,union-attr]
    assert probe.sample[1:] == [float(each) for each in torch.cat(outputs).flatten()]

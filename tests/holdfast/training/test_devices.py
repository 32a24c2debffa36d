"""A training on a GPU mixes no tensors of the GPU with others, and its ranks exchange none of the host's memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from holdfast.training import objects
from holdfast.training.capturing import capture
from holdfast.training.cooperation import SeparateRanks
from holdfast.training.probing import SAMPLE_NUMBERS, measure_probe
from tests.support.lives import Lives
from tests.support.trainings import make

META = torch.device("meta")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "ranks", "shares"),
    [
        ("toy:toy", 1, 0),
        ("numbered:numbered", 1, 0),
        ("varied:normalised", 1, 0),
        ("failing:failing", 1, 0),
        ("shares:averaged", 1, 8),
        ("shares:averaged", 2, 8),
        ("vanishing:vanishing", 3, 8),
    ],
)
def test_a_step_on_a_gpu_mixes_no_devices(nursery: Lives, recipe: str, ranks: int, shares: int) -> None:
    done = nursery.call("tests.support.pretended:train", f"tests.support.{recipe}", ranks, shares)
    assert done.returncode == 0, done.stderr


def test_the_state_is_read_after_all_that_the_program_has_queued(
    same_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make(tmp_path, "tests.support.toy:toy")
    weight = next(training.model.parameters())
    queued: list[float] = []  # what streams of the program's own are going to write
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: weight.data.fill_(queued.pop()) if queued else None)
    monkeypatch.setitem(training.accelerator.state.__dict__, "device", META)
    queued.append(7.0)
    assert any(bool((each == 7.0).all()) for each in capture(training)["model"].values())
    resume = training.config.resume.model_copy(update={"training_probe": False})
    monkeypatch.setattr(training, "config", training.config.model_copy(update={"resume": resume}))
    training.recipe.probe = lambda model: {"weight": weight.detach().clone()}
    queued.append(8.0)
    assert measure_probe(training).sample == [8.0] * min(weight.numel(), SAMPLE_NUMBERS)


@pytest.mark.parametrize("share", [SeparateRanks.share_buffers, SeparateRanks.share_saved_buffers])
def test_a_buffer_goes_through_a_group_that_can_send_from_its_device(
    monkeypatch: pytest.MonkeyPatch, share: Any
) -> None:
    sent: dict[str, Any] = {}
    monkeypatch.setattr(objects, "_find_group", lambda: "gloo")
    monkeypatch.setattr(distributed, "broadcast", lambda each, _, group: sent.update({each.device.type: group}))
    module = nn.Module()
    module.register_buffer("here", torch.ones(2))
    module.register_buffer("there", torch.ones(2, device=META))
    accelerator = type("Two", (), {"num_processes": 2, "process_index": 0, "device": META})()
    share(SeparateRanks(accelerator), module)
    assert sent == {"cpu": "gloo", "meta": None}, "NCCL sends no memory of the host"

"""Memory for checkpoints is allocated and pinned once, and never given to two users."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.checkpoint import Saver
from holdfast.memory import Buffers
from holdfast.memory.pinning import pinning
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS
from tests.support.parts import PART_BYTES, PARTS, STATE


def test_memory_is_allocated_once_and_reused(folder: LocalStore) -> None:
    buffers = Buffers()
    first = buffers.take(0, 3 * 2**20)
    first[:4] = b"mark"
    assert bytes(buffers.take(0, 2**20)[:4]) == b"mark"
    assert bytes(buffers.take(1, 2**20)[:4]) == bytes(4)
    assert bytes(buffers.take(0, 4 * 2**20)[:4]) == bytes(4)  # there was too little of it


def test_lent_memory_is_not_reused_while_referenced() -> None:
    buffers = Buffers()
    lent = buffers.lend(0, 2**20)
    lent[:4] = b"mark"
    part = torch.frombuffer(lent[:8], dtype=torch.uint8)[:4]
    del lent
    assert bytes(buffers.take(0, 2**20)[:4]) == bytes(4)
    assert bytes(part.tolist()) == b"mark"
    buffers.lend(0, 2**20)[:4] = b"next"
    assert bytes(buffers.take(0, 2**20)[:4]) == b"next"
    assert len(buffers.lend(1, 0)) == 0


def test_memory_is_pinned_once(folder: LocalStore) -> None:
    pinned = list[int]()
    buffers = Buffers()
    buffers.take(0, 2**20)
    for size_bytes in (2**20, 2**19, 2**20, 2**21, 2**21):
        buffers.take(0, size_bytes, lambda memory: pinned.append(len(memory)))
    assert pinned == [2**20, 2**21]
    Saver(PART_BYTES, pin=lambda memory: pinned.append(len(memory))).begin(
        folder, to_payload(STATE), METADATA_FIELDS, ""
    )
    assert len(pinned) == 2 + len(PARTS)


def test_memory_that_cannot_be_pinned_is_still_used(caplog: pytest.LogCaptureFixture) -> None:
    assert pinning(torch.device("cpu")) is None
    pin = pinning(torch.device("cuda", 9))  # there is none, here or anywhere
    memory = Buffers().take(0, 2**20, pin)
    memory[:4] = b"mark"
    assert "1,048,576 bytes for checkpoints can't be pinned" in caplog.text


@pytest.mark.parametrize(("device", "number"), [("cuda", 2), ("cuda:1", 1)])
def test_memory_is_pinned_for_the_ranks_own_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, number: int
) -> None:
    """A single rank's device has no number, which `torch.cuda.set_device` refuses."""
    chosen, pinned = list[int](), list[int]()
    cudart = SimpleNamespace(cudaHostRegister=lambda address, size, flags: pinned.append(size) or 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    Buffers().take(0, 2**20, pinning(torch.device(device)))
    assert (chosen, pinned, caplog.text) == ([number], [2**20], "")

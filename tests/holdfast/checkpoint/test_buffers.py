"""Memory for checkpoints is allocated and pinned once, and never given to two users."""

import contextlib
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.checkpoint import CheckpointSave, Payload, Saver, Tensor, checkpoint_save
from holdfast.memory import WITHOUT_VARIABLE, Buffers
from holdfast.memory.pinning import pinning
from holdfast.state import to_payload
from holdfast.state.tensors import TensorBytes
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


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Replace the CUDA runtime. Return the sizes of the memory that is pinned now, by address."""
    found: dict[int, int] = {}

    def register(address: int, size_bytes: int, flags: int) -> int:
        assert not any(first < address + size_bytes and address < first + size for first, size in found.items())
        found[address] = size_bytes
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: found.pop(address) and 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    return found


class OnDevice(TensorBytes):
    """The bytes of a tensor, as if the tensor were on a GPU."""

    is_on_host = False

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.address = 0

    def __getitem__(self, piece: slice) -> TensorBytes:
        return OnDevice(super().__getitem__(piece).tensor)


def on_device(payload: Payload, *names: str) -> Payload:
    moved = {
        name: Tensor(each.dtype, each.shape, (OnDevice(each.pieces[0].tensor),))  # type: ignore[union-attr]
        for name, each in payload.tensors.items()
        if name in names
    }
    return Payload({**payload.tensors, **moved}, payload.tree)


def test_a_growing_state_keeps_little_more_than_itself_pinned(pinned: dict[int, int]) -> None:
    buffers, pin, first_bytes = Buffers(), pinning(torch.device("cuda", 0)), 2**22
    assert pin is not None
    sizes = [first_bytes + 5_000 * number for number in range(100)]
    addresses = set[int]()
    for size_bytes in sizes:
        addresses.add(torch.frombuffer(buffers.take(0, size_bytes), dtype=torch.uint8).data_ptr())
        buffers.pin([0], pin)
    assert sizes[-1] <= sum(pinned.values()) <= 1.25 * sizes[-1]
    assert len(addresses) <= 3  # pinning is slow, so not at each save
    del buffers
    assert not pinned  # otherwise the GPU's driver would go on to use memory that is unmapped


def test_a_save_pins_after_its_copy_and_only_parts_that_come_from_a_device(
    pinned: dict[int, int], folder: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "priority")
    saver = Saver(PART_BYTES, pin=pinning(torch.device("cuda", 0)))
    payload = to_payload(STATE)
    large = max(payload.tensors, key=lambda name: payload.tensors[name].size_bytes)
    stall = dict[int, int]()
    copy_out = checkpoint_save.copy_out
    monkeypatch.setattr(checkpoint_save, "copy_out", lambda *arguments: (copy_out(*arguments), stall.update(pinned)))
    saver.begin(CheckpointSave(folder, on_device(payload, large), METADATA_FIELDS, "", is_urgent=False))
    saver.wait()
    assert (stall, 0 < len(pinned) < len(PARTS)) == ({}, True)
    pinned.clear()
    again = Saver(PART_BYTES, pin=pinning(torch.device("cuda", 0)))
    again.begin(CheckpointSave(folder, on_device(payload, large), METADATA_FIELDS, ""))  # the last save of its process
    again.wait()
    assert not pinned


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system copies all memory at a fork")
def test_a_forked_loader_gets_no_memory_of_a_save_but_all_restored_tensors() -> None:
    buffers = Buffers()
    ours = torch.frombuffer(buffers.take(0, 2**20), dtype=torch.uint8).data_ptr()
    lent = torch.frombuffer(buffers.lend(1, 2**20), dtype=torch.uint8)
    again = torch.frombuffer(buffers.lend(0, 2**20), dtype=torch.uint8)
    assert again.data_ptr() == ours
    saved = torch.frombuffer(buffers.take(2, 2**20), dtype=torch.uint8).data_ptr()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            starts = {int(line.partition("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()}
            os.write(writer, bytes([saved in starts, int(lent[-1]), int(again[-1])]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 3) == bytes(3)
    os.close(reader)
    os.close(writer)


def test_memory_that_cannot_be_pinned_is_still_used(caplog: pytest.LogCaptureFixture) -> None:
    assert pinning(torch.device("cpu")) is None
    pin = pinning(torch.device("cuda", 9))  # there is none, here or anywhere
    assert pin is not None
    buffers = Buffers()
    memory = buffers.take(0, 2**20)
    buffers.pin([0], pin)
    memory[:4] = b"mark"
    assert "1,048,576 bytes for checkpoints can't be pinned" in caplog.text


@pytest.mark.parametrize(("device", "number"), [("cuda", 2), ("cuda:1", 1)])
def test_memory_is_pinned_for_the_ranks_own_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, number: int
) -> None:
    """A single rank's device has no number, which `torch.cuda.set_device` refuses."""
    chosen, pinned = list[int](), list[int]()
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.append(size) or 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    buffers, pin = Buffers(), pinning(torch.device(device))
    assert pin is not None
    buffers.take(0, 2**20)
    buffers.pin([0, 0], pin)
    assert (chosen, pinned, caplog.text) == ([number], [2**20], "")

"""Tensors on a device and non-contiguous tensors are saved as the same bytes."""

from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint import CheckpointSave, Saver, differences, serialize
from holdfast.state import from_payload, tensors, to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS, commit_of
from tests.support.parts import PART_BYTES, STATE, save


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine treat CPU tensors like a GPU's; torch copies both in the same way."""

    monkeypatch.setattr(tensors, "_address_of", lambda tensor: 0)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("part_bytes", [PART_BYTES, 2**28], ids=["parts", "one"])
def test_tensors_on_a_device_are_copied_when_a_save_begins(folder: LocalStore, part_bytes: int) -> None:
    state = STATE | {"model": {name: tensor.clone() for name, tensor in STATE["model"].items()}, "empty": torch.ones(0)}
    saver = Saver(part_bytes)
    payload = to_payload(state)
    pieces: Any = [tensor.pieces[0] for name, tensor in payload.tensors.items() if name != "empty"]
    assert {piece.address for piece in pieces} == {0}
    saver.begin(CheckpointSave(folder, payload, METADATA_FIELDS, ""))
    for tensor in state["model"].values():
        tensor.zero_()
    saved = saver.wait()
    assert saved is not None
    read = checkpoint.read_payload(folder, commit_of(saved))
    assert differences(to_payload(STATE | {"empty": torch.ones(0)}), read) == []
    assert "model.norm" in differences(to_payload(state), read)
    assert torch.equal(from_payload(to_payload(STATE))["model"]["embedding"], STATE["model"]["embedding"])


def test_non_contiguous_tensors_are_saved_row_major(folder: LocalStore) -> None:
    numbers = torch.complex(torch.rand(9), torch.rand(9))
    state = {
        "transposed": torch.arange(64_000.0).reshape(64, 1000).T,  # of several parts
        "column": torch.arange(6.0).reshape(3, 2)[:, 1],
        "conjugate": numbers.conj(),
        "negative": numbers[:1].conj().imag,  # of one number, so that it is in one piece
        "trained": torch.ones(3, requires_grad=True),
        "image": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    saver = Saver(PART_BYTES)
    saver.begin(CheckpointSave(folder, to_payload(state), METADATA_FIELDS, ""))
    saved = saver.wait()
    assert saved is not None
    found = from_payload(checkpoint.read_payload(folder, commit_of(saved)))
    assert all(torch.equal(found[name], tensor.detach()) for name, tensor in state.items())


@pytest.mark.usefixtures("on_device")
def test_tensors_on_a_device_give_the_same_bytes(folder: LocalStore) -> None:
    saved = save(folder)
    assert saved.metadata.checkpoint_sha256 == "ac03b2cf33f64cdd5b75581da28143cddaf656d4ec4dc2cffde0ffc135781293"
    assert b"".join(serialize(to_payload(STATE))) == b"".join(
        serialize(checkpoint.read_payload(folder, commit_of(saved)))
    )

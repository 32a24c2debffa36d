"""Optimizations that are turned off are not used, and the bytes stay the same."""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import save
from holdfast.cli import app, run_app
from holdfast.errors import ConfigError
from holdfast.memory import WITHOUT_VARIABLE, Buffers, Priority, direct, is_on, map_memory
from holdfast.memory.pinning import pinning
from holdfast.memory.switches import NAMES
from holdfast.state import to_payload
from holdfast.store.local import LocalStore
from tests.support.makers import METADATA_FIELDS

BYTES = 4 * 2**20
SHA256 = "c59a4686df5f951ce45d896a7de4320661463eeb659bf49f684712a2ca313214"


def test_every_optimization_is_on_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WITHOUT_VARIABLE, raising=False)
    assert all(map(is_on, NAMES))
    monkeypatch.setenv(WITHOUT_VARIABLE, "direct, buffers,")
    assert [name for name in NAMES if not is_on(name)] == ["buffers", "direct"]


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "direct,speed")
    with pytest.raises(ConfigError, match="there is no optimization 'speed'") as raised:
        is_on("direct")
    assert "pinning" in raised.value.hint


def test_a_command_refuses_an_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "speed")
    assert run_app(app, ["list", str(tmp_path)]) == 1
    assert "HOLDFAST_WITHOUT: there is no optimization 'speed'" in capsys.readouterr().err


def test_without_buffers_each_save_gets_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "buffers")
    buffers, pinned = Buffers(), list[int]()
    buffers.take(0, BYTES)[:4] = b"mark"
    assert bytes(buffers.take(0, BYTES)[:4]) == bytes(4)
    buffers.pin([0], lambda memory: pinned.append(len(memory)))
    assert pinned == []  # the next save gets other memory


def test_without_direct_files_go_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "direct")
    modes = list[bool]()
    monkeypatch.setattr(direct, "_switch", lambda file, *, on: modes.append(on))
    data = memoryview(map_memory(BYTES))
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    direct.write_direct(descriptor, 0, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    assert [*direct.fill(descriptor, data)][-1] == BYTES
    assert modes == []
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct.O_DIRECT
    os.close(descriptor)


def test_without_priority_a_saves_priority_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, "priority")
    monkeypatch.setattr(os, "setpriority", lambda *arguments: pytest.fail("its priority was changed"))
    Priority().lower()


def test_without_pinning_memory_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert pinning(torch.device("cuda")) is not None
    monkeypatch.setenv(WITHOUT_VARIABLE, "pinning")
    assert pinning(torch.device("cuda")) is None


@pytest.mark.parametrize("without", ["", *NAMES])
def test_no_optimization_changes_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, without)
    state = {"model": {"weight": torch.arange(BYTES // 4, dtype=torch.float32)}, "step": 3}
    saved = save(LocalStore(str(tmp_path)), to_payload(state), METADATA_FIELDS, "")
    assert saved.metadata.checkpoint_sha256 == SHA256


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="there are no huge pages to ask for")
@pytest.mark.parametrize("without", ["", "huge pages"])
def test_huge_pages_are_requested_unless_they_are_turned_off(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setenv(WITHOUT_VARIABLE, without)
    asked = list[int]()

    class Memory(mmap.mmap):
        def madvise(self, option: int, *range_of: Any) -> None:
            asked.append(option)

    monkeypatch.setattr(mmap, "mmap", Memory)
    map_memory(BYTES)
    assert asked == ([] if without else [mmap.MADV_HUGEPAGE])

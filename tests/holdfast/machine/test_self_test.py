"""The self-test finds a device that computes wrong numbers, blames no other one, and leaves training as it was."""

import logging
import platform
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.attempt.lineage import Past, Present, judge_self_test
from holdfast.config import Compute
from holdfast.errors import SelfTestFailed
from holdfast.journal.endings import ending_of
from holdfast.machine import determinism
from holdfast.machine.environment import describe_environment
from holdfast.machine.self_test import KEY, SelfTest, find_fault, refuse, run_self_test
from holdfast.testing.faults import flip
from tests.conftest import Engine, Reference, assert_same_bytes
from tests.support.device import DEVICE
from tests.support.lives import Lives
from tests.support.shares import write_config

STARTS = 50
HERE = SelfTest("node-3", "node-3, GPU 0", "H100", "right", "flags")
AGAIN = "gave other bits when it computed the same again (matmul)"


@pytest.fixture
def strict() -> Iterator[None]:
    """Let torch refuse operations without a deterministic algorithm, as a rank does."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode(before)


def test_a_healthy_device_never_fails(strict: None) -> None:
    tests = [run_self_test(DEVICE) for _ in range(STARTS)]
    assert find_fault(tests) == ""
    assert len({*tests}) == 1


def test_a_flipped_bit_is_found(strict: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in flip(0, tmp_path / "struck").items():
        monkeypatch.setenv(name, value)
    wrong, right = run_self_test(DEVICE), run_self_test(DEVICE)
    assert find_fault([wrong]) == f"the self-test failed: {wrong.where} {AGAIN}"
    assert right == replace(wrong, differing=())
    monkeypatch.setenv("HOLDFAST_FLIP", f"1:{tmp_path}/not-this-rank")
    assert run_self_test(DEVICE) == right


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_a_self_test_changes_nothing_of_a_training(mode: str, strict: None) -> None:
    torch.set_deterministic_debug_mode(mode)

    def look() -> Any:
        return torch.get_rng_state().tolist(), random.getstate(), determinism.read_flags(), torch.is_grad_enabled()

    before = look()
    with torch.no_grad():
        run_self_test(DEVICE)
    assert look() == before


def test_a_self_test_does_not_depend_on_a_default_dtype(strict: None) -> None:
    right = run_self_test(DEVICE)
    torch.set_default_dtype(torch.float64)
    try:
        other = run_self_test(DEVICE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (other.sha256, other.differing) == (right.sha256, ())
    assert other.flags != right.flags


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ([], []),
        ([HERE], []),
        ([HERE, replace(HERE, sha256="wrong")], [2]),
        ([replace(HERE, sha256="wrong")], [0, 1]),  # nobody knows which of the two
        ([replace(HERE, sha256="other", model="A100")], []),
        ([replace(HERE, sha256="other", host="node-4")], []),
        ([replace(HERE, sha256="other", flags="others")], []),
        ([replace(HERE, differing=("sum",), sha256="wrong")], [1]),
    ],
)
def test_a_device_that_differs_from_others_like_it_is_named(others: list[SelfTest], named: list[int]) -> None:
    fault = find_fault([HERE, *others])
    assert [number for number in range(1 + len(others)) if f"rank {number} on " in fault] == named


def environment(host: str, sha256: str, **changed: Any) -> dict[str, Any]:
    own = {"host": host, "where": host, "sha256": sha256, "flags": "flags"}
    known = describe_environment() | {"cpu_family": "made up", "onednn": "3", "mkl": "2025"}
    return known | {KEY: own, "deterministic": True} | changed


def judge(saved: dict[str, Any], current: dict[str, Any], compute: Compute) -> None:
    past = Past(None, "", None, saved)  # type: ignore[arg-type]  # the commit isn't read
    judge_self_test(past, Present({}, {}, current), compute)


def test_other_bits_than_another_host_gave_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        judge(environment("node-3", "a" * 64), environment("node-4", "b" * 64), Compute())
    (line,) = caplog.messages
    assert line.startswith("self-test: node-4 gives other bits than node-3 gave")


def test_other_bits_than_the_same_host_gave_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    saved, current = environment("node-3", "a" * 64), environment("node-3", "b" * 64)
    with pytest.raises(SelfTestFailed, match="node-3 gives other bits than node-3 gave"):
        judge(saved, current, Compute())
    judge(saved, current, Compute(gpu_health="warn"))
    judge(saved, environment("node-3", "b" * 64, driver="580"), Compute())
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    "current",
    [
        environment("node-3", "a" * 64),
        environment("node-3", "b" * 64, torch="another"),
        environment("node-3", "b" * 64, deterministic=False),
        {name: value for name, value in environment("node-3", "b" * 64).items() if name != KEY},
    ],
)
def test_self_tests_that_are_equal_or_not_comparable_say_nothing(
    current: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    judge(environment("node-3", "a" * 64), current, Compute())
    assert caplog.messages == []


def test_supervision_starts_another_attempt() -> None:
    ending = ending_of(refuse("the self-test failed: node-3"))
    assert (ending.reason, ending.row.spends, SelfTestFailed.exit_code) == ("self_test_failed", "max_failures", 3)


@pytest.mark.slow
def test_a_wrong_machine_never_begins(engine: Engine, reference: Reference) -> None:
    struck = engine.folder / "struck"
    refused = engine.run(**flip(0, struck))
    assert refused.returncode == 3
    error, hint = [line for line in refused.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert error.startswith(f"error: the self-test failed: {platform.node()}")
    assert error.endswith(AGAIN)
    assert "compute.gpu_health=warn" in hint
    assert "Traceback" not in refused.stderr
    assert not (engine.run_folder / "attempts").exists()
    engine.finish()
    assert_same_bytes(engine, reference)
    assert engine.journal().read_attempt(1).environment[KEY]["host"] == platform.node()


@pytest.mark.slow
def test_a_wrong_machine_trains_if_it_is_told_to(engine: Engine) -> None:
    trained = engine.run("epochs=1", "compute.gpu_health=warn", **flip(0, engine.folder / "struck"))
    assert trained.returncode == 0, trained.stderr
    assert f'{AGAIN}; compute.gpu_health = "warn" trains anyway' in trained.stderr


@pytest.mark.slow
@pytest.mark.gpus(2)
def test_the_rank_with_the_wrong_device_is_named(nursery: Lives, tmp_path: Path) -> None:
    path = write_config(tmp_path, 2, 1)
    refused = nursery.call("tests.support.forked:train", path, [], **flip(1, tmp_path / "struck"))
    assert refused.returncode == 3
    assert "error: the self-test failed: rank 1 on " in refused.stderr
    assert "rank 0" not in refused.stderr
    assert not (tmp_path / "r" / "attempts").exists()

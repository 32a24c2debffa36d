"""The self-test finds a device that computes wrong numbers, blames no other one, and leaves training as it was."""

import platform
import random
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch

from holdfast.attempt.lineage import Past, Present, judge_self_test
from holdfast.config import Compute
from holdfast.errors import SelfTestFailed
from holdfast.journal import Journal
from holdfast.journal.endings import ending_of
from holdfast.machine import determinism
from holdfast.machine.environment import describe_environment
from holdfast.machine.self_test import KEY, SelfTest, compare_with_records, find_fault, refuse, run_self_test
from holdfast.rank import description
from holdfast.store.memory import MemoryStore
from holdfast.testing.faults import fault, flip
from tests.conftest import IS_SOAK, Engine, Reference, assert_same_bytes
from tests.support.device import DEVICE
from tests.support.lives import Lives
from tests.support.shares import write_config

STARTS = 50 if IS_SOAK else 8
HERE = SelfTest("node-3", "node-3, GPU 0", "H100", "right", "flags")
OTHER_BITS = f"{platform.node()} gives different bits than {platform.node()} gave"
AGAIN = "gave different bits when it computed the same again (matmul)"


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


def test_a_bit_that_is_always_wrong_is_found_beside_other_devices(
    strict: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run_self_test(DEVICE)
    monkeypatch.setenv("HOLDFAST_FLIP", flip(0)["HOLDFAST_FLIP"])
    wrong = run_self_test(DEVICE)
    assert (wrong.differing, find_fault([wrong])) == ((), "")
    fault = find_fault([right, right, wrong])
    assert fault == (
        f"the self-test failed: rank 2 on {wrong.where} gave different bits than other devices of the same model (CPU)"
    )


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


def judge(current: dict[str, Any], *records: dict[str, Any], health: Literal["refuse", "warn"] = "refuse") -> None:
    """Judge this machine's self-test in a run with these attempts, the last of which has committed."""
    journal = Journal(MemoryStore(f"self-test-{uuid.uuid4()}"), "r")
    for number, record in enumerate(records, 1):
        journal.claim_attempt(number, "fresh", "host", 1, record)
    past = Past(None, "", None, records[-1])  # type: ignore[arg-type]  # the commit isn't read
    judge_self_test(journal, len(records) + 1, past, Present({}, {}, current), Compute(gpu_health=health))


A, B = "a" * 64, "b" * 64
OF_ANOTHER = {"torch": "another"}


def test_other_bits_than_another_host_gave_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    judge(environment("node-4", B), environment("node-3", A))
    (line,) = caplog.messages
    assert line.startswith("self-test: node-4 gives different bits than node-3 gave")


def test_other_bits_than_the_same_host_gave_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    saved, current = environment("node-3", A), environment("node-3", B)
    with pytest.raises(SelfTestFailed, match="node-3 gives different bits than node-3 gave"):
        judge(current, saved)
    judge(current, saved, health="warn")
    judge(environment("node-3", B, driver="580"), saved)
    assert len(caplog.messages) == 2


def test_an_attempt_before_the_last_commits_counts() -> None:
    with pytest.raises(SelfTestFailed):
        judge(environment("node-3", B), environment("node-3", A), environment("node-4", A, **OF_ANOTHER))


@pytest.mark.parametrize(
    ("hosts", "named"),
    [
        (["node-1", "node-2"], "than node-2 and node-1 gave"),
        (["node-1", "node-2", "node-1"], "than node-1 and node-2 gave"),
    ],
)
def test_the_hosts_that_gave_other_bits_are_named(
    hosts: list[str], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    judge(environment("node-9", B), *(environment(host, A) for host in hosts))
    (line,) = caplog.messages
    assert named in line


def test_a_machine_whose_bits_most_hosts_gave_is_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    odd = environment("node-2", B)
    judge(environment("node-3", A), environment("node-1", A), odd)
    judge(environment("node-1", A), environment("node-1", A), environment("node-4", A), odd)
    assert caplog.messages == []
    judge(environment("node-3", A), odd)
    assert len(caplog.messages) == 1


def name_gpu(name: str, sha256: str) -> dict[str, Any]:
    gpus = [{"name": name, "sm": [9, 0], "sm_count": 132}]
    known = {"cuda": "13.0", "cudnn": 91002, "nccl": "2.27", "device": "cuda"}
    return environment("node-3", sha256, gpus=gpus, **known)


def test_gpus_of_another_name_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    judge(name_gpu("NVIDIA H200", B), name_gpu("NVIDIA H100", A))
    assert caplog.messages == []
    with pytest.raises(SelfTestFailed):
        judge(name_gpu("NVIDIA H200", B), name_gpu("NVIDIA H200", A))


@pytest.mark.parametrize(
    "current",
    [
        environment("node-3", A),
        environment("node-3", B, **OF_ANOTHER),
        environment("node-3", B, deterministic=False),
        environment("node-3", B, threads=99),
        environment("node-3", B, cpu_capability="AVX2"),
        environment("node-3", B, onednn="2"),
        environment("node-3", B, variables={"MKL_CBWR": "COMPATIBLE"}),
        environment("node-3", B) | {KEY: {"host": "node-3", "where": "node-3", "sha256": B, "flags": "others"}},
        {name: value for name, value in environment("node-3", B).items() if name != KEY},
    ],
)
def test_self_tests_that_are_equal_or_not_comparable_say_nothing(
    current: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    judge(current, environment("node-3", A))
    assert caplog.messages == []


@pytest.mark.parametrize("test", ["text", {}, {"host": 1, "where": "w", "sha256": A, "flags": "flags"}])
def test_a_record_of_another_form_is_left_out(test: Any, caplog: pytest.LogCaptureFixture) -> None:
    judge(environment("node-3", B), environment("node-3", A) | {KEY: test})
    assert caplog.messages == []


def test_no_record_is_read_if_the_last_machine_like_this_one_gave_equal_bits() -> None:
    def read() -> Iterator[dict[str, Any]]:
        yield environment("node-4", A)
        raise AssertionError("a second record was read")

    assert compare_with_records(read(), environment("node-3", A)) == ("", False)


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
def test_a_machine_that_has_begun_to_be_wrong_is_refused(engine: Engine) -> None:
    """The wrong bit is equal each time, so that nothing but the run's records shows it."""
    engine.run(**fault("commit-recorded", 1, "both", engine.folder / "struck"))
    refused = engine.run(**flip(0))
    assert refused.returncode == 3, refused.stderr
    assert f"error: self-test: {OTHER_BITS}" in refused.stderr
    assert engine.journal().attempts() == 1


@pytest.mark.slow
def test_doctor_compares_a_machine_with_the_attempts_of_a_run(engine: Engine) -> None:
    engine.run("epochs=1")
    good = engine.command("doctor", str(engine.run_folder))
    assert (good.returncode, "no machine like this one had different bits" in words(good.stdout)) == (0, True)
    record = engine.journal().read_attempt(1)
    record.environment[KEY]["sha256"] = A
    (engine.run_folder / "attempts" / "00000001.json").write_bytes(record.to_bytes())
    bad = engine.command("doctor", str(engine.run_folder))
    assert (bad.returncode, OTHER_BITS in words(bad.stdout)) == (2, True)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
@pytest.mark.gpus(2)
def test_the_rank_with_the_wrong_device_is_named(nursery: Lives, tmp_path: Path) -> None:
    path = write_config(tmp_path, 2, 1)
    refused = nursery.call("tests.support.forked:train", path, [], **flip(1, tmp_path / "struck"))
    assert refused.returncode == 3
    assert "error: the self-test failed: rank 1 on " in refused.stderr
    assert "rank 0" not in refused.stderr
    assert not (tmp_path / "r" / "attempts").exists()


def test_a_self_test_that_cannot_run_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe may have turned off what the test computes with, and the device may have no memory left."""

    def fail(device: str) -> SelfTest:
        raise RuntimeError("No viable backend for scaled_dot_product_attention")

    monkeypatch.setattr(description, "run_self_test", fail)
    training = Mock(ranks=Mock(gather=lambda value: [value]), accelerator=Mock(device="cpu"))
    test, warnings = description.test_device(training)
    assert test is None
    assert warnings == [
        "the self-test can't run here, and is left out: RuntimeError: No viable backend for "
        "scaled_dot_product_attention"
    ]

"""The examination of this machine: its environment, its GPUs, and whether repeated steps compute equal bits.

The process of ``holdfast doctor`` has other environment variables and threads than a rank. So new processes, which are
started like ranks, make the measurements: ``python -m holdfast.extensions.doctor.examination SETTINGS DEVICE`` prints
its report as one line of JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from holdfast.config import DEFAULT_SEED, Compute, Determinism
from holdfast.errors import DeterminismError
from holdfast.machine import determinism
from holdfast.machine.environment import describe_environment
from holdfast.machine.gpus.report import GpuReport
from holdfast.machine.gpus.visible import list_taken, list_visible
from holdfast.machine.libraries import describe_versions
from holdfast.machine.self_test import KEY, Bits, SelfTest, compare_with_records, find_fault, run_self_test, take_step
from holdfast.store.modules import python_command
from holdfast.terminal import counted

DeviceChoice = Literal["auto", "cpu", "cuda"]

PROCESSES = 2
WITHIN_S = 300.0  # long, because importing torch from a cold disk takes a minute


@dataclass(frozen=True)
class Finding:
    """One measurement.

    Attributes:
        what: the name of the measurement.
        seen: the result, for a person.
        is_good: whether the result is good; None if the finding is for information only.
    """

    what: str
    seen: str
    is_good: bool | None = None


@dataclass(frozen=True)
class Examination:
    """The environment of a rank on this machine, and the measurements."""

    environment: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Return whether no finding is bad."""
        return all(finding.is_good is not False for finding in self.findings)


def examine(settings: Determinism, device: DeviceChoice = "auto", within_s: float = WITHIN_S) -> Examination:
    """Examine the machine in fresh processes with a rank's settings. The calling process doesn't import torch.

    Args:
        device: the device to examine; without a GPU, cuda means cpu.
        within_s: seconds in which each process must answer.

    Raises:
        DeterminismError: torch can't be run here, or a process didn't answer in time.
    """
    reports = _start(settings, device, within_s)
    return Examination(reports[0]["environment"], judge_reports(reports))


def judge_reports(reports: list[dict[str, Any]]) -> tuple[Finding, ...]:
    """Return the findings from comparing the reports of several processes that made the same measurements."""
    first = reports[0]
    again = [report["step"] for report in reports]
    threads = first["environment"]["threads"]
    moved = sorted({part for bits in first["by_threads"].values() for part in _differing([again[0], bits])})
    others = " or ".join(first["by_threads"])
    tests = [SelfTest(**test) for test in first["self_tests"]]
    fault = find_fault(tests, "device")
    tested = "; ".join(f"{test.where} ({test.sha256[:12]})" for test in tests)
    return (
        Finding("self-test: one step, twice", fault or f"the same bits on {tested}", not fault),
        _compare(f"one step, in {len(reports)} processes", again),
        Finding("deterministic algorithms", first["refuses"] or "can't be switched on", bool(first["refuses"])),
        Finding(
            f"{others} threads, not {threads}", f"different bits: {', '.join(moved)}" if moved else "the same bits"
        ),
    )


def judge_records(records: Iterable[Mapping[str, Any]], current: Mapping[str, Any]) -> Finding:
    """Return a finding that compares this machine's self-test with the recorded self-tests of a run's attempts."""
    line, is_unstable = compare_with_records(records, current)
    if line:
        return Finding("self-test, in the run's attempts", line, False if is_unstable else None)
    return Finding("self-test, in the run's attempts", "no machine like this one had different bits", True)


def _compare(what: str, steps: list[Bits]) -> Finding:
    moved = _differing(steps)
    seen = f"different bits: {', '.join(moved)}" if moved else f"the same bits: {', '.join(steps[0])}"
    return Finding(what, seen, not moved)


def _differing(steps: list[Bits]) -> list[str]:
    return [part for part in steps[0] if len({bits[part] for bits in steps}) > 1]


def judge_gpus(report: GpuReport, compute: Compute, seen_by_torch: int) -> tuple[Finding, ...]:
    """Return the findings about the GPUs that a run with these settings would take, and about their health.

    Args:
        seen_by_torch: the number of GPUs that torch sees.
    """
    visible = list_visible(report)
    if visible is None:
        problem = report.problem or "nvidia-smi doesn't tell which part of a GPU (MIG) a run would take"
        known = f"{problem}; torch sees {counted(seen_by_torch, 'GPU') if seen_by_torch else 'none'}"
        return (Finding("health unknown", known, False if report.is_fault else None),)
    if not report.gpus:
        return (Finding("none", "nvidia-smi lists no GPU"),)
    ranks = len(visible) if compute.ranks == "all" else compute.ranks
    taken = () if compute.device == "cpu" else list_taken(visible, ranks)
    findings = []
    for gpu in report.gpus:
        use = (
            "which a run takes" if gpu in taken else "which a run leaves free" if gpu in visible else "which is hidden"
        )
        health = "; ".join([*(gpu.faults or ["healthy"]), *gpu.notes])
        is_good = None if gpu not in visible else not gpu.faults
        findings.append(Finding(f"GPU {gpu.index}, {use}", f"{gpu.name}, {gpu.memory}, {gpu.uuid}: {health}", is_good))
    if taken and ranks > len(visible):
        findings.append(Finding(f"compute.ranks = {ranks}", f"a run sees {counted(len(visible), 'GPU')}", False))
    if taken and not seen_by_torch:
        is_refused = compute.gpu_health == "refuse"
        effect = "is refused" if is_refused else "would train on the CPU"
        findings.append(Finding("torch", f"torch sees no GPU, so a run {effect}", False if is_refused else None))
    return tuple(findings)


def judge_libraries(installed: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return, for each library, whether Holdfast was tested with the installed version.

    An untested version isn't a fault.
    """
    described = describe_versions(installed)
    return tuple(
        Finding(name, seen if is_tested else f"{seen}: no test has seen it", True if is_tested else None)
        for name, (seen, is_tested) in described.items()
    )


def _start(settings: Determinism, device: DeviceChoice, within_s: float) -> list[dict[str, Any]]:
    command = python_command("-m", "holdfast.extensions.doctor.examination", settings.model_dump_json(), device)
    # measure steps in strict mode, whatever the configuration says
    strict = settings.model_copy(update={"mode": "strict"})
    environment = os.environ | determinism.preamble(strict)
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(PROCESSES):
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace")
            )
        return [_read_report(process, within_s) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _read_report(process: "subprocess.Popen[str]", within_s: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        raise DeterminismError(f"torch did not answer within {within_s:.0f} s") from None
    if process.returncode:
        said = [line for line in err.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raise DeterminismError(
            f"torch can't be run here: {said[-1].strip()}", hint="to see the whole error: python -c 'import torch'"
        )
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


# ---- in the fresh interpreter


def _make_process_report(settings: Determinism, device: str) -> dict[str, Any]:
    """Return the report of one process: its environment, and digests of one step's bits.

    The step is computed twice with the rank's number of threads, and then with one and two threads more.

    Raises:
        DeterminismError: this interpreter was started without the preamble of `holdfast.machine.determinism`.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"
    determinism.apply(settings, DEFAULT_SEED)
    report: dict[str, Any] = {"environment": describe_environment(device)}
    determinism.apply(settings.model_copy(update={"mode": "strict"}), DEFAULT_SEED)
    report |= {"step": take_step(device), "refuses": _refuse(device), "by_threads": {}}
    devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device == "cuda" else [device]
    tests = [run_self_test(each) for each in devices]
    report["self_tests"] = [asdict(test) for test in tests]
    report["environment"][KEY] = tests[0].describe()
    for threads in (settings.threads + 1, settings.threads + 2):
        torch.set_num_threads(threads)
        report["by_threads"][str(threads)] = take_step(device)
    return report


def _refuse(device: str) -> str:
    """Try an operation that has no deterministic kernel. Return a line if torch refuses it; empty if torch runs it."""
    import torch

    places = torch.zeros(2, dtype=torch.long, device=device)
    try:
        torch.zeros(2, device=device).put_(places, torch.ones(2, device=device))
    except RuntimeError:
        return "on: torch refuses put_, which has no deterministic kernel"
    return ""


if __name__ == "__main__":
    print(json.dumps(_make_process_report(Determinism.model_validate_json(sys.argv[1]), sys.argv[2])))

"""``holdfast doctor`` describes this machine as a rank finds it, and shows what is wrong."""

import json
import logging
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from holdfast.cli import app, run_app
from holdfast.config import Compute, Determinism
from holdfast.errors import DeterminismError
from holdfast.extensions.doctor.examination import Examination, Finding, examine, judge_gpus, judge_reports
from holdfast.journal import Journal
from holdfast.machine import determinism, self_test
from holdfast.machine.contract import LIMITS, TERMS, judge, terms_on
from holdfast.machine.environment import chooses_kernels
from holdfast.machine.gpus.report import read_report
from holdfast.machine.libraries import TESTED, find_installed
from holdfast.store import open_store
from tests.conftest import has_not_ended
from tests.support.makers import IDENTITY, SETTINGS, make_line, train
from tests.support.nvidia_smi import HOPPER, LOST, SICK, Machine, uuid

PARTS = ("matmul", "conv", "attention", "embedding", "sum", "optimizer")


@pytest.fixture(scope="module")
def here() -> Examination:
    """Examine this machine once, as a rank with one thread finds it."""
    return examine(Determinism(), "cpu")


@pytest.fixture
def asked(here: Examination, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record the arguments of each examination, and return the known result instead of a new one."""
    asked: list[tuple[Any, ...]] = []

    def examined_before(*arguments: Any) -> Examination:
        asked.append(arguments)
        return here

    monkeypatch.setattr("holdfast.extensions.doctor.command.examine", examined_before)
    return asked


def make_run(store: Path, *environments: dict[str, Any], **config: Any) -> str:
    """Make a run with an attempt in each environment, the last of which has committed."""
    journal = Journal(open_store(str(store)), "run")
    journal.begin("m:f")
    for number, environment in enumerate(environments, 1):
        journal.claim_attempt(number, "fresh", f"host-{number}", 1, environment)
    journal.record_config(SETTINGS, IDENTITY, {"recipe": "m:f", "run": "run", **config})
    return f"{store}/run"


def say(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: int = 0) -> str:
    capsys.readouterr()
    assert run_app(app, ["doctor", *arguments]) == exit_code
    return capsys.readouterr().out


def words(text: str) -> str:
    return " ".join(text.split())


# ---- the machine


def test_doctor_describes_this_machine(
    here: Examination, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the real command on a terminal of a hundred columns."""
    monkeypatch.setenv("COLUMNS", "100")
    out = say(capsys)
    assert max(map(len, out.splitlines())) <= 100
    assert not [line for line in out.splitlines() if line != line.rstrip()]
    rows = [line.split() for line in out.splitlines() if line.startswith("  ")]
    device = next(row[1] for row in rows if row[0] == "device")
    assert [row[0] for row in rows if row[0] in {term.key for term in TERMS}] == [term.key for term in terms_on(device)]
    for text in (*(term.why for term in terms_on(device)), *(limit.text for limit in LIMITS if device in limit.on)):
        assert text in words(out)
    assert f"good self-test: one step, twice the same bits on {platform.node()} (" in words(out)
    assert f"good one step, in 2 processes the same bits: {', '.join(PARTS)}" in words(out)
    assert "good deterministic algorithms on: torch refuses put_, which has no deterministic kernel" in words(out)
    assert "seen 2 or 3 threads, not 1" in words(out)
    assert here.environment["torch"] in out
    oldest, newest = TESTED["torch"]
    assert f"torch {here.environment['torch']}, tested with {oldest} to {newest}" in words(out)


def test_doctor_describes_a_machine_with_a_gpu(
    here: Examination, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is made up, since this machine has no GPU; nothing is measured on it."""
    gpu = {"name": "NVIDIA H200", "sm": [9, 0], "sm_count": 132}
    known = {"device": "cuda", "cuda": "12.8", "cudnn": 91002, "nccl": "2.27.5", "gpus": [gpu] * 8}
    there = Examination(here.environment | known, here.findings)
    monkeypatch.setattr("holdfast.extensions.doctor.command.examine", lambda *_: there)
    monkeypatch.setenv("COLUMNS", "100")
    out = say(capsys)
    rows = {line.split()[0]: words(line) for line in out.splitlines() if line.startswith("  ")}
    assert rows["gpus"] == "gpus sm_90 with 132 SMs architecture and SMs choose the kernels"
    assert rows["cudnn"] == "cudnn 9.10 the kernels change with the minor version"
    assert "cpu_family" not in rows
    assert "the host, python's patch version, a GPU's name, cuDNN's patch version, cpu, cpu_family" in words(out)
    assert all(limit.text in words(out) for limit in LIMITS)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_any_terminal_is_wide_enough(
    columns: str, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = say(capsys)
    assert max(map(len, out.splitlines())) <= max(int(columns), 80)
    assert TERMS[0].why in words(out) or columns == "40"


@pytest.mark.parametrize("cpu", ["M1", "Intel(R) Xeon(R) CPU E5-2680-v4 @ 2.40GHz " + "with-a-very-long-name-" * 6])
def test_a_name_is_wrapped_between_words_only(
    cpu: str, here: Examination, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A name cut in two can't be searched for or copied."""
    monkeypatch.setenv("COLUMNS", "40")
    out = words(say(capsys, make_run(tmp_path, here.environment | {"cpu": cpu})))
    assert f"cpu: saved {cpu!r}, here {here.environment['cpu']!r}" in out


def test_json(here: Examination, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(say(capsys, "--json"))
    assert shown["ok"] is True
    assert shown["environment"] == here.environment
    assert [(term["key"], term["why"]) for term in shown["contract"]] == [(term.key, term.why) for term in TERMS]
    assert {term["here"] for term in shown["contract"] if term["key"] == "torch"} == {here.environment["torch"]}
    assert [finding["is_good"] for finding in shown["measured"]] == [True, True, True, None]
    assert (shown["attempt"], shown["verdict"]) == (None, None)
    assert [library["what"] for library in shown["libraries"]] == [*find_installed()]
    assert asked == [(Determinism(), "auto")]


def recorded(settings: Determinism) -> dict[str, str]:
    """Return the variables of a rank's preamble that an environment's record has."""
    return {name: value for name, value in determinism.preamble(settings).items() if chooses_kernels(name)}


def test_the_process_that_is_examined_is_started_as_a_rank_is(here: Examination) -> None:
    assert judge(here.environment, here.environment).promise == "identical"
    assert here.environment["variables"].items() >= recorded(Determinism()).items()
    assert (here.environment["threads"], here.environment["deterministic"]) == (1, True)

    more = examine(Determinism(threads=2, mode="fast"), "cpu")
    assert more.environment["variables"].items() >= recorded(Determinism(threads=2)).items()
    assert (more.environment["threads"], more.environment["deterministic"]) == (2, False)
    assert more.findings[-1].what == "3 or 4 threads, not 2"
    assert more.is_good
    assert judge(here.environment, more.environment).reasons == (
        "deterministic: saved 'on', here 'off'",
        "threads: saved 1, here 2",
        "MKL_NUM_THREADS: saved '1', here '2'",
        "OMP_NUM_THREADS: saved '1', here '2'",
    )


def test_the_command_does_not_import_torch() -> None:
    imported = "import holdfast.extensions.doctor.command, sys"
    program = f"{imported}; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


# ---- a run


def test_a_run_from_another_machine_is_not_promised(
    here: Examination, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"cpu": "AMD EPYC 7763 64-Core Processor", "cpu_flags": "0" * 64}
    run = make_run(tmp_path, here.environment | other, compute={"device": "cpu"})
    first, reason, *rest = (words(part) for part in say(capsys, run).split("\n\n"))
    assert first == f"not promised: that run {run} continues here with the same bits as on host-1, where attempt 1 ran"
    assert reason == f"cpu: saved 'AMD EPYC 7763 64-Core Processor', here {here.environment['cpu']!r}"
    assert "good one step, in 2 processes" in " ".join(rest)


def test_a_run_that_was_here_before(
    here: Examination, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest attempt counts; the records that a rank adds to its environment don't."""
    newest = {"sources": {"my_model": "0" * 64}} | json.loads(json.dumps(here.environment))
    run = make_run(tmp_path, here.environment | {"cpu": "another"}, newest)
    out = say(capsys, run)
    assert out.startswith(f"identical: run {run} continues here with the same bits as on host-2, where attempt 2 ran\n")
    assert "saved" not in out
    assert LIMITS[0].text in words(out)
    shown = json.loads(say(capsys, run, "--json"))
    assert (shown["verdict"], shown["attempt"]["number"]) == ({"promise": "identical", "reasons": []}, 2)


def test_the_machine_is_examined_with_the_settings_of_the_run(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    determined = Determinism(threads=3, mode="fast")
    run = make_run(tmp_path, {}, determinism=determined.model_dump(), compute={"device": "cpu", "ranks": 2})
    say(capsys, run)
    assert asked == [(determined, "cpu")]


@pytest.mark.parametrize("damage", ["missing", "damaged", "of a later version"])
def test_settings_that_are_lost(
    damage: str, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    later = {"threads": 3, "rounding": "up"} if damage == "of a later version" else {"threads": 3}
    run = make_run(tmp_path, {}, determinism=later)
    snapshot = Path(run, "config.snapshot.json")
    if damage == "missing":
        snapshot.unlink()
    elif damage == "damaged":
        snapshot.write_bytes(b"?" + snapshot.read_bytes()[1:])
    with caplog.at_level(logging.WARNING):
        say(capsys, run)
    assert "the run's settings can't be read, so this machine is examined with the default settings" in caplog.text
    assert asked == [(Determinism(), "auto")]


def test_an_attempt_that_recorded_nothing(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_line(open_store(str(tmp_path)), "old"))
    out = words(say(capsys, f"{tmp_path}/old"))
    assert out.startswith("not promised: ")
    keys = ", ".join(dict.fromkeys(term.key for term in terms_on("cpu") if not term.before))
    assert f" {keys}: not recorded " in out


def test_control_characters_in_a_record_do_not_reach_the_terminal(
    here: Examination, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = {"cpu_vector": "\x1b[2J avx", "cpu": "\x1b[2J", "variables": {"ONEDNN_\x1b[2J_ISA": "\x1b[2J"}}
    out = words(say(capsys, make_run(tmp_path, here.environment | hostile)))
    assert "\x1b" not in out
    assert "cpu: saved '\\x1b[2J'" in out


@pytest.mark.parametrize(
    ("run", "error"),
    [
        ("{store}/none", "there is no run 'none' in {store}"),
        ("none", "there is no run 'none' in"),
        ("/", "'/' doesn't name a run"),
        ("{store}/begun", "run 'begun' has no attempt yet"),
    ],
)
def test_wrong_use(run: str, error: str, asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(open_store(str(tmp_path)), "begun").begin("m:f")
    assert run_app(app, ["doctor", run.format(store=tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {error.format(store=tmp_path)}")
    assert [row.split(":")[0] for row in shown.err.splitlines()] == ["error", "hint"]
    assert not asked


def test_a_damaged_attempt_is_damage(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, {})
    Path(run, "attempts/00000001.json").write_text("{}")
    say(capsys, run, exit_code=2)


# ---- the GPUs


def gpus_in(shown: str) -> list[tuple[str, str, bool | None]]:
    return [(each["what"], each["seen"], each["is_good"]) for each in json.loads(shown)["gpus"]]


def describe(index: int, health: str = "healthy") -> str:
    return f"NVIDIA H100 80GB HBM3, 81559 MiB, {uuid(index)}: {health}"


@pytest.fixture
def no_gpu(here: Examination, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see no GPU, whatever this machine has."""
    monkeypatch.setitem(here.environment, "gpus", [])


def test_doctor_says_which_gpus_a_run_takes(
    no_gpu: None, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(HOPPER, HOPPER | {"remapped_rows/remapped_row_unc": "1"}, HOPPER, HOPPER, visible="1,2,3")
    run = make_run(tmp_path, {}, compute={"ranks": 2})
    remapped = "healthy; 1 memory row replaced after uncorrected errors"
    without_torch = ("torch", "torch sees no GPU, so a run is refused", False)
    assert gpus_in(say(capsys, run, "--json", exit_code=2)) == [
        ("GPU 0, which is hidden", describe(0), None),
        ("GPU 1, which a run takes", describe(1, remapped), True),
        ("GPU 2, which a run takes", describe(2), True),
        ("GPU 3, which a run leaves free", describe(3), True),
        without_torch,
    ]
    assert [what for what, *_ in gpus_in(say(capsys, "--json", exit_code=2))] == [
        "GPU 0, which is hidden", "GPU 1, which a run takes", "GPU 2, which a run leaves free",
        "GPU 3, which a run leaves free", "torch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("compute", "uses"),
    [
        ({"ranks": "all"}, ["takes", "takes"]),
        ({"ranks": 1, "device": "cpu"}, ["leaves free", "leaves free"]),
        ({"ranks": 4}, ["takes", "takes"]),
    ],
)
def test_settings_choose_the_gpus(
    compute: dict[str, Any], uses: list[str], here: Examination, machine: Machine
) -> None:
    machine(HOPPER, HOPPER)
    findings = judge_gpus(read_report(), Compute(**compute), 2)
    assert judge_gpus(read_report(), Compute(gpu_health="warn"), 0)[-1].is_good is None
    assert [finding.what.partition("a run ")[2] for finding in findings if "GPU " in finding.what] == uses
    others = [(finding.what, finding.seen, finding.is_good) for finding in findings if "GPU " not in finding.what]
    assert others == ([("compute.ranks = 4", "a run sees 2 GPUs", False)] if compute["ranks"] == 4 else [])


def test_an_unhealthy_gpu_is_wrong(no_gpu: None, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine(HOPPER | SICK)
    out = words(say(capsys, exit_code=2))
    assert f"wrong GPU 0, which a run takes {describe(0, '2 uncorrected ECC errors since its last reset')}" in out
    assert "equal steps don't give equal bits" not in out
    assert json.loads(say(capsys, "--json", exit_code=2))["ok"] is False
    machine(HOPPER | SICK, HOPPER, visible="1")
    hidden, *_ = gpus_in(say(capsys, "--json", exit_code=2))  # because torch sees none
    assert hidden[2] is None, "a hidden GPU may be as it is"


def test_gpus_that_can_not_be_described(
    no_gpu: None, machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(text="No devices were found\n", exit_code=6)
    assert gpus_in(say(capsys, "--json")) == [("none", "nvidia-smi lists no GPU", None)]
    machine(HOPPER, visible="MIG-0a1b")
    (finding,) = gpus_in(say(capsys, "--json"))
    assert finding[1] == "nvidia-smi doesn't tell which part of a GPU (MIG) a run would take; torch sees none"
    machine(text=LOST, exit_code=15)
    assert f"wrong health unknown nvidia-smi failed: {words(LOST)}" in words(say(capsys, exit_code=2))
    monkeypatch.setenv("PATH", "")
    (finding,) = gpus_in(say(capsys, "--json"))
    assert finding == ("health unknown", "nvidia-smi is not on PATH; torch sees none", None)


# ---- what is wrong is seen


SAME = dict.fromkeys(PARTS, "same")
OTHER = SAME | {"conv": "other"}
ALL_SAME = f"the same bits: {', '.join(PARTS)}"
TESTED_HERE = {"host": "node-3", "where": "node-3", "model": "CPU", "sha256": "a", "flags": "b", "differing": []}
HEALTHY = {
    "environment": {"threads": 1}, "step": SAME, "refuses": "put_", "by_threads": {"2": SAME, "3": SAME},
    "self_tests": [TESTED_HERE],
}  # fmt: skip


AGAIN = "the self-test failed: node-3 gave different bits when it computed the same again (conv)"
HEALTHY_FINDINGS = (
    Finding("self-test: one step, twice", "the same bits on node-3 (a)", True),
    Finding("one step, in 2 processes", ALL_SAME, True),
    Finding("deterministic algorithms", "put_", True), Finding("2 or 3 threads, not 1", "the same bits"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "number", "seen", "is_good"),
    [
        ({"self_tests": [TESTED_HERE | {"differing": ["conv"]}]}, {}, 0, AGAIN, False),
        ({}, {"step": OTHER}, 1, "different bits: conv", False),
        ({"refuses": ""}, {}, 2, "can't be switched on", False),
        ({"by_threads": {"2": SAME, "3": OTHER}}, {}, 3, "different bits: conv", None),
    ],
)
def test_findings_follow_from_the_reports(
    first: dict[str, Any], second: dict[str, Any], number: int, seen: str, is_good: bool | None
) -> None:
    """One value differs from healthy reports, and one finding changes."""
    healthy = judge_reports([HEALTHY, HEALTHY])
    assert (healthy, Examination({}, healthy).is_good) == (HEALTHY_FINDINGS, True)
    findings = judge_reports([HEALTHY | first, HEALTHY | second])
    expected = list(HEALTHY_FINDINGS)
    expected[number] = Finding(expected[number].what, seen, is_good)
    assert findings == tuple(expected)
    assert Examination({}, findings).is_good == (is_good is not False)


def plant(folder: Path, name: str, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a module that every interpreter started from now on finds first."""
    (folder / name).write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_machine_that_computes_otherwise_in_every_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    salted = """
import hashlib, os
sha256 = hashlib.sha256
hashlib.sha256 = lambda data=b"": sha256(b"%d" % os.getpid() + data)
"""
    plant(tmp_path, "sitecustomize.py", salted, monkeypatch)
    out = words(say(capsys, exit_code=2))
    assert "good self-test: one step, twice" in out
    assert f"wrong one step, in 2 processes different bits: {', '.join(PARTS)}" in out
    assert "so no run can be continued or repeated with equal bits" in out


def test_a_machine_that_has_no_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, "torch.py", "raise ImportError('libcudart.so.12: no such file')\n", monkeypatch)
    assert run_app(app, ["doctor"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: torch can't be run here: ImportError: libcudart.so.12: no such file"
    assert hint == "hint: to see the whole error: python -c 'import torch'"


def test_a_process_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, "torch.py", "import time\ntime.sleep(3600)\n", monkeypatch)
    others = psutil.Process().children()
    with pytest.raises(DeterminismError, match="torch did not answer within 0 s"):
        examine(Determinism(), within_s=0.1)
    assert not [child for child in psutil.Process().children() if child not in others and has_not_ended(child)]


# ---- the step


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets this process's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_bits_of_a_step_are_those_of_its_numbers() -> None:
    first = self_test.take_step("cpu")
    assert tuple(first) == PARTS
    assert len(set(first.values())) == len(PARTS)
    assert not set(first.items()) & set(self_test.take_step("cpu", seed=1).items())


def test_gradients_count() -> None:
    x = torch.arange(1.0, 9.0)
    once = self_test.bits_of(lambda x: x * 1, [x.clone().requires_grad_()])
    twice = self_test.bits_of(lambda x: x.detach() + 2 * (x - x.detach()), [x.clone().requires_grad_()])
    assert torch.equal(x * 1, x.detach() + 2 * (x - x.detach()))
    assert once != twice


def test_a_change_by_other_threads_is_seen(here: Examination, threads: Callable[[int], None]) -> None:
    steps = []
    for number in (1, 2, 3):
        threads(number)
        steps.append(self_test.take_step("cpu"))
    moved = sorted(part for part in PARTS if len({bits[part] for bits in steps}) > 1)
    assert here.findings[-1].seen == (f"different bits: {', '.join(moved)}" if moved else "the same bits")

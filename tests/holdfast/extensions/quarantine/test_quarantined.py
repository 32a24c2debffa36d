"""The store's quarantine: an attempt is refused there, and a checkpoint from there isn't adopted."""

from pathlib import Path

import pytest

from holdfast.attempt import Line
from holdfast.config import Compute, RunConfig
from holdfast.errors import MachineQuarantined
from holdfast.extensions.quarantine.admission import refuse_quarantined
from holdfast.extensions.quarantine.records import quarantine_machine, release_machine
from holdfast.journal import now
from holdfast.journal.endings import ending_of
from holdfast.journal.verdict import AuditVerdict
from holdfast.machine.host import VARIABLE
from holdfast.store.local import LocalStore
from tests.support.makers import SETTINGS, STEPS_PER_EPOCH, make_line, resume, save_next, train
from tests.support.nvidia_smi import Machine

FAULTY = "GPU-00000000-0000-0000-0000-000000000001"


LATER = "2999-01-01T00:00:00+00:00"


def quarantine(store: LocalStore, host: str, *gpus: str) -> None:
    reason = f"{host} ended on different bytes"
    verdict = AuditVerdict("machine", 7, reason, host=host, gpus=gpus, agreeing=2, deviating=1)
    assert quarantine_machine(store, "language", verdict)


def find_refusal(store: LocalStore, compute: Compute) -> MachineQuarantined | None:
    try:
        refuse_quarantined(RunConfig(recipe="m:f", run="r", store=store.url, compute=compute))
    except MachineQuarantined as error:
        return error
    return None


@pytest.mark.parametrize(
    ("host", "gpus", "uuids", "device", "is_refused"),
    [
        ("faulty", (), (), "cpu", True),
        ("other", (), (), "cpu", False),
        ("faulty", (FAULTY,), (FAULTY,), "cpu", False),  # a GPU is at fault, and the run takes none
        ("faulty", (FAULTY,), (FAULTY, "GPU-2"), "cuda", True),
        ("faulty", (FAULTY,), ("GPU-2", FAULTY), "cuda", False),  # the run takes the first GPU alone
        ("faulty", (FAULTY,), (), "cuda", True),  # nvidia-smi doesn't tell
        ("other", (FAULTY,), (FAULTY,), "cuda", True),  # the GPU was put into another machine
        ("other", (FAULTY,), (), "cuda", False),
    ],
)
def test_who_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine,
    host: str, gpus: tuple[str, ...], uuids: tuple[str, ...], device: str, is_refused: bool,
) -> None:  # fmt: skip
    machine(*({"uuid": uuid} for uuid in uuids), exit_code=0 if uuids else 9, text="" if uuids else "no answer")
    monkeypatch.setenv(VARIABLE, host)
    store, compute = LocalStore(str(tmp_path / "runs")), Compute(device=device)
    assert find_refusal(store, compute) is None
    quarantine(store, "faulty", *gpus)
    error = find_refusal(store, compute)
    assert (error is not None) is is_refused
    if error:
        assert str(error).startswith(f"this machine is quarantined in {store.url}: faulty")
        assert "--release faulty" in error.hint
        assert (error.exit_code, ending_of(error).row.retries) == (3, True)
    release_machine(store, "faulty")
    assert find_refusal(store, compute) is None


@pytest.mark.parametrize(
    ("host", "gpus", "trained_on", "trained_at", "is_released", "is_adopted"),
    [
        ("other", (), {}, "", False, True),
        ("host", (), {}, "", False, False),
        ("host", (), {}, "", True, False),  # it was trained before the machine was repaired
        ("host", (), {}, LATER, True, True),
        ("next", (), {}, "", False, False),  # its ranks may have saved it, too
        ("host", (FAULTY,), {"device": "cpu"}, "", False, True),  # the GPU is at fault, and it was trained on the CPU
        ("host", (FAULTY,), {"device": "cuda", "gpu_uuids": ["GPU-2"]}, "", False, True),
        ("host", (FAULTY,), {"device": "cuda", "gpu_uuids": [FAULTY, "GPU-2"]}, "", False, False),
        ("host", (FAULTY,), {"device": "cuda"}, "", False, False),  # nobody knows on which GPUs
        ("other", (FAULTY,), {"device": "cuda", "gpu_uuids": [FAULTY]}, "", False, False),
    ],
)
def test_a_checkpoint_of_a_faulty_machine_is_not_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
    host: str, gpus: tuple[str, ...], trained_on: dict[str, object], trained_at: str, is_released: bool,
    is_adopted: bool,
) -> None:  # fmt: skip
    """The machine "host" commits once, saves a second checkpoint, and dies; "next" continues."""
    store = LocalStore(str(tmp_path / "runs"))
    first = make_line(store)
    train(first)
    saved = save_next(first, environment=trained_on, trained_at=trained_at or now())
    quarantine(store, host, *gpus)
    if is_released:
        release_machine(store, host)
    first.journal.claim_attempt(2, "continued", "next", 1, {})
    line = Line(first.journal, 2, SETTINGS, STEPS_PER_EPOCH)
    resume(line)
    assert line.head
    assert line.head.number == (2 if is_adopted else 1)
    refusal = f"the checkpoint of step {saved.step} ({saved.path}) is not adopted, so its steps are trained again: "
    assert (refusal in caplog.text) is not is_adopted
    if not is_adopted:
        assert train(line).path != saved.path, "another folder has the step now"

"""An attempt is refused on a machine, or on GPUs, that the store has in quarantine."""

from pathlib import Path

import pytest

from holdfast.attempt.quarantined import check_machine
from holdfast.config import Compute
from holdfast.errors import MachineQuarantined
from holdfast.journal import AuditVerdict, quarantine_machine, release_machine
from holdfast.journal.endings import ending_of
from holdfast.machine.host import VARIABLE
from holdfast.store.local import LocalStore
from tests.support.nvidia_smi import Machine

FAULTY = "GPU-00000000-0000-0000-0000-000000000001"


def find_refusal(store: LocalStore, compute: Compute) -> MachineQuarantined | None:
    try:
        check_machine(store.url, compute)
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
    verdict = AuditVerdict(
        "machine", 7, "faulty ended on other bytes", host="faulty", gpus=gpus, agreeing=2, deviating=1
    )
    quarantine_machine(store, "language", verdict)
    error = find_refusal(store, compute)
    assert (error is not None) is is_refused
    if error:
        assert str(error).startswith(f"this machine is quarantined in {store.url}: faulty")
        assert "--release faulty" in error.hint
        assert (error.exit_code, ending_of(error).row.retries) == (3, True)
    release_machine(store, "faulty")
    assert find_refusal(store, compute) is None

"""A signal that comes between a report of the ranks and the attempt's answer to it."""

from pathlib import Path

import pytest

from holdfast.keeping.verification import verify_run
from tests.support.lives import Lives
from tests.support.rehearsed import Program

pytestmark = pytest.mark.slow


def test_a_checkpoint_whose_report_a_signal_interrupts_is_committed(nursery: Lives, tmp_path: Path) -> None:
    """Without that, the steps would be trained again, or a later commit would name a parent that no commit has."""
    command = "tests.support.stopped:train_until_saved"
    program = Program(nursery, tmp_path, "support.forgetting:exact", {}, epochs=4, command=command)
    stopped = program.train("proof.rehearse=off")
    assert stopped.returncode == 143, stopped.stderr
    assert program.find_step() >= 16, stopped.stderr
    assert [program.journal.read_commit(number).step for number in program.journal.numbers("commits")][:2] == [8, 16]
    assert verify_run(program.journal).problems == []

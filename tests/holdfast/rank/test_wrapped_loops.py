"""A loop of a user's own on several ranks, whatever it does to its gradients: killed, it ends on the same bytes."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tests.support.lives import Lives
from tests.support.wrapped import write_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fsdp_imported")]


def prove(nursery: Lives, path: str) -> "subprocess.CompletedProcess[str]":
    options = ("--steps", "10", "--kills", "3" if IS_SOAK else "2", "--seed", "7")
    return nursery.call("tests.support.forked:command", "prove", path, *options)


@pytest.mark.parametrize(
    ("parallel", "ranks", "gradients", "blocks"),
    [
        ("ddp", 2, "accumulated", "own"),
        ("ddp", 3, "left", "own"),
        ("fsdp", 2, "left", "same"),
        *[("ddp", 2, "none", "own")] * IS_SOAK,
        *[("ddp", 3, gradients, "own") for gradients in ("none", "zero", "accumulated")] * IS_SOAK,
        *[("ddp", 3, "left", "same"), ("fsdp", 2, "zero", "same")] * IS_SOAK,
    ],
)
def test_a_loop_is_proved(
    nursery: Lives, tmp_path: Path, parallel: str, ranks: int, gradients: str, blocks: str
) -> None:
    done = prove(nursery, write_config(tmp_path, ranks, gradients, parallel, blocks=blocks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "end on the same bytes" in done.stdout
    assert "warning" not in done.stderr.lower()


@pytest.mark.parametrize(("ranks", "own"), [(2, "default"), (3, "finding")])
def test_a_models_own_wrapper_is_proved(nursery: Lives, tmp_path: Path, ranks: int, own: str) -> None:
    done = prove(nursery, write_config(tmp_path, ranks, "none", own=own))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("default", "'model' is a DistributedDataParallel without find_unused_parameters=True"),
        ("frozen", "after step 1 the ranks have different values of the model: each rank trains a different model"),
        ("bare", "after step 1 the ranks have different values of the model: each rank trains a different model"),
        ("closure", "the ranks have different values of the optimizer\n"),
    ],
)
def test_ranks_that_a_resume_would_change_are_refused(nursery: Lives, tmp_path: Path, own: str, said: str) -> None:
    done = prove(nursery, write_config(tmp_path, 3, "none", blocks="same", own=own))
    assert done.returncode != 0
    assert said in done.stderr

"""What only GPUs have: fp16 with its scaler, bf16 kernels of a GPU, and a limit to the number of ranks."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import ConfigError
from holdfast.machine.faults import POINTS
from holdfast.testing.faults import fault
from holdfast.training import Training
from tests.conftest import Engine, Reference, assert_same_bytes
from tests.support.device import NEEDS_GPU, ON_GPUS
from tests.support.gpus import count_gpus

pytestmark = [pytest.mark.slow, pytest.mark.gpus(1), pytest.mark.skipif(not ON_GPUS, reason=NEEDS_GPU)]


@pytest.mark.parametrize(
    ("ranks", "precision"),
    [
        pytest.param(1, "bf16"),
        pytest.param(1, "fp16"),
        pytest.param(2, "fp16", marks=pytest.mark.gpus(2)),
    ],
)
def test_killed_at_every_point_in_half_precision_a_run_ends_on_the_same_bytes(
    engine: Engine, ranks: int, precision: str
) -> None:
    settings = (f"compute.ranks={ranks}", f"compute.mixed_precision={precision}")
    folder = engine.folder / "straight"
    folder.mkdir()
    straight = Engine(folder, {}, nursery=engine.nursery)
    standing = straight.finish(*settings)
    for point in POINTS:
        struck = engine.folder / f"struck-{point}"
        done = engine.run(*settings, **fault(point, 1, "both", struck))
        assert struck.exists(), done.stderr
    engine.finish(*settings)
    assert_same_bytes(engine, Reference(standing, straight.metrics(), straight.journal().newest_number()))


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("recipe", "compute", "said"),
    [
        ("shares:averaged", {"virtual_ranks": 4}, "virtual ranks can't train in fp16"),
        ("sharded:averaged", {"parallel": "fsdp"}, "fp16, whose GradScaler sees a shard of the gradient"),
        ("composed:adversarial", {}, "one GradScaler can't serve several optimizers or Recipe(step=...)"),
    ],
)
def test_what_cannot_train_in_fp16_is_refused(tmp_path: Path, recipe: str, compute: dict[str, Any], said: str) -> None:
    """On a CPU fp16 itself is refused, before any of these."""
    config = RunConfig(
        recipe=f"tests.support.{recipe}", run="r", store=str(tmp_path), determinism=Determinism(mode="fast"),
        compute=Compute(device="cuda", mixed_precision="fp16", **compute),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        Training(config)


def test_more_ranks_than_gpus_are_refused(engine: Engine) -> None:
    done = engine.run(f"compute.ranks={count_gpus() + 1}")
    assert done.returncode == 1
    assert "each rank needs its own GPU" in done.stderr
    assert not (engine.run_folder / "attempts").exists()

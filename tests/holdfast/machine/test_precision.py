"""A script chooses the precision of float32 products: it is recorded, and a killed run ends on the same bytes."""

import signal
from pathlib import Path

import pytest

from holdfast.config import ChunkLength, RunConfig
from holdfast.journal import Journal
from holdfast.machine.contract import judge
from holdfast.machine.environment import describe_environment
from holdfast.store import open_store
from tests.support.lives import Lives

RECIPE = """
import json, sys
import torch
from torch import nn
from holdfast import Recipe
from holdfast.machine.determinism import read_precision

{top}

def build() -> Recipe:
    {within}
    model = nn.Linear(2, 1)

    def loss(model, x):
        print("precision", json.dumps(read_precision("cuda")), file=sys.stderr)
        return model(x).square().sum()

    return Recipe(
        model=model, data=list(torch.eye(2)), optimizer=torch.optim.AdamW(model.parameters(), 0.1), batch_size=1,
        steps_per_epoch=6, loss=loss,
    )
"""
TF32 = '"cuda.matmul": "tf32"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top", "within"),
    [
        ("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True", "pass"),
        ("", "torch.backends.cuda.matmul.allow_tf32 = True"),
        ("", "torch.backends.fp32_precision = 'tf32'"),
    ],
)
def test_a_script_with_tf32_is_trained_with_tf32_and_killed_ends_on_the_same_bytes(
    nursery: Lives, tmp_path: Path, top: str, within: str
) -> None:
    (tmp_path / "precise.py").write_text(RECIPE.format(top=top, within=within))

    def train(name: str, *kills: int) -> tuple[str, str]:
        config = RunConfig(recipe="precise:build", run=name, store=str(tmp_path / "runs"), chunk=ChunkLength(steps=2))
        settings = config.model_dump(mode="json")
        for kill in (*kills, 0):
            done = nursery.call("tests.support.lives:live", settings, kill, 0, PYTHONPATH=str(tmp_path))
            assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
        last = next(Journal(open_store(config.store), name).candidates())
        return last.checkpoint_sha256, done.stderr

    straight, printed = train("straight")
    assert TF32 in printed
    killed, printed = train("killed", 3)
    assert TF32 in printed
    assert killed == straight


def test_a_changed_precision_is_no_longer_promised_equal_bits() -> None:
    recorded = describe_environment() | {"deterministic": True}
    now = recorded | {"precision": recorded["precision"] | {"mkldnn.matmul": "bf16"}}
    assert judge(recorded, recorded).reasons == ()
    assert judge(recorded, now).reasons == ("precision: saved 'full', here 'mkldnn.matmul=bf16'",)

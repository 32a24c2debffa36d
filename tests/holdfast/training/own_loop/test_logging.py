"""A number that a loop logs as None is left out of the record."""

from pathlib import Path

from holdfast import RunConfig
from holdfast.config import Determinism
from holdfast.training import Training, run_program, steps
from holdfast.training.recording import read_lines

LOOP = """import torch
from torch import nn
import holdfast


def train(run: holdfast.Run) -> None:
    model = nn.Linear(1, 1)
    run.keep(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(per_epoch=4):
        step.log(loss=1.0, decay=None if step.number < 2 else 0.5)
"""


def test_none_is_left_out_of_the_record_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "logs_none.py").write_text(LOOP)
    config = RunConfig(
        recipe=f"{tmp_path}/logs_none.py:train", run="run", store=str(tmp_path), epochs=1,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip
    found: list[Training] = []

    def serve(training: Training):  # type: ignore[no-untyped-def]
        found.append(training)
        yield from steps(training, 4, lambda: False)

    run_program(config, serve)
    lines = read_lines(found[0])
    assert [line.get("logged", {}) for line in lines] == [{}, {}, {"decay": 0.5}, {"decay": 0.5}]
    place = f"{tmp_path}/logs_none.py:10: "
    assert found[0].record.warnings == [f"{place}run.log(decay=None): left out of this step's record"]

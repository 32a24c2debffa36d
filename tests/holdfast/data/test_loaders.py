"""The workers of a DataLoader of the user's own: how many there are, what they do, and when they end."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from holdfast.errors import RecipeError
from tests.conftest import COMMAND_WITHIN_S, ROOT, Engine
from tests.support.workers import SAMPLES, SIZE, Telling, begin, load, tell

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_process")]

PASS = SAMPLES // SIZE


def list_processes(batches: list[Tensor]) -> set[float]:
    return {sample[2].item() for batch in batches for sample in batch}


@pytest.mark.parametrize("persists", [True, False])
def test_workers_stay_for_the_next_pass_if_the_loader_says_so(persists: bool) -> None:
    loader = DataLoader(Telling(), SIZE, shuffle=True, num_workers=1, persistent_workers=persists)
    torch.manual_seed(1)
    found = load(loader, 1, 3 * PASS - 1)
    first, second, third = (list_processes(found[start : start + PASS]) for start in (0, PASS, 2 * PASS))
    assert (first == second == third) == persists
    torch.manual_seed(1)
    alone = load(loader, 0, 3 * PASS - 1)
    assert [batch[:, :2].tolist() for batch in found] == [batch[:, :2].tolist() for batch in alone]


def test_workers_that_stay_are_replaced_if_the_loop_changes_the_dataset() -> None:
    """As those of a run that resumes then would be."""
    data = Telling()
    batches = begin(DataLoader(data, SIZE, num_workers=1, persistent_workers=True), 1)
    found = []
    for level in (0, 0, 1, 1):
        data.set_epoch(level)
        found.append([next(batches)[1] for _ in range(PASS)])
    assert [batch[0, 4].item() for each in found for batch in each] == [0.0] * 2 * PASS + [1.0] * 2 * PASS
    first, second, third, fourth = map(list_processes, found)
    assert first == second != third == fourth


def test_workers_begin_as_those_of_the_loader_with_its_own_dataset() -> None:
    loader = DataLoader(Telling(), SIZE, num_workers=1, worker_init_fn=tell)
    assert [batch[0, 3].item() for batch in load(loader, 1, 2)] == [1.0, 1.0]
    assert load(loader, 0, 1)[0][0, 3].item() == 0.0


def test_a_process_ends_at_once_with_its_workers() -> None:
    """They ignore SIGTERM, for which multiprocessing would wait for ever."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.workers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaves\n", "")


@pytest.mark.parametrize("part", ["dataset", "collate_fn"])
def test_what_workers_cannot_be_given_is_refused(part: str) -> None:
    class Local(Telling):
        pass

    settings: dict[str, Any] = {"dataset": {"dataset": Local()}, "collate_fn": {"collate_fn": lambda samples: samples}}[
        part
    ]
    loader: Any = DataLoader(**{"dataset": Telling(), "batch_size": SIZE} | settings)
    with pytest.raises(
        RecipeError, match=r"the dataset and its functions can't be sent to loader workers: .*local"
    ) as found:
        load(loader, 1, 1)
    assert "compute.loader_workers = 0" in str(found.value.hint)


LOOP = """
import holdfast
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(run: holdfast.Run) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.keep(model=model, optimizer=optimizer)
    for step in run.steps(DataLoader(TensorDataset(torch.ones(8, 1)), 4, num_workers=3)):
        optimizer.zero_grad()
        model(step.batch[0]).mean().backward()
        optimizer.step()
"""
WARNING = (
    "warning: the DataLoader's num_workers = 3 is not used: compute.loader_workers = 0 loads its data in the rank;"
)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_attempt_warns_of_workers_that_are_not_used(engine: Engine, workers: int) -> None:
    (engine.folder / "loop.py").write_text(LOOP)
    done = engine.run(f"recipe={engine.folder}/loop.py:train", "epochs=1", f"compute.loader_workers={workers}")
    assert done.returncode == 0, done.stderr
    assert (WARNING in done.stderr) == (not workers)

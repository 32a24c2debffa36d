"""Before the first step a loop is told which of its variables begin anew after a resume inside an epoch."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.training.own_loop.hints import list_hints


class Run:
    def epochs(self, loader: object) -> Iterator[int]:
        raise NotImplementedError

    batches = steps = epochs


RUN, KEPT = Run(), object()
SGD = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

INDEX = [
    "if (i + 1) % 4 == 0:\n    optimizer.step()",
    "if i % 2:\n    continue",
    "scheduler.step(epoch + i / len(loader))",
    "rate = 0.1 * i\nfor group in optimizer.param_groups:\n    group['lr'] = rate",
    "loss = fit(model, batch) * (1 + i)\nloss.backward()",
    "w = i / 10\nmodel.weight.mul_(w)",
    "learn(model, sgd, batch * i)",
]
HARMLESS = [
    "if i % 100 == 0:\n    print(i, loss)",
    "run.log(loss=loss, index=i)",
    "loss.backward()\nrunning = running + loss.item()\nif i % 10 == 9:\n    print(running / 10)\n    running = 0.0",
    "bar.set_description(f'{i}: {loss}')\nif i % 500 == 0:\n    torch.save(model, 'model.pt')",
]


def find_hints(tmp_path: Path, source: str) -> list[str]:
    """Return the hints on a loop, without the file's folder."""
    path = tmp_path / "loop.py"
    path.write_text(source)
    seen: list[list[str]] = []

    def look() -> Any:
        frame = sys._getframe(1)
        seen.append([*list_hints([frame], lambda each: each is RUN, lambda each: each is KEPT)])
        raise StopIteration

    names = {"run": RUN, "kept": KEPT, "other": object(), "look": look, "sgd": SGD}
    exec(compile(source, str(path), "exec"), names)
    with pytest.raises(StopIteration):
        names["train"]()  # type: ignore[operator]
    return [each.removeprefix(f"{tmp_path}/") for each in seen[0]]


def write(inner: str, body: str, before: str = "pass", after: str = "pass") -> str:
    lines = ["def train():", "    look()", "    for epoch in run.epochs(loader):", textwrap.indent(before, " " * 8)]
    lines += [f"        for {inner}:", textwrap.indent(body, " " * 12), textwrap.indent(after, " " * 8)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("body", INDEX)
def test_an_index_on_which_training_depends_is_told_by_line(tmp_path: Path, body: str) -> None:
    (hint,) = find_hints(tmp_path, write("i, batch in enumerate(run.batches())", body))
    assert hint.startswith("loop.py:5: the index i begins at 0 again after a resume inside an epoch, and line ")
    assert hint.endswith("may depend on it: write enumerate(run.batches(), run.batch_number)")
    assert not find_hints(tmp_path, write("i, batch in enumerate(run.batches(), run.batch_number)", body))


@pytest.mark.parametrize("body", HARMLESS)
def test_an_index_that_is_only_shown_is_not_told(tmp_path: Path, body: str) -> None:
    assert not find_hints(tmp_path, write("i, batch in enumerate(run.batches())", body, before="running = 0.0"))


@pytest.mark.parametrize(
    ("inner", "before", "body", "after", "said"),
    [
        ("batch, more in zip(run.batches(), other)", "pass", "fit(model, more).backward()", "pass", "5: other begins"),
        ("batch in run.batches()", "h = None", "y, h = model(batch, h)\ny.mean().backward()", "pass", "4: h begins"),
        ("batch in run.batches()", "n = 0", "n += 1\nif n % 3 == 0:\n    optimizer.step()", "pass", "4: n begins"),
        ("batch in run.batches()", "it = iter(other)", "fit(model, next(it)).backward()", "pass", "4: it begins"),
        ("batch in run.batches()", "total = 0.0", "total += loss.item()", "plateau.step(total)", "4: total begins"),
        ("batch, more in zip(run.batches(), kept)", "pass", "fit(model, more).backward()", "pass", ""),
        ("batch in run.batches()", "total = 0.0", "total += loss.item()\nloss.backward()", "print(total)", ""),
        ("batch in run.batches()", "model.train()", "loss = fit(model, batch)\nloss.backward()", "s.step()", ""),
    ],
)
def test_a_value_that_begins_anew_is_told(
    tmp_path: Path, inner: str, before: str, body: str, after: str, said: str
) -> None:
    found = find_hints(tmp_path, write(inner, body, before, after))
    assert [each.startswith(f"loop.py:{said}") for each in found] == [True] * bool(said)

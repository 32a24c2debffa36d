"""Loops of a user's own, in this process: stopped and resumed anywhere they end on the same bytes."""

import inspect
import json
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Run
from holdfast.config import Determinism, RunConfig
from holdfast.errors import RecipeError
from holdfast.provenance.recorded import compare_built
from holdfast.store.local import LocalStore
from holdfast.training import Training, run_program, steps
from holdfast.training.built import describe_built
from tests.support import loops
from tests.support.loops import LOOPS, PER_EPOCH
from tests.support.trainings import content_id, find_lost, live, save_step

EPOCHS = 3
TOTAL = EPOCHS * PER_EPOCH


def make_config(folder: Path, loop: str, **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.loops:{loop}", run="r", store=str(folder), epochs=EPOCHS, settings=settings,
        determinism=Determinism(mode="fast"),
    )  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_stopped_anywhere_it_ends_on_the_same_bytes(tmp_path: Path, loop: str) -> None:
    config = make_config(tmp_path, loop)
    straight, _ = live(config, TOTAL)
    for cut in (1, 2, PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1, 2 * PER_EPOCH, TOTAL - 1):
        assert content_id(live(config, TOTAL, live(config, cut)[0])[0]) == content_id(straight), cut


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cut_at_every_step_ends_on_the_same_bytes(tmp_path: Path, loop: str) -> None:
    config = make_config(tmp_path, loop)
    saved = None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(live(config, TOTAL)[0])


def test_the_order_of_a_loader_is_its_own(tmp_path: Path) -> None:
    """The indices are those of the loader alone, drawn from the same generator."""
    import torch
    from torch.utils.data import DataLoader

    _, training = live(make_config(tmp_path, "own_loader"), 1)
    ours = training.batches._indices
    loader = DataLoader(list(range(loops.SAMPLES)), 4, shuffle=True, generator=torch.Generator().manual_seed(7))  # type: ignore[arg-type]
    assert ours == [batch.tolist() for batch in loader]


def test_numbers_that_a_step_logs_are_in_the_trail(tmp_path: Path) -> None:
    store, lines = LocalStore(str(tmp_path / "run")), []

    def serve(training: Training) -> Generator[None, None, None]:
        yield from steps(training, 4, lambda: False)
        saved = save_step(training, store)
        lines.extend(map(json.loads, store.read(f"{saved.path}/metrics.jsonl").splitlines()))

    run_program(make_config(tmp_path, "plain"), serve)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["logged"]["doubled"] == pytest.approx(2 * line["loss"]) for line in lines)
    assert [line["lrs"] for line in lines] == [[0.01]] * 4


def test_settings_are_the_functions_other_parameters(tmp_path: Path) -> None:
    _, training = live(make_config(tmp_path, "plain", lr=0.5), 1)
    assert training.lrs == [0.5]
    with pytest.raises(RecipeError, match=r"unknown key settings\.lrr"):
        live(make_config(tmp_path, "plain", lrr=0.5), 1)


def test_what_a_loop_forgets_is_found_with_its_line(tmp_path: Path) -> None:
    lines, first = inspect.getsourcelines(loops.forgets)
    number = {
        text: n for n, line in enumerate(lines, first) for text in ("best = min(best", "loss = learn(") if text in line
    }
    found = {each.name: each for each in find_lost(make_config(tmp_path, "forgets"), at=2)}
    assert found.keys() == {"average", "stream", "best", "x"}
    assert (found["average"].kind, found["stream"].kind) == ("Sequential", "Generator")
    assert found["best"].place == f"{loops.__file__}:{number['best = min(best']}: "
    assert found["x"].place == f"{loops.__file__}:{number['loss = learn(']}: "
    assert (found["x"].remedy, found["average"].remedy) == ("run.keep(x=x)", "run.keep(average=average)")


def test_attributes_that_a_loop_carries_are_found_unless_their_object_is_kept(tmp_path: Path) -> None:
    assert [each.name for each in find_lost(make_config(tmp_path, "forgets_attributes"), at=2)] == ["self.hidden"]


def test_the_line_that_keeps_the_attributes_of_self_works(tmp_path: Path) -> None:
    """It is ``run.keep(self=vars(self))``."""
    config = make_config(tmp_path, "counts_in_a_class")
    assert [(each.name, each.remedy) for each in find_lost(config, at=2)] == [("self.count", loops.KEEPS_SELF)]
    assert not find_lost(config.model_copy(update={"settings": {"keeps_self": True}}), at=2)


def test_an_object_with_a_new_attribute_is_kept_itself(tmp_path: Path) -> None:
    found = find_lost(make_config(tmp_path, "attaches_an_attribute"), at=2)
    assert [(each.name, each.remedy) for each in found] == [("self", "run.keep(self=self)")]


def test_the_constants_of_a_loop_are_on_record(tmp_path: Path) -> None:
    built = []
    for level in (0.1, 0.2):
        _, training = live(make_config(tmp_path, "reads_constants", level=level), 1)
        found = describe_built(training)
        built.append({name: value for name, value in found.items() if name.startswith("loop.variables.")})
    names = {f"loop.variables.{name}" for name in ("clip", "warmup", "kind", "best")}
    assert built[0].keys() == built[1].keys() == names, "neither what a step changes, nor what a process decides"
    changed = [each.name for each in compare_built(*built, is_upgraded=False)]
    assert changed == ["built.loop.variables.clip", "built.loop.variables.warmup"]


def test_another_object_in_the_place_of_a_kept_one_is_refused(tmp_path: Path) -> None:
    line = next(n for n, text in enumerate(inspect.getsource(loops).splitlines(), 1) if "x + queue[:5]" in text)
    message = rf"loops.py:{line}: queue is kept, but step 1 has replaced it with a different object"
    with pytest.raises(RecipeError, match=message):
        live(make_config(tmp_path, "replaces"), 2)


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_replaced_object_that_no_step_looks_for_is_refused_before_the_save(tmp_path: Path, is_planned: bool) -> None:
    config, trained = make_config(tmp_path, "replaces", first=6), []

    def serve(training: Training) -> Generator[None, None, None]:
        for _ in steps(training, 7 if is_planned else TOTAL, lambda: training.progress.step == 7):
            trained.append(training.progress.step)
            yield
        raise AssertionError("the state would be saved now")

    with pytest.raises(
        RecipeError, match="queue is kept, but one of the steps 5 to 7 has replaced it with a different object"
    ):
        run_program(config, serve)
    assert trained == [*range(7)]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_keeps_all_loses_nothing(tmp_path: Path, loop: str) -> None:
    assert not find_lost(make_config(tmp_path, loop), at=2)


def line_of(text: str) -> str:
    """Return the file and line of a statement in the loop with a mistake."""
    lines, first = inspect.getsourcelines(loops.wrong)
    number = next(number for number, line in enumerate(lines, first) if text in line)
    return f"{Path(loops.__file__)}:{number}: "


@pytest.mark.parametrize(
    ("how", "at", "message"),
    [
        ("nothing", "def wrong", "the recipe's function returned, but trained no step"),
        ("keeps nothing", "for step in run.steps", "the loop begins without run.keep"),
        ("number", "run.keep(model=model, opt", r"run\.keep\(best=\.\.\.\): 1\.0 can't be changed in place"),
        ("none", "run.keep(model=model, opt", r"run\.keep\(generator=\.\.\.\): None can't be changed in place"),
        ("object", "run.keep(model=model, opt", r"run\.keep\(thing=\.\.\.\): expected an object with state_dict"),
        ("shared", "for step in run.steps", "the optimizers 'optimizer' and 'other' step the same parameter"),
        ("twice kept", "run.keep(model=model)", r"run\.keep\(model=\.\.\.\): the name is taken"),
        ("plain iterator", "run.steps([draw()])", "a resume can't restore the position of a list"),
        ("no batch", "run.steps(DataLoader", "the loader yields no batch"),
        ("logs early", "run.log(loss=1.0)", r"run\.log\(\.\.\.\) was called outside the loop"),
        ("shuffles", "shuffle=True", r"run\.batches\(\): unknown option shuffle"),
        ("other data", "in run.batches(DataLoader", r"run\.batches\(\.\.\.\) has different data than run\.epochs"),
        ("no length", "for step in run.steps", "the length of an epoch isn't known"),
        ("breaks", "def wrong", "the loop was left in step 3 of 18"),
        ("keeps late", "run.keep(late={})", r"run\.keep\(\.\.\.\) was called after the first step"),
        ("logs a vector", "run.log(loss=torch.ones(2))", r"expected a number, found a Tensor of shape \(2,\)"),
        ("no data", "print(step.batch)", r"step\.batch: run\.steps\(\.\.\.\) has no data"),
        ("too many batches", "for step in run.steps", "step 1 took 2 batches, expected 1"),
        ("second loop", "for _ in run.steps", r"run\.steps\(\.\.\.\) was called twice"),
    ],
)
def test_a_mistake_is_one_line_with_the_users_file_and_line(tmp_path: Path, how: str, at: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        live(make_config(tmp_path, "wrong", how=how), TOTAL)
    assert refused.value.message.startswith(line_of(at))


def test_code_at_an_epochs_beginning_may_change_weights(tmp_path: Path) -> None:
    config = make_config(tmp_path, "resets", how="changes weights")
    straight = content_id(live(config, TOTAL)[0])
    for cut, saves_first in [(2, False), (PER_EPOCH, True), (PER_EPOCH, False), (PER_EPOCH + 2, False)]:
        saved, _ = live(config, cut, saves_first=saves_first)
        assert content_id(live(config, TOTAL, saved)[0]) == straight, (cut, saves_first)


def test_a_loop_over_batches_that_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the inner loop was left in step 1, before the end of epoch 1"):
        live(make_config(tmp_path, "resets", how="breaks"), TOTAL)


def test_an_error_of_the_loop_passes_through(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a mistake"):
        live(make_config(tmp_path, "wrong", how="raises"), TOTAL)


def test_the_wrong_loop_without_a_mistake_is_right(tmp_path: Path) -> None:
    assert live(make_config(tmp_path, "wrong", how=""), TOTAL)[1].progress.step == TOTAL


class Episodes:
    """An environment with a stamp that no rule recognises as a clock's reading."""

    def __init__(self) -> None:
        self.position, self.stamp = torch.zeros(3), object_stamp()


def object_stamp() -> str:
    return uuid.uuid4().hex


class Wrapped:
    def __init__(self) -> None:
        self.env, self.policy = Episodes(), nn.Linear(3, 1)


def leaving_out(run: Run, names: tuple[str, ...]) -> None:
    env = Wrapped()
    optimizer = torch.optim.SGD(env.policy.parameters(), lr=0.1)
    run.keep(policy=env.policy, optimizer=optimizer, env=env, state={"stamp": object_stamp()}, leave_out=(*names,))
    for step in run.steps(per_epoch=PER_EPOCH):
        env.env.position, env.env.stamp = env.env.position + torch.randn(3), object_stamp()
        loss = env.policy(env.env.position).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)


def test_attributes_that_are_left_out_are_neither_saved_nor_compared(tmp_path: Path) -> None:
    def configure(*names: str) -> RunConfig:
        config = make_config(tmp_path, "leaving_out", names=[*names])
        return config.model_copy(update={"recipe": f"{__name__}:leaving_out"})

    for names in (("stamp", "policy"), ("stamp",)):  # the policy is kept by its own name in any case
        config = configure(*names)
        straight, _ = live(config, TOTAL)
        assert content_id(live(config, TOTAL, live(config, PER_EPOCH + 1)[0])[0]) == content_id(straight)
    with pytest.raises(RecipeError, match=r"leave_out=\.\.\.\): none of these objects has an attribute polic$"):
        live(configure("stamp", "policy", "polic"), 1)

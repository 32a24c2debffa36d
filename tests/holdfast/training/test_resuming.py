"""A resume restores the saved state or refuses to train. The run passes over one bad checkpoint; two stop it."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Recipe, checkpoint, state
from holdfast.attempt import Line
from holdfast.checkpoint import Payload
from holdfast.errors import Check, CheckpointDamaged, ConfigDrift, GateTripped, HoldfastError, RecipeError, StateError
from holdfast.journal import Commit, Journal
from holdfast.keeping.verification import verify_run
from holdfast.store.local import LocalStore
from holdfast.training import Gate, Resumed, Training, capturing, resume
from holdfast.training.recording import read_lines
from tests.support import varied
from tests.support.makers import make_line, save_next
from tests.support.makers import train as commit_next
from tests.support.trainings import Saved, make, save_state, train_to

pytestmark = pytest.mark.usefixtures("same_process")

STEPS = 8  # inside an epoch


def resume_from(training: Training, saved: Saved, how: Any = "exact", tolerance: float = 0.0) -> Resumed:
    return resume(training, *saved, Gate(how, tolerance), lambda done, total: None)


def content(payload: Payload) -> bytes:
    return b"".join(map(bytes, checkpoint.serialize(payload)))


@pytest.fixture
def averaged(tmp_path: Path) -> Saved:
    """Build a recipe with dropout, batch norm, two groups, and an average of the weights among its extras."""
    training = make(tmp_path, "tests.support.varied:averaged", schedule="plateau")
    train_to(training, STEPS)
    return save_state(training, tmp_path)


# ---- what is resumed is what was saved


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("averaged", {"schedule": "plateau"}),
        ("pythonic", {"optimizer": "sgd", "schedule": "step"}),
        ("streamed", {"keeps_position": True}),
        ("streamed", {"keeps_position": False}),
    ],
)
def test_a_resumed_run_ends_on_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path, recipe: str, settings: dict[str, Any]
) -> None:
    training = make(tmp_path, f"tests.support.varied:{recipe}", **settings)
    train_to(training, STEPS)
    saved = save_state(training, tmp_path)
    train_to(training, 2 * STEPS)
    lines = read_lines(training)
    expected = content(state.to_payload(capturing.capture(training)))
    for again in (make(tmp_path, f"tests.support.varied:{recipe}", **settings), training):
        random.seed(9)
        resumed = resume_from(again, saved)
        assert (resumed.step, resumed.taken_over, resumed.note) == (STEPS, [], "")
        again.record.lines = []
        train_to(again, 2 * STEPS)
        assert read_lines(again) == lines
        assert content(state.to_payload(capturing.capture(again))) == expected


def test_metadata_has_the_cost_of_reading_a_stream_again(tmp_path: Path) -> None:
    training = make(tmp_path, "tests.support.varied:streamed", keeps_position=False)
    train_to(training, STEPS)
    first = save_state(training, tmp_path)
    assert first[1].replayed is None
    again = make(tmp_path, "tests.support.varied:streamed", keeps_position=False)
    resume_from(again, first)
    train_to(again, STEPS + 1)
    replayed = save_state(again, tmp_path)[1].replayed
    assert replayed is not None
    assert (replayed["micro_batches"], set(replayed)) == (STEPS, {"micro_batches", "seconds"})


# ---- what was forgotten, overwritten or taken from elsewhere trips the gate


def grow_weight(training: Training) -> None:
    next(training.model.parameters()).data[0, 0] += 1e-6


def grow_buffer(training: Training) -> None:
    training.model[1].num_batches_tracked += 1


def grow_moment(training: Training) -> None:
    training.optimizer.state[next(training.model.parameters())]["exp_avg_sq"][0, 0] += 1e-6


def grow_rate(training: Training) -> None:
    """Change the rate as a scheduler does that is built, or loaded, after the optimizer."""
    training.optimizer.param_groups[1]["lr"] *= 1.001


def step_warmup(training: Training) -> None:
    training.schedulers[0].last_epoch += 1


def forget_best(training: Training) -> None:
    training.schedulers[1].best = float("inf")


def make_scaler(training: Training) -> None:
    training.accelerator.scaler = torch.amp.GradScaler("cpu")


def grow_average(training: Training) -> None:
    training.recipe.extras["average"].mean["0.bias"][0] += 1e-6  # type: ignore[attr-defined]


def forget_losses(training: Training) -> None:
    training.progress.recent_losses = []


def count_step(training: Training) -> None:
    training.progress.step += 1


def advance(training: Training, draw: Callable[..., Any], *arguments: Any) -> None:
    with training.generators.training():
        draw(*arguments)


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (grow_weight, "model.0.weight"),
        (grow_buffer, "model.1.num_batches_tracked"),
        (grow_moment, "optimizer.state.0.weight.exp_avg_sq"),
        (grow_rate, "optimizer.param_groups.1.lr"),
        (step_warmup, "schedulers.0.last_epoch"),
        (forget_best, "schedulers.1.best"),
        (make_scaler, "scaler"),
        (grow_average, "extras.0.average.0.bias"),
        (lambda training: advance(training, random.random), "rng.0.python.1"),
        (lambda training: advance(training, np.random.random), "rng.0.numpy.state.pos"),
        (lambda training: advance(training, torch.rand, ()), "rng.0.torch"),
        (forget_losses, "progress.recent_losses"),
        (count_step, "progress.step"),
    ],
    ids=[
        "weight", "buffer", "moment", "rate", "scheduler", "plateau", "scaler", "extra", "python", "numpy", "torch",
        "losses", "step",
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["exact", "tolerance", "record"])
def test_a_value_altered_during_the_restore_is_named(
    tmp_path: Path, averaged: Saved, monkeypatch: pytest.MonkeyPatch, alter: Callable[[Training], None], named: str,
    how: str,
) -> None:  # fmt: skip
    """The gate refuses it in every mode: neither another machine nor a change on purpose explains it."""
    training = make(tmp_path, "tests.support.varied:averaged", schedule="plateau")
    resume_from(training, averaged, how, 1.0)
    restore = capturing.restore

    def restore_and_alter(training: Training, saved: dict[str, Any]) -> None:
        restore(training, saved)
        alter(training)

    monkeypatch.setattr(capturing, "restore", restore_and_alter)
    with pytest.raises(GateTripped, match="after the checkpoint was restored, ") as caught:
        resume_from(training, averaged, how, 1.0)
    assert caught.value.data["check"] == "state"
    different = caught.value.data["different"]
    assert any(name.startswith(named) for name in different)
    assert {name.partition(".")[0] for name in different} == {named.partition(".")[0]}
    assert different[0] in str(caught.value)


def test_a_tensor_altered_by_the_models_own_loading_is_named(tmp_path: Path) -> None:
    """The gate compares with the saved tensors, not with the altered ones."""
    before = make(tmp_path, "tests.support.varied:pythonic")
    train_to(before, STEPS)
    saved = save_state(before, tmp_path)
    training = make(tmp_path, "tests.support.varied:pythonic")
    model = training.accelerator.unwrap_model(training.model)
    model.register_load_state_dict_pre_hook(lambda module, state, *_: next(iter(state.values())).add_(1))
    with pytest.raises(GateTripped, match="after the checkpoint was restored, model"):
        resume_from(training, saved, "record")


@pytest.mark.parametrize("name", ["model", "optimizer", "schedulers", "extras", "rng", "progress"])
def test_a_component_that_is_not_restored_is_named(
    tmp_path: Path, averaged: Saved, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The whole component stays as it was built."""
    training = make(tmp_path, "tests.support.varied:averaged", schedule="plateau")
    own = state.from_payload(state.to_payload(capturing.capture(training)))
    restore = capturing.restore
    monkeypatch.setattr(capturing, "restore", lambda training, saved: restore(training, {**saved, name: own[name]}))
    with pytest.raises(GateTripped) as caught:
        resume_from(training, averaged, "record")
    assert {each.partition(".")[0] for each in caught.value.data["different"]} == {name}


def test_a_message_shows_only_some_of_many_names(
    tmp_path: Path, averaged: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make(tmp_path, "tests.support.varied:averaged", schedule="plateau")
    monkeypatch.setattr(capturing, "restore", lambda training, saved: None)
    with pytest.raises(
        GateTripped, match=r"extras.0.average.0.bias, \S+, \S+ and \d\d more differ from the saved state"
    ):
        resume_from(training, averaged)


def test_a_model_whose_output_has_changed_trips_the_probe(tmp_path: Path, averaged: Saved) -> None:
    """Every restored byte is the saved one, and yet the model's output differs."""
    training = make(tmp_path, "tests.support.varied:averaged", schedule="plateau")
    payload, metadata = averaged
    loss = metadata.probe.values["loss"]
    assert loss is not None
    other = metadata.probe.model_copy(update={"sha256": "0" * 64, "values": {"loss": loss * 1.01}})
    changed = payload, metadata.model_copy(update={"probe": other})
    said = r"restored exactly, but the probe gives a different result .*: the model, "
    said += r".* reads state that no checkpoint has"
    with pytest.raises(GateTripped, match=said) as caught:
        resume_from(training, changed, "exact", 1.0)
    assert (caught.value.data["check"], caught.value.data["step"]) == ("results", STEPS)
    said = (
        r"the probe differs by 0.0\d+, relative .*; 1e-06 is allowed: either .*, or this machine computes less exactly"
    )
    with pytest.raises(GateTripped, match=said) as caught:
        resume_from(training, changed, "tolerance", 1e-6)
    assert caught.value.data["check"] == "results"
    assert resume_from(training, changed, "tolerance", 0.5).note == ""
    assert resume_from(training, changed, "record").note.startswith("the probe gives a different result")


# ---- what doesn't fit


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda saved: saved["model"].pop("0.bias"), r"(?s)the saved model doesn't fit .*Missing .*0\.bias"),
        (
            lambda saved: saved["model"].update({"0.bias": torch.zeros(3)}),
            r"(?s)the saved model doesn't fit .*mismatch for 0\.bias",
        ),
        (lambda saved: saved["optimizer"]["param_groups"].pop(), "the saved optimizer doesn't fit"),
        (lambda saved: saved["schedulers"].pop(), "the saved list of schedulers doesn't fit .* 1 were saved"),
        (
            lambda saved: saved.update(scaler={"scale": 1.0}),
            "the saved scaler doesn't fit .* the object is missing from the recipe",
        ),
        (lambda saved: saved["extras"][0].pop("average"), "the saved extra average doesn't fit .* missing"),
        (lambda saved: saved["extras"][0].update(other={}), "the saved extra other doesn't fit .* registers no object"),
        (lambda saved: saved["progress"].pop("step"), "the saved progress doesn't fit .* 'step'"),
    ],
)
def test_a_component_that_does_not_fit_is_named(
    tmp_path: Path, averaged: Saved, edit: Callable[[Any], Any], said: str
) -> None:
    saved = state.from_payload(averaged[0])
    edit(saved)
    with pytest.raises(StateError, match=said):
        resume_from(
            make(tmp_path, "tests.support.varied:averaged", schedule="plateau"), (state.to_payload(saved), averaged[1])
        )


def test_an_object_may_refuse_a_state_itself(tmp_path: Path) -> None:
    """Its message and its hint reach the user as they are: the recipe's code has not changed."""

    class Layout:
        def state_dict(self) -> dict[str, Any]:
            return {"ranks": 2}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            raise RecipeError(f"the run was trained with ranks = {saved['ranks']}", hint="compute.ranks = 2")

    with pytest.raises(RecipeError, match=r"^the run was trained with ranks = 2$") as caught:
        capturing.load("extra layout", Layout(), Layout().state_dict())
    assert caught.value.hint == "compute.ranks = 2"


def by_environment() -> Recipe:
    """Build a recipe whose learning rate comes from the environment, which isn't on record."""
    recipe = varied.pythonic(optimizer="sgd")
    recipe.optimizer.param_groups[0]["lr"] = float(os.environ["TEST_LR"])
    recipe.schedule = None
    return recipe


def test_built_values_that_change_without_a_known_cause_are_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_LR", "0.1")
    training = make(tmp_path, f"{__name__}:by_environment")
    train_to(training, STEPS)
    saved = save_state(training, tmp_path)
    resume_from(make(tmp_path, f"{__name__}:by_environment"), saved)
    monkeypatch.setenv("TEST_LR", "0.2")
    for how in ("exact", "tolerance"):
        with pytest.raises(ConfigDrift, match=r"the recipe builds different values of optimizer.0.lr than") as caught:
            resume_from(make(tmp_path, f"{__name__}:by_environment"), saved, how, 1.0)
        assert "resume.accept_drift" in caught.value.hint
        assert caught.value.data["fields"] == {"optimizer.0.lr": []}
    changed = make(tmp_path, f"{__name__}:by_environment")
    assert resume_from(changed, saved, "record").taken_over == ["optimizer.0.lr"]
    assert changed.lrs == [0.2]


# ---- the line: an unhealthy one is passed over, two are not its fault, and no other refusal is


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path))


@pytest.fixture
def line(store: LocalStore) -> Line:
    """Return a line of three commits."""
    line = make_line(store)
    for _ in range(3):
        commit_next(line)
    return line


def unhealthy(path: str) -> GateTripped:
    """Return the gate's refusal of an unhealthy checkpoint."""
    return GateTripped(f"{path} is not healthy", check="health")


def refuse(*paths: str, tried: list[str] | None = None) -> Callable[[Commit], HoldfastError | None]:
    """Return a restore function whose gate refuses these checkpoints."""

    def restore(commit: Commit) -> HoldfastError | None:
        if tried is not None:
            tried.append(commit.path)
        return unhealthy(commit.path) if commit.path in paths else None

    return restore


def files(store: LocalStore) -> dict[str, bytes]:
    """Return the bytes of all files of the run."""
    root = Path(store.url)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_checkpoint_that_trips_is_quarantined_and_its_parent_is_resumed(line: Line, store: LocalStore) -> None:
    tried: list[str] = []
    line.resume(refuse("epoch-0003", tried=tried))
    assert line.head
    assert (line.head.number, line.next_number, line.journal.numbers("quarantine")) == (2, 4, [3])
    assert tried == ["epoch-0003", "epoch-0003", "epoch-0002"]  # the newest is tried twice
    assert line.journal.quarantine_reasons()[0].endswith("the gate: epoch-0003 is not healthy")
    latest = line.journal.read_latest()
    assert latest
    assert latest.commit == 2
    again = commit_next(line, size_bytes=96)
    assert (again.number, again.parent, again.path) == (4, 2, "epoch-0003.2")
    assert verify_run(Journal(store, "run")).ok


def test_a_checkpoint_that_passes_at_the_second_try_is_not_quarantined(line: Line) -> None:
    answers: list[HoldfastError | None] = [unhealthy("for once"), None]
    line.resume(lambda commit: answers.pop(0))
    assert line.head
    assert (line.head.number, answers, line.journal.numbers("quarantine")) == (3, [], [])


def test_a_second_trip_in_a_row_stops_the_run_and_changes_nothing(line: Line, store: LocalStore) -> None:
    before = files(store)
    tried: list[str] = []
    with pytest.raises(GateTripped) as caught:
        line.resume(refuse("epoch-0003", "epoch-0002", tried=tried))
    assert str(caught.value).splitlines() == [
        "run 'run' has no checkpoint that passes the gate:",
        "  commit 3: epoch-0003 is not healthy",
        "  commit 2: epoch-0002 is not healthy",
    ]
    assert caught.value.exit_code == 2
    assert "epoch-0001" not in tried
    assert files(store) == before
    line.resume(refuse())  # the cause is mended
    assert line.head
    assert line.head.number == 3


def test_a_trip_of_the_only_checkpoint_is_no_fresh_start(store: LocalStore) -> None:
    line = make_line(store)
    commit_next(line)
    before = files(store)
    with pytest.raises(GateTripped, match="commit 1: epoch-0001 is not healthy"):
        line.resume(refuse("epoch-0001"))
    assert files(store) == before


@pytest.mark.parametrize("check", ["state", "results"])
def test_a_checkpoint_that_verifies_and_gives_something_else_stops_the_run(
    line: Line, store: LocalStore, check: Check
) -> None:
    """The older ones would pass, and they are not even tried: the run would go on with other results."""
    before = files(store)
    tried: list[str] = []

    def restore(commit: Commit) -> HoldfastError | None:
        tried.append(commit.path)
        return GateTripped("the gradient is another one", check=check) if commit.number == 3 else None

    with pytest.raises(GateTripped, match="the gradient is another one") as caught:
        line.resume(restore)
    assert (caught.value.exit_code, caught.value.reason, tried) == (2, "refused", ["epoch-0003"])
    assert files(store) == before, "nothing is quarantined"


def test_an_unhealthy_checkpoint_is_not_quarantined_if_the_one_before_gives_something_else(
    line: Line, store: LocalStore
) -> None:
    before = files(store)
    with pytest.raises(GateTripped, match="another one"):
        line.resume(lambda commit: unhealthy("three") if commit.number == 3 else GateTripped("another one"))
    assert files(store) == before


def test_two_trips_with_damage_between_them_stop_the_run(line: Line, store: LocalStore) -> None:
    answers = {
        "epoch-0003": unhealthy("three"), "epoch-0002": CheckpointDamaged("two"), "epoch-0001": unhealthy("one"),
    }  # fmt: skip
    with pytest.raises(GateTripped, match=r"(?s)commit 3: three.*commit 1: one"):
        line.resume(lambda commit: answers[commit.path])
    assert line.journal.numbers("quarantine") == [2]


def test_a_trip_stops_the_run_if_all_other_checkpoints_are_damaged(line: Line) -> None:
    with pytest.raises(GateTripped, match="commit 3"):
        line.resume(
            lambda commit: unhealthy("three") if commit.number == 3 else CheckpointDamaged(f"not {commit.path}")
        )
    assert line.journal.numbers("quarantine") == [1, 2]


@pytest.mark.parametrize("number", [1, 2])
def test_the_folder_of_a_tripped_checkpoint_is_not_adopted(store: LocalStore, number: int) -> None:
    """The folder is complete and its parent is the head now, so it looks like an orphan of dead ranks."""
    line = make_line(store)
    for _ in range(number):
        commit_next(line)
    path = f"epoch-{number:04d}"
    if number == 1:
        with pytest.raises(GateTripped):
            line.resume(refuse(path))
    else:
        line.resume(refuse(path))
        head = make_line(store).head
        assert head
        assert head.number == 1
    assert line.journal.numbers("commits") == list(range(1, number + 1))


def test_an_adopted_orphan_that_trips_is_passed_over(line: Line, store: LocalStore) -> None:
    saved = save_next(line)
    line.resume(refuse(saved.path))
    assert line.head
    assert (line.head.number, line.journal.numbers("commits"), line.journal.numbers("quarantine")) == (
        3, [1, 2, 3, 4], [4],
    )  # fmt: skip
    head = make_line(store).head
    assert head
    assert head.number == 3
    assert line.journal.newest_number() == 4


def test_the_next_resume_forgets_a_trip(line: Line) -> None:
    """A checkpoint that passes later was not to blame for the trip."""
    with pytest.raises(GateTripped):
        line.resume(refuse("epoch-0003", "epoch-0002"))
    line.resume(refuse("epoch-0003"))
    assert line.head
    assert (line.head.number, line.journal.numbers("quarantine")) == (2, [3])

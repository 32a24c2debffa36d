"""A Trainer under a run, in this process: stopped and resumed anywhere it ends on the same bytes."""

import inspect
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState

from holdfast.config import Compute, Determinism, RunConfig
from holdfast.errors import ConfigError, RecipeError
from holdfast.store.local import LocalStore
from holdfast.training import Gate, Training, resume, run_program, set_skipped, steps
from tests.support import hugging
from tests.support.hugging import EPOCHS, PER_EPOCH, TOTAL
from tests.support.trainings import Saved, save_state, save_step

pytestmark = pytest.mark.extras


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    hugging.seen.clear()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def make_config(folder: Path, epochs: int = EPOCHS, function: str = "train", **settings: Any) -> RunConfig:
    return RunConfig(
        recipe=f"tests.support.hugging:{function}", run="r", store=str(folder), epochs=epochs,
        settings={"output_dir": str(folder / "out"), **settings}, determinism=Determinism(mode="fast"),
        compute=Compute(device="cpu"),
    )  # fmt: skip


def live(config: RunConfig, stop: int, saved: Saved | None = None, lose: int = 0) -> tuple[Saved, Training]:
    """Train from a checkpoint, or from the beginning, to a step. Return the checkpoint there.

    Args:
        lose: the steps that are trained after the checkpoint, and lost.
    """
    found: list[tuple[Saved, Training]] = []

    def serve(training: Training) -> Generator[None, None, None]:
        if saved is not None:
            resume(training, *saved, Gate("exact"), lambda *skipped: None)
        set_skipped(training, config.skip)
        yield from steps(training, stop, lambda: False)
        found.append((save_state(training, Path(config.store)), training))
        yield from steps(training, stop + lose, lambda: False)

    run_program(config, serve)
    return found[0]


def content_id(saved: Saved) -> str:
    return saved[1].checkpoint_sha256


# Further arguments of the Trainer, and the run's epochs.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "steps": ({"max_steps": 10, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True}, 1),
    "plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau", "logging_strategy": "epoch"}, EPOCHS),
    "saves": (
        {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 1,
         "metric_for_best_model": "loss", "load_best_model_at_end": True, "save_total_limit": 1},
        EPOCHS,
    ),
    "global order": ({"accelerator_config": {"use_seedable_sampler": False}, "eval_strategy": "no"}, EPOCHS),
    "in order": ({"train_sampling_strategy": "sequential", "include_num_input_tokens_seen": "all"}, EPOCHS),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_anywhere_it_ends_on_the_same_bytes(tmp_path: Path, variant: str) -> None:
    arguments, epochs = VARIANTS[variant]
    config = make_config(tmp_path, epochs, arguments=arguments)
    total = arguments.get("max_steps", TOTAL)
    saved = None
    for stop in (PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1, total):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(live(config, total)[0])


def test_a_cut_at_every_step_ends_on_the_same_bytes(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    saved = None
    for stop in range(1, TOTAL + 1):
        saved, _ = live(config, stop, saved)
    assert saved is not None
    assert content_id(saved) == content_id(live(config, TOTAL)[0])


def test_callbacks_see_what_those_of_the_trainer_alone_see(tmp_path: Path) -> None:
    trainer = hugging.make(str(tmp_path / "alone"), {})
    result = trainer.train()
    alone = [*hugging.seen, ("result", result.global_step, {"loss": result.training_loss})]
    hugging.seen.clear()
    live(make_config(tmp_path), TOTAL)
    assert hugging.seen == alone


def test_callbacks_see_the_same_when_steps_are_lost(tmp_path: Path) -> None:
    """Records after a checkpoint are repeated when steps are lost, and the beginning of the epoch in each life."""
    config = make_config(tmp_path, arguments={"eval_on_start": True})
    live(config, TOTAL)
    straight = [*hugging.seen]
    hugging.seen.clear()
    saved = None
    for stop in (2, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH, TOTAL):
        saved, _ = live(config, stop, saved, lose=min(3, TOTAL - stop))
    resumed = [each for number, each in enumerate(hugging.seen) if each not in hugging.seen[:number]]
    beginnings = [each for each in resumed if each[0] == "epoch_begin" and each not in straight]
    assert [each for each in resumed if each not in beginnings] == straight
    assert {step for _, step, _ in beginnings} <= {2, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH}


@pytest.mark.extras("peft")
def test_the_importance_of_adaloras_ranks_is_restored(tmp_path: Path) -> None:
    """Stopped while the ranks are chosen, and after the last choice, whose pattern later steps apply."""
    config = make_config(tmp_path, function="adapts")
    straight = content_id(live(config, TOTAL)[0])
    for cut in (3, TOTAL - 2):
        assert content_id(live(config, TOTAL, live(config, cut)[0])[0]) == straight, cut


@pytest.mark.extras("peft")
def test_an_earlier_versions_checkpoint_of_adalora_continues_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, function="adapts")
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.training.kept.find_rank_allocators", lambda model: None)
        saved, _ = live(config, 3)
        before = content_id(live(config, TOTAL, saved)[0])
    assert content_id(live(config, TOTAL, saved)[0]) == before


def test_a_life_of_a_complete_run_trains_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    saved, _ = live(config, TOTAL)
    hugging.seen.clear()
    live(config, TOTAL, saved)
    assert [(event, step) for event, step, _ in hugging.seen] == [("result", TOTAL)]


def test_a_run_that_stops_ends_the_function(tmp_path: Path) -> None:
    live(make_config(tmp_path), PER_EPOCH)
    assert "result" not in {event for event, _, _ in hugging.seen}


def test_no_batch_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the run nor by workers of the Trainer's own loader."""
    config = make_config(tmp_path, arguments={"eval_strategy": "no", "dataloader_num_workers": 1})
    saved, _ = live(config, PER_EPOCH + 2)
    read: list[int] = []
    usual = hugging.Points.__getitem__
    monkeypatch.setattr(hugging.Points, "__getitem__", lambda self, index: read.append(index) or usual(self, index))
    monkeypatch.delattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter")
    live(config, TOTAL, saved)
    rest = hugging.SAMPLES - 2 * hugging.ACCUMULATED * hugging.BATCH_SIZE
    assert len(read) == rest + hugging.SAMPLES


def test_the_trail_has_the_losses_and_what_the_trainer_logs(tmp_path: Path) -> None:
    store, lines = LocalStore(str(tmp_path / "run")), []

    def serve(training: Training) -> Generator[None, None, None]:
        yield from steps(training, PER_EPOCH, lambda: False)
        saved = save_step(training, store)
        lines.extend(map(json.loads, store.read(f"{saved.path}/metrics.jsonl").splitlines()))

    run_program(make_config(tmp_path, arguments={"logging_steps": 1}), serve)
    logs = [numbers for event, _, numbers in hugging.seen if event == "log" and "loss" in numbers]
    assert [line["loss"] for line in lines] == pytest.approx([each["loss"] for each in logs])
    assert [line["grad_norm"] for line in lines] == pytest.approx([each["grad_norm"] for each in logs])
    (evaluated,) = [numbers for event, _, numbers in hugging.seen if event == "evaluate"]
    assert lines[-1]["logged"] == {"eval_loss": pytest.approx(evaluated["eval_loss"])}
    assert not any("logged" in line for line in lines[:-1])


def test_the_trainer_is_as_before_afterwards(tmp_path: Path) -> None:
    import transformers

    skip = transformers.trainer.skip_first_batches
    live(make_config(tmp_path), 1)
    assert transformers.trainer.skip_first_batches is skip


def line_of(text: str) -> str:
    """Return the file and line of a statement in the function with a mistake."""
    lines, first = inspect.getsourcelines(hugging.mistaken)
    number = next(number for number, line in enumerate(lines, first) if text in line)
    return f"{Path(hugging.__file__)}:{number}: "


@pytest.mark.parametrize(
    ("how", "arguments", "message"),
    [
        ("resumes by itself", {}, r"TrainingArguments\(resume_from_checkpoint=\.\.\.\) can't be resumed exactly"),
        ("", {"resume_from_checkpoint": "out"}, r"TrainingArguments\(resume_from_checkpoint=\.\.\.\) can't"),
        ("", {"enable_jit_checkpoint": True}, r"TrainingArguments\(enable_jit_checkpoint=\.\.\.\) can't"),
        ("deepspeed", {}, r"TrainingArguments\(deepspeed=\.\.\.\) can't be resumed exactly"),
        ("", {"auto_find_batch_size": True}, r"TrainingArguments\(auto_find_batch_size=\.\.\.\) can't"),
        ("", {"ignore_data_skip": True}, r"TrainingArguments\(ignore_data_skip=\.\.\.\) can't"),
        ("", {"bf16": True}, r"the Trainer trains in 'bf16', but compute\.mixed_precision = \"no\""),
        (
            "",
            {"num_train_epochs": 5},
            r"the Trainer trains 20 steps, 4 in an epoch, but the configuration has epochs = 3",
        ),
        ("", {"max_steps": 7}, r"the Trainer trains 7 steps, 4 in an epoch, but the configuration has epochs = 3"),
        ("stops early", {}, "EarlyStoppingCallback would end the run early, at a step that isn't known in advance"),
        ("stops", {}, "the Trainer ended after step 5, before the run's last step"),
        ("streams", {"max_steps": 12}, "a resume can't restore the position of a DataLoader over a stream"),
        ("is none", {}, r"expected a transformers\.Trainer, found a Net"),
    ],
)
def test_what_cannot_be_exact_is_refused_in_one_line(
    tmp_path: Path, how: str, arguments: dict[str, Any], message: str
) -> None:
    epochs = 1 if how == "streams" else EPOCHS
    with pytest.raises((RecipeError, ConfigError), match=message) as refused:
        live(make_config(tmp_path, epochs, "mistaken", how=how, arguments=arguments), TOTAL)
    assert refused.value.message.startswith(line_of("held.train("))
    assert refused.value.hint or how == "is none"


def test_steps_to_skip_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"step 3 can't be skipped: a Hugging Face Trainer counts its steps"):
        live(make_config(tmp_path).with_skip("3"), TOTAL)


def test_values_that_differ_each_time_are_left_out_by_name(tmp_path: Path) -> None:
    ids = [content_id(live(make_config(tmp_path, function="mistaken", how="measures"), 3)[0]) for _ in range(2)]
    assert ids[0] == ids[1]
    ids = [content_id(live(make_config(tmp_path, function="mistaken", how="marks"), 3)[0]) for _ in range(2)]
    assert ids[0] != ids[1]

"""The training loop: steps, the end of an epoch, and evaluation."""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from holdfast.checkpoint.departure import REHEARSED_STEPS
from holdfast.checkpoint.progress import EPOCHS_KEPT
from holdfast.checkpoint.shown import to_shown
from holdfast.errors import RecipeError
from holdfast.machine import heartbeats
from holdfast.machine.compiling import steady_new_compiler
from holdfast.machine.heartbeats import Phase
from holdfast.state import gather_whole
from holdfast.training.best import check_best
from holdfast.training.build import Training
from holdfast.training.checksums import undone_extras
from holdfast.training.probing import check_first_step
from holdfast.training.progress import Stage
from holdfast.training.recording import read_lines, record_step
from holdfast.training.restorable import check_beginning, check_changes, check_step
from holdfast.training.skipped_steps import pass_over
from holdfast.training.step_record import Unread, read_number
from holdfast.training.undisturbed import undisturbed

# Called with the finished step, its loss (None if a loop logs no loss), and the steps per second since `steps` began.
Report = Callable[[int, float | None, float], None]


def steps(
    training: Training, stop: int, is_stopping: Callable[[], bool], report: Report = lambda *done: None
) -> Iterator[None]:
    """Yield None before each step, for the caller to train it and set `StepRecord.trained`. Then record the step.

    For a step in ``training.program.skipped`` draw the batches without a yield, because they aren't trained.

    End when the run has ``stop`` completed steps, or when ``is_stopping``, called before each step, returns True. The
    training's random generators are active only while the caller trains.

    Raises:
        RecipeError: a step has made a change that a resume couldn't make again. It is raised in the step itself if the
            step is watched (see `StepRecord.is_watched`), and otherwise before the generator ends, so before a save.
    """
    began, first = time.monotonic(), training.progress.step
    if not first:
        check_beginning(training)
    if training.recipe.evaluate is None:
        check_best(training.config.retention.keep_best, ())
    while training.progress.step < stop and not is_stopping():
        heartbeats.begin(Phase.STEP, training.progress.step + 1)
        training.set_anneals()
        record, ranks = training.record, training.ranks
        is_skipped = training.progress.step + 1 in training.program.skipped
        record.has_parts = ranks.has_parts and not is_skipped and (record.is_detailed or not record.has_new_steps)
        record.is_watched = record.watches(training.progress.step + 1, stop)
        if training.gradients is not None:
            training.gradients.looks_at_all = record.is_watched
        record.drawn_from = training.generators.digest() if record.has_parts else ""
        if is_skipped:
            pass_over(training)
        else:
            training.stage = Stage.STEPPING
            training.generators.resume()
            if record.has_parts:
                with ranks.watching(training.recipe.model):
                    yield
            else:
                yield
            training.generators.pause()
        record_step(training)
        training.stage = Stage.RECORDED
        settle(training)
        step = training.progress.step
        if step == 1 and not is_skipped:
            with heartbeats.within(Phase.EVALUATING):
                check_first_step(training)
        if step % training.config.log.every == 0 or step == stop:
            speed = (step - first) / (time.monotonic() - began)
            report(step, read_lines(training)[-1].get("loss"), speed)
        elif step - first <= REHEARSED_STEPS:
            # The function also passes the trail to `note_lines`. If this rank dies, the trail is compared with that of
            # the new ranks.
            read_lines(training)
    if training.record.checked < training.progress.step:
        check_changes(training)


def settle(training: Training) -> None:
    """Finish a recorded step: after an epoch's last step end the epoch, and check that a resume can repeat the step."""
    step = training.progress.step
    if step % training.steps_per_epoch == 0:
        end_epoch(training)
    steady_new_compiler(training.config.determinism)
    if training.record.is_watched:
        check_step(training)
    training.stage = Stage.SETTLED


def train_step(training: Training) -> Unread:
    """Train one optimizer step of a recipe. Return the loss and other numbers of the step as tensors on the device."""
    recipe = training.recipe
    training.model.train()
    lrs, anneals = training.lrs, training.anneals
    training.synchronized.share_buffers()
    if recipe.step is not None:
        numbers, names = _take_own_step(training)
    else:
        numbers, names = _learn(training)
    training.schedulers.step()
    if recipe.after_step is not None:
        recipe.after_step()
    return Unread(training.progress.step + 1, numbers, lrs, anneals, names)


def _learn(training: Training) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train one step with the recipe's loss: backward passes, clipping and the optimizer's step.

    Returns: the mean loss of the micro-batches and the gradient's norm, and the names of the micro-batches.
    """
    accelerator, recipe, ranks = training.accelerator, training.recipe, training.ranks
    assert recipe.loss is not None
    names: list[str] = []
    for batch in ranks.take(training, names):
        with accelerator.autocast():
            loss = recipe.loss(training.model, batch)
        with ranks.exchanging():
            accelerator.backward(loss)
        ranks.note_loss(loss.detach().float())
    numbers = {"loss": ranks.mean_loss(), "grad_norm": clip(training).float()}
    ranks.begin_update()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return numbers, names


def _take_own_step(training: Training) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Call the recipe's own step with the next batch.

    Returns: the numbers that the recipe's step returned, and the name of the batch.
    """
    accelerator, step = training.accelerator, training.recipe.step
    assert step is not None
    name, batch = training.next_batch()
    with accelerator.autocast():
        found = step(batch)
    if found is None:
        raise RecipeError(
            "the recipe's step returned None",
            hint='return the loss, or a dict of numbers to record, such as {"loss": loss, "accuracy": accuracy}',
        )
    numbers = found if isinstance(found, Mapping) else {"loss": found}
    if training.gradients is not None:
        training.gradients.end_step()
    device = accelerator.device
    return {key: read_number(f"the step's {key}", value, device) for key, value in numbers.items()}, [name]


def clip(training: Training) -> torch.Tensor:
    """Scale the gradient down to the recipe's ``clip_norm``. Return the norm before scaling."""
    limit = math.inf if training.recipe.clip_norm is None else training.recipe.clip_norm
    return training.ranks.clip(list(training.model.parameters()), limit)


def end_epoch(training: Training) -> None:
    """Evaluate the model, add the epoch to the history and step the schedulers that need an epoch's loss."""
    progress = training.progress
    last = read_lines(training)[-1]
    training.stage = Stage.FOLLOWING
    anneals, (found, shown) = training.set_anneals(), evaluate_recipe(training)
    for name, value in shown.items():
        training.record.gallery.add(to_shown(name, value, progress.step, progress.step // training.steps_per_epoch))
    training.record.measured = {name: value for name, value in found.items() if training.recipe.is_measured(name)}
    metrics = {name: value for name, value in found.items() if name not in training.record.measured}
    known = {name for each in [*progress.history, {"metrics": metrics}] for name in each["metrics"]}
    if known:  # an evaluation may return no metrics in the first epochs
        check_best(training.config.retention.keep_best, known)
    last |= {name: value for name, value in (("metrics", metrics), ("measured", training.record.measured)) if value}
    if not training.recipe.has_own_loop:  # a user's own loop steps its schedulers itself
        training.schedulers.end_epoch(progress.avg_loss)
    entry = {"avg_loss": progress.avg_loss, "lrs": last["lrs"], "metrics": metrics, "anneals": anneals}
    progress.history = [*progress.history[1 - EPOCHS_KEPT :], entry]
    progress.epoch_loss_sum, progress.epoch_loss_steps = 0.0, 0


def evaluate_recipe(training: Training) -> tuple[dict[str, float], dict[str, str | bytes]]:
    """Evaluate the model. Return the metrics, texts and pictures. The caller has set the anneals for the next step.

    The model and the generators are restored after the evaluation. Changes of extras aren't undone, so that a recipe
    can keep its best score in an extra.

    Raises:
        RecipeError: the evaluation has changed a parameter's value.
    """
    if training.recipe.evaluate is None:
        return {}, {}
    model = training.recipe.model
    with (
        heartbeats.within(Phase.EVALUATING),
        undisturbed(model, training.optimizer, may_swap=True),
        training.generators.borrowed(),
        torch.no_grad(),
    ):
        found = training.recipe.evaluate(model)
        shown = {name: value for name, value in found.items() if isinstance(value, str | bytes)}
        return {name: float(gather_whole(value)) for name, value in found.items() if name not in shown}, shown


def repeat_evaluation(training: Training) -> tuple[dict[str, float], bool]:
    """Evaluate the model as `evaluate_recipe` does, and undo what the evaluation changes in the extras.

    Returns:
        the metrics; and whether the evaluation has changed no extra, so that a further evaluation computes the same
        metrics.
    """
    with undone_extras(training) as are_unchanged:
        metrics, _ = evaluate_recipe(training)
        return metrics, are_unchanged()

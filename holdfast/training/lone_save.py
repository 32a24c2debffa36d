"""The save by a single rank after another rank is lost: the rank restores the last completed step's state and saves it.

No collective is possible any more, so this rank needs everything for the checkpoint itself:

- Weights and the optimizer's state are the same in all ranks, and no step changes them before its gradients are summed.
  If a rank is lost before that, the sum fails in all ranks, and with it the step.
- If the ranks have a common state (`Cooperation.has_common_state`), all have the same generators and buffers after each
  step, and can undo a step. Otherwise each rank has its own generators, which are lost with the rank.
- For steps whose numbers aren't read yet, the names of the other ranks' samples are read from the data again.

A rank of a sharded model (FSDP2) has only a shard of the state, so it saves nothing. A rank whose state may be wrong
saves nothing either: for example, if the optimizer may have stepped. On GPUs every rank's state may be wrong, because a
GPU still computes the steps in its queue, and may continue with wrong sums after a collective was aborted.
"""

from dataclasses import replace

from holdfast.checkpoint import Saved
from holdfast.training.build import Training
from holdfast.training.loop import settle
from holdfast.training.progress import Stage
from holdfast.training.restorable import check_changes
from holdfast.training.saving import SaveRequest, begin_save


def go_back(training: Training) -> bool:
    """Restore the last completed step's state in this rank alone. Return False if the state may still differ.

    Raises:
        DeterminismError: the last step has switched determinism off.
    """
    training.ranks.is_alone = True
    if training.stage is Stage.STEPPING:
        return training.ranks.undo()
    if training.stage is Stage.RECORDED:
        settle(training)
    return training.stage is Stage.SETTLED


def save_alone(training: Training, request: SaveRequest) -> Saved | None:
    """Save the state after `go_back`, and wait until the checkpoint is durable.

    Args:
        request: what to save, with the seconds since the last save was begun.

    Returns:
        The checkpoint; None if there is no new step, or if this rank lacks the trail since the newest durable
        checkpoint.

    Raises:
        Unhealthy: the model is unhealthy; nothing was saved.
        RecipeError: a step has made a change that a resume couldn't make again; nothing was saved.
        StoreError: this save or the last save has failed.
    """
    training.saver.wait()
    if not training.accelerator.is_main_process:
        parent = training.begun.find_durable(request.folder, training.steps_per_epoch, request.fingerprint)
        if parent is None:
            return None
        training.parent, training.record.lines = str(parent.content_id), parent.lines + training.record.lines
        training.record.gallery.put_back(parent.shown)
        request = replace(request, train_s=request.train_s + parent.train_s)
    if not training.record.has_new_steps:
        return None
    check_changes(training)
    begin_save(training, request)
    return training.saver.wait()

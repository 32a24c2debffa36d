"""The save of a single rank that has lost another rank: it restores the last completed step and saves it alone.

No collective is possible any more, so this rank must have all that the checkpoint needs:

- Weights and the optimizer's state are the same in all ranks, and no step changes them before its gradients are summed.
  If a rank is lost before that, the sum fails in all ranks, and with it the step.
- Virtual ranks leave the same generators and buffers in all ranks after each step, and keep the buffers from before it.
  Without virtual ranks each rank has generators of its own, which are lost with the rank.
- The names of other ranks' samples are read from the data again, for the steps whose numbers aren't read yet.

A rank of a sharded model (FSDP2) has only a shard of the state, so it saves nothing. A rank that isn't sure of its
state saves nothing either: for example, if the optimizer may have stepped. On GPUs no rank can be sure: a GPU still
computes the steps in its queue, and may continue with wrong sums after a collective was aborted.
"""

from typing import Any

from holdfast.checkpoint import Saved
from holdfast.store import Store
from holdfast.training.build import Training
from holdfast.training.loop import settle
from holdfast.training.progress import Stage
from holdfast.training.saving import begin_save


def go_back(training: Training) -> bool:
    """Restore the state of the last completed step in this rank alone. Return whether that surely succeeded.

    Raises:
        DeterminismError: the last step has switched determinism off.
    """
    training.ranks.is_alone = True
    if training.stage is Stage.STEPPING:
        return training.virtual is not None and training.virtual.undo()
    if training.stage is Stage.RECORDED:
        settle(training)
    return training.stage is Stage.SETTLED


def save_alone(
    training: Training, folder: Store, fingerprint: str, environment: dict[str, Any], train_s: float
) -> Saved | None:
    """Save the state after `go_back`, and wait until the checkpoint is durable.

    Args:
        folder, fingerprint, environment: see `begin_save`.
        train_s: seconds since the last save was begun.

    Returns:
        The checkpoint; None if there is no new step, or if this rank lacks the trail since the newest durable
        checkpoint.

    Raises:
        Unhealthy: the model is unhealthy; nothing was saved.
        StoreError: this save or the last one has failed.
    """
    training.saver.wait()
    if not training.accelerator.is_main_process:
        parent = training.begun.find_durable(folder, training.steps_per_epoch, fingerprint)
        if parent is None:
            return None
        training.parent, training.record.lines = str(parent.content_id), parent.lines + training.record.lines
        training.record.gallery.put_back(parent.shown)
        train_s += parent.train_s
    if not training.record.has_new_steps:
        return None
    begin_save(training, folder, fingerprint, environment, train_s=train_s)
    return training.saver.wait()

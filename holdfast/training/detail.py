"""The facts of a step for a proof: what each rank had in it, or each share of the batch with virtual ranks.

`holdfast.checkpoint.departure` compares them, so that a proof can name the rank in which two runs differ first.
"""

from typing import TYPE_CHECKING, Any

from holdfast.data import combine
from holdfast.training.progress import Unread

if TYPE_CHECKING:
    from holdfast.training.build import Training


def describe_parts(training: "Training", step: Unread, components: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of each share, if there are virtual ranks, and of each rank. All ranks call it together.

    Args:
        step: the step that was trained last.
        components: the checksums of this rank's state; see `checksums.describe_components`.
    """
    rank = training.accelerator.process_index
    own: list[dict[str, Any]] = []
    if training.virtual is None:
        state = {name: value for name, value in components.items() if name != "tensors"}
        facts = {"samples": combine(step.samples) if step.samples else "", "generators": training.drawn_from}
        loss = {"loss": float(step.numbers["loss"]).hex()} if "loss" in step.numbers else {}
        own.append({"rank": rank, **facts, **loss, "state": state})
    else:
        accum = training.recipe.grad_accum
        for place, facts in enumerate(training.virtual.facts):
            samples = combine(step.samples[place * accum : (place + 1) * accum])
            own.append({"rank": rank, "share": training.virtual.own[place], "samples": samples, **facts})
        own.append({"rank": rank, **training.virtual.sums.facts})
    return [facts for each in training.gather(own) for facts in each]

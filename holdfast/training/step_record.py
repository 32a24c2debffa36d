"""The record of the steps since the last save: the trail (a line for each step), and the shown texts and pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.checkpoint.departure import REHEARSED_STEPS
from holdfast.checkpoint.shown import Gallery
from holdfast.errors import RecipeError
from holdfast.state import gather_whole
from holdfast.training.examinations import OutsideCopies

# A step's numbers with these names have their own fields in a line of the trail. All other numbers are in the line's
# field ``logged``.
OWN_FIELDS = ("loss", "grad_norm")
# The steps between two checksums, for models of large and of small tensors: checksums then cost less than 0.5 % of the
# time of AdamW's steps. The cost of checksums and of steps grows with the bytes of large tensors, and with the number
# of small tensors; see docs/performance.md.
EVERY_LARGE, EVERY_SMALL = 64, 256
LARGE_BYTES = 2**20


@dataclass
class Unread:
    """A finished step whose numbers, such as its loss, are still on the device.

    Attributes:
        numbers: scalar float32 tensors by name, on the training's device.
        samples: the names of the step's micro-batches.
        is_skipped: whether the batches were drawn, but not trained.
        ended: numbers that a loop's code at an epoch's end has logged, in the same form as `numbers`. They aren't part
            of the state, and the step's own number replaces a number of the same name.
    """

    step: int
    numbers: dict[str, Tensor]
    lrs: list[float]
    anneals: dict[str, float]
    samples: list[str]
    is_skipped: bool = False
    ended: dict[str, Tensor] = field(default_factory=dict)

    @property
    def logged(self) -> dict[str, Tensor]:
        """Return all numbers of the step, by name."""
        return {**self.ended, **self.numbers}


@dataclass
class EpochEnds:
    """The settings for the ends of epochs, in a loop with its own code at an epoch's end.

    Attributes:
        has_code: whether the program is such a loop.
        is_repeating: whether the step in progress has no effect; see `repeat_last_step`.
        saves_first: returns whether to save before the loop's code at an epoch's end runs, because the ranks stop. Its
            argument is the epoch's last step. All ranks call it together, and get the same answer.
        restore_weights: restores weights and moments from the checkpoint with which this process has resumed the run,
            because the code at an epoch's beginning has changed them again. All ranks call it together.
    """

    has_code: bool = False
    is_repeating: bool = False
    saves_first: Callable[[int], bool] = lambda end: False
    restore_weights: Callable[[], object] | None = None


@dataclass
class StepRecord:
    """The steps since the last save, and the settings for their recording; see `holdfast.training.recording`.

    Attributes:
        checksum_every: the number of steps from one line with checksums to the next.
        lines: the trail, with a line for each step whose numbers were read from the device.
        gallery: the texts and pictures that were shown.
        first_lrs: the rates of the first step of each epoch that has begun: part of the metadata, not of the state.
        measured: those metrics of the last epoch that are not part of the state.
        trained: the step that was trained last, which `record_step` records.
        unread: finished steps that have no line yet, each with the additional fields of its later line.
        is_detailed: whether each line has the checksums of all components and tensors, and the facts of each rank or
            share, for a proof. If False, only the first line after a checkpoint has the facts of each rank or share.
            This line's step follows from the checkpoint alone, so that another machine can train one rank's part again.
        is_rehearsal: whether these steps are a rehearsal: other ranks train them, too, and this process ends after
            them.
        is_grouped: whether this process has already checked that ranks of one data rank get the same samples.
        recorded: the number of steps that this process has recorded.
        is_watched: whether all that a step may change is looked at in the step in progress: tensors, layers, groups,
            gradients, torch's settings, a loop's variables. That takes microseconds for each tensor, so it happens only
            in a process's first steps, in rehearsals and proofs, in steps with checksums, and in the last step before a
            planned save.
        checked: the last step after which `restorable.check_changes` has looked at all of it.
        check_variables: a function that checks the variables of a user's own loop.
        unsaved_s: the seconds that rehearsed steps took; the next save counts them as training.
        has_parts: whether the step in progress is recorded with the facts of each rank or share.
        drawn_from: a digest of the generators at the beginning of the step, if `has_parts`.
        warnings: warnings for the user, shown together with the next save.
        hints: lines on values of a loop that begin anew after a resume.
        unkept: the copies of the weights that no checkpoint contains.
        note_lines: a function that is called with the trail after each read of numbers.
        ends: how the ends of epochs are trained.
    """

    checksum_every: int
    lines: list[dict[str, Any]] = field(default_factory=list)
    gallery: Gallery = field(default_factory=Gallery)
    first_lrs: list[list[float]] = field(default_factory=list)
    measured: dict[str, float | None] = field(default_factory=dict)
    trained: Unread | None = None
    unread: list[tuple[Unread, dict[str, Any]]] = field(default_factory=list)
    is_detailed: bool = False
    is_rehearsal: bool = False
    is_grouped: bool = False
    recorded: int = 0
    is_watched: bool = True
    checked: int = 0
    check_variables: Callable[[], object] = lambda: None
    unsaved_s: float = 0.0
    has_parts: bool = False
    drawn_from: str = ""
    warnings: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    unkept: OutsideCopies = field(default_factory=OutsideCopies)
    note_lines: Callable[[Sequence[Mapping[str, Any]]], object] = lambda lines: None
    ends: EpochEnds = field(default_factory=EpochEnds)

    @property
    def has_new_steps(self) -> bool:
        """Return whether any step was completed since the last save was begun, or since a checkpoint was restored."""
        return bool(self.lines or self.unread)

    def watches(self, step: int, stop: int) -> bool:
        """Return whether to look at all tensors in a step; see `is_watched`.

        Args:
            step: the step's number, counted from 1.
            stop: the step after which a save is planned.
        """
        is_first = self.recorded < REHEARSED_STEPS
        return is_first or self.is_detailed or self.is_rehearsal or step == stop or step % self.checksum_every == 0

    def forget(self) -> None:
        """Forget the steps, texts and pictures, because a checkpoint contains them."""
        self.lines, self.unsaved_s = [], 0.0
        self.gallery.take()

    def drop_detail(self) -> None:
        """Remove from the lines the fields that only detailed lines have; see `is_detailed`."""
        for place, line in enumerate(self.lines):
            if place:
                line.pop("parts", None)
            for part in line.get("parts", []):
                part.pop("state", None)
            line.get("state", {}).pop("tensors", None)
            if line["step"] % self.checksum_every:
                line.pop("state", None)


def choose_every(model: nn.Module) -> int:
    """Return the number of steps from one checksum to the next.

    The number depends only on the model, so that equal runs have checksums at the same steps.
    """
    sizes = [parameter.nbytes for parameter in model.parameters()]
    return EVERY_LARGE if sizes and sum(sizes) / len(sizes) >= LARGE_BYTES else EVERY_SMALL


def read_number(name: str, value: Any, device: torch.device) -> Tensor:
    """Return a number of a step as a scalar float32 tensor on the device, without waiting for the device.

    A sharded number, such as the norm of sharded gradients, is gathered: all ranks call it together.

    Args:
        name: the number's name in the message of an error.

    Raises:
        RecipeError: the value is no scalar.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        if type(value) is Tensor and value.dtype is torch.float32 and not value.dim() and value.device == device:
            return value.detach().clone()  # in a third of the time
        return gather_whole(value).detach().reshape(()).to(device, torch.float32, copy=True)
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()  # gymnasium gives an episode's return as an array of one number
    try:
        return torch.tensor(float(value), device=device)
    except (TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise RecipeError(f"{name}: expected a number, found a {type(value).__name__}{shape}") from None

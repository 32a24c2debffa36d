"""The messages between an attempt and its ranks: orders to the main rank, and events back.

Each message is an instance of a frozen class. On the pipe it is a line of JSON with the class name and the fields. This
module doesn't import torch, because the attempt doesn't.
"""

import json
from collections.abc import Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict

from holdfast import errors
from holdfast.checkpoint import Saved
from holdfast.checkpoint.found import Found
from holdfast.checkpoint.observed import Activation, SampleLoss, Update
from holdfast.errors import HoldfastError, RunStopped
from holdfast.journal import Commit, Origin
from holdfast.recipe.probe import Gate, Probe

SHOWN_LETTERS = 80


class Message(BaseModel):
    """Base of all orders and events. The receiver ignores fields that its version doesn't know."""

    # Let pydantic build each class at its first use, because building all classes would delay the start of a rank.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True, protected_namespaces=())


# ---- orders, in the sequence in which a rank may get them


class Restore(Message):
    """Load a commit's checkpoint, and check it with the gate. Answered by `Restored`, `Damaged` or `Tripped`.

    Attributes:
        aside: the folder, below the run's folder, with a checkpoint that was saved for a rehearsal alone, and that
            ``commit`` describes. The steps of its trail then belong to the next save. Empty for a commit of the run.
    """

    commit: Commit
    gate: Gate
    aside: str = ""


class Begin(Message):
    """Load the weights of another run's checkpoint, or of a folder. Answered by `Begun` or `Damaged`.

    Attributes:
        store: the URL of the store with the other run; the path of the folder if there is no commit.
        run: the other run's name.
        commit: the other run's commit; None for a folder's weights.
    """

    store: str
    run: str
    commit: Commit | None


class Call(Message):
    """Call a function of an extension on all ranks, before any step. Answered by `Called`.

    Attributes:
        function: ``module:function``. It takes the training and the arguments, and returns values that JSON has.
        arguments: the arguments, by name.
    """

    function: str
    arguments: dict[str, Any]


class Keep(Message):
    """Save the state that the function of a `Call` has loaded. Answered by `Saved`.

    Attributes:
        fingerprint: the fingerprint of the settings, for the checkpoint's metadata.
        origin: where the state comes from.
    """

    fingerprint: str
    origin: Origin


class Train(Message):
    """Train until a step and save. Answered by `Progress` every few steps, and by `Saved` once the save is durable.

    The rank executes the next order while the save is being written.

    Attributes:
        stop: the last step.
        fingerprint: the fingerprint of the settings, for the checkpoint's metadata.
        into: the URL of the folder to save in; empty for the run's own folder.
        aside: the folder, below the run's folder, for a save after the last step that is for a rehearsal alone. This
            save is answered by `SavedAside`, and the steps stay in the trail of the next save. Empty for a save that
            can be committed.
        is_detailed: whether each step's line of the trail has the checksums of all components and tensors.
        skip: the steps whose batches are drawn and not trained, as in the setting ``skip``.
        saves_first: whether to save before a loop's code at the end of an epoch runs, if the last step ends the epoch.
    """

    stop: int
    fingerprint: str
    into: str = ""
    aside: str = ""
    is_detailed: bool = False
    skip: str = ""
    saves_first: bool = False


class Rehearse(Message):
    """Train until a step and save nothing. Answered by `Rehearsed`.

    Attributes:
        stop: the last step.
        fingerprint: the fingerprint of the settings, for the metadata of a checkpoint if a `Stop` arrives during the
            rehearsal.
        is_kept: whether these ranks save if they are told to end. If False, other ranks have saved the steps.
        is_repeated: whether these ranks end afterwards, because the run continues in ranks that train the same steps;
            see `Step.is_rehearsal`.
        is_detailed: whether each step's line of the trail has the checksums of all components and tensors.
        committed: the content id of the run's commit of the last step; empty if there is none. The next save then
            contains only the steps after it.
        skip: as in `Train`.
    """

    stop: int
    fingerprint: str
    is_kept: bool
    is_repeated: bool = False
    is_detailed: bool = True
    committed: str = ""
    skip: str = ""


class Observe(Message):
    """Train until a step, observe that step and save nothing. Answered by `Observed`; then the ranks have to end.

    Attributes:
        step: the step to observe.
        most: how many samples get a gradient norm (the samples of the step with the largest losses), and how many
            updates are returned for each step (the largest).
        skip: as in `Train`.
    """

    step: int
    most: int
    skip: str = ""


class Proceed(Message):
    """Build the recipe. It is the first order to ranks that were started ahead. Until then they only import torch."""


class Save(Message):
    """Save after the current step and train on. May come at any time. Answered by `Saved`."""


class Stop(Message):
    """Save and end. May come at any time. Answered by `Saved` if a step was trained since the last save.

    Attributes:
        within_s: seconds until the machine is taken away. The ranks train on until the last moment at which a save is
            sure to be in time. None to save right after the current step.
    """

    within_s: float | None = None


class Evaluate(Message):
    """Run the recipe's evaluation and its probe (see `Recipe`). Answered by `Evaluated`."""


class Examine(Message):
    """List state that no checkpoint contains, and the steps at which schedules and anneals end.

    Answered by `Examined`.
    """


class End(Message):
    """End without a save."""


# ---- events


class Ready(Message):
    """The first event: a description of the training that the ranks have built.

    Attributes:
        settings: the settings that the recipe was built with, defaults included.
        defaults: the default values of the recipe's settings.
        data: the fingerprint's part about the data; see `holdfast.rank.description.describe_data`.
        samples_per_step: samples of an optimizer step over all ranks.
        sample_size: the number of units in a sample.
        unit: the name of the unit, such as tokens.
        flops_per_sample: floating-point operations for a sample; None if the recipe doesn't give the number.
        device: torch's name of the model's device.
        environment: the machine and the record of code, packages, files and built values; see `holdfast.rank.record`.
        warnings: problems to show a person, such as a schedule that reaches a learning rate of 0 before the run's end,
            or a loader whose workers are not used.
        hints: lines on values of a loop that begin anew after a resume, and on which a step may depend.
        notes: facts to show a person once, at the run's beginning, such as which seed is used.
    """

    settings: dict[str, Any]
    defaults: dict[str, Any]
    data: dict[str, Any]
    steps_per_epoch: int
    samples_per_step: int
    sample_size: int
    unit: str
    flops_per_sample: float | None = None
    model_params: int
    device: str
    environment: dict[str, Any]
    warnings: list[str] = []
    notes: list[str] = []
    hints: list[str] = []


class Restored(Message):
    """The ranks hold the commit's state; see `holdfast.training.Resumed` for the other fields.

    Attributes:
        near: the number of files that ranks have read from node-local copies instead of the store. The store's own
            files weren't verified.
        near_problem: how a node-local copy was damaged; empty if none was damaged.
    """

    near: int = 0
    near_problem: str = ""
    step: int
    summary: str = ""
    taken_over: list[str] = []
    note: str = ""


class Skipped(Message):
    """A stream is being read again from its beginning, and ``done`` of ``total`` micro-batches are skipped so far."""

    done: int
    total: int


class Begun(Message):
    """The model has another run's weights, or a folder's.

    Attributes:
        anneal_offset: the number of steps that the recipe's anneals count in addition to the run's own steps.
    """

    anneal_offset: int


class Called(Message):
    """The function of a `Call` has returned these values."""

    values: dict[str, Any]


class Progress(Message):
    """A step is done.

    Attributes:
        loss: the step's mean loss, which may be NaN or infinite; None if the user's loop logs no loss.
        steps_per_s: the mean speed since the ranks got the order to train.
    """

    step: int
    loss: float | None
    steps_per_s: float

    @property
    def loss_text(self) -> str:
        """Return a text with the loss, followed by two spaces; empty if there is no loss."""
        return "" if self.loss is None else f"loss {self.loss:.4f}  "


class Rehearsed(Message):
    """The ranks have trained the steps of a `Rehearse`.

    Attributes:
        lines: the trail of these steps, with a line for each step.
        is_ending: whether the ranks were told to end during the rehearsal, perhaps before its last step.
    """

    lines: list[dict[str, Any]]
    is_ending: bool = False


class Shadowed(Message):
    """Ranks that were told to stop have saved, and train on without a save. Sent before these steps and after each.

    Attributes:
        lines: the trail of the steps since the last report, with a line for each step.
        unregistered: in the first report, the values that no checkpoint contains, as they were before these steps; see
            `Examined`.
    """

    lines: list[dict[str, Any]]
    unregistered: list[Found] = []


class SavedAside(Message):
    """The checkpoint of a `Train` with ``aside`` is durable.

    Attributes:
        saved: the checkpoint; None if it couldn't be written, if the model is unhealthy, or if there was no time.
    """

    saved: Saved | None


class Observed(Message):
    """The observations of the step of an `Observe`; see `holdfast.training.observing.Observation`.

    Attributes:
        lines: the trail of all steps that were trained, with a line for each step.
    """

    lines: list[dict[str, Any]]
    samples: list[SampleLoss]
    updates: list[Update]
    activations: list[Activation]
    notes: list[str]


class Evaluated(Message):
    """The result of an evaluation.

    Attributes:
        metrics: the numbers that the recipe's ``evaluate`` returned.
        measured: the names of the metrics that differ at each evaluation, such as times.
        anneals: for each `Anneal` of the recipe (a value that changes with the step), by name, its value in the next
            step.
        is_pure: whether the evaluation has changed no kept object, so that a second evaluation computes the same
            numbers.
    """

    metrics: dict[str, float]
    measured: list[str]
    anneals: dict[str, float]
    probe: Probe
    is_pure: bool = True


class Examined(Message):
    """The facts about a recipe that `holdfast prove` reports.

    Attributes:
        unregistered: the values that the recipe or the loop can reach and that no checkpoint contains.
        looked_at: how many of the user's functions, classes and objects the search has inspected.
        events: the step of each event by name; see `holdfast.training.list_events`.
        own_steps_per_epoch: the length of an epoch that the recipe gives; a proof may shorten epochs.
    """

    unregistered: list[Found]
    looked_at: int = 0
    events: dict[str, float]
    own_steps_per_epoch: int


class Problem(Message):
    """Base of the events that carry an error.

    Attributes:
        kind: the class name of the error, one of `holdfast.errors`.
        data: facts about the error for a program, as JSON.
    """

    kind: str
    message: str
    hint: str = ""
    data: dict[str, Any] = {}

    @classmethod
    def of(cls, error: HoldfastError) -> Self:
        """Return the event that carries an error.

        Bytes that aren't UTF-8, for example in a file's name, are escaped.
        """
        record = errors.to_json(error)
        texts = {name: record[name].encode(errors="backslashreplace").decode() for name in ("message", "hint")}
        return cls(kind=record["class"], **texts, data=record["data"])

    @property
    def error(self) -> HoldfastError:
        return errors.from_json({"class": self.kind, **self.model_dump(include={"message", "hint", "data"})})


class Damaged(Problem):
    """The checkpoint to restore is damaged. Nothing was loaded, and the rank waits for the next order."""


class Tripped(Problem):
    """The gate refuses the restored state. The rank waits for the next order."""


class Failed(Problem):
    """A rank ends because of this error."""


class Finished(Message):
    """The run is complete, and the user's code that follows the training loop has ended, too."""


class Woken(Message):
    """An event that `Ranks.wake` queues, to interrupt a caller that waits for an event. No rank sends it."""


Order = Proceed | Restore | Begin | Call | Keep | Train | Rehearse | Observe | Save | Stop | Evaluate | Examine | End
# `Saved` (a checkpoint is durable) is a class of `holdfast.checkpoint`.
Event = (
    Ready
    | Restored
    | Skipped
    | Begun
    | Called
    | Progress
    | Rehearsed
    | Shadowed
    | Observed
    | Saved
    | SavedAside
    | Evaluated
    | Examined
    | Damaged
    | Tripped
    | Failed
    | Finished
    | Woken
)


# ---- messages as lines of JSON


def encode_message(message: Order | Event) -> str:
    """Return a message as a line of JSON, newline included."""
    return json.dumps([type(message).__name__, message.model_dump()], separators=(",", ":")) + "\n"


ORDERS = {kind.__name__: kind for kind in get_args(Order)}
EVENTS = {kind.__name__: kind for kind in get_args(Event)}


def decode_order(line: str | bytes) -> Order:
    """Return the order on a line that `encode_message` wrote.

    Raises:
        RunStopped: the line is not an order that this version knows.
    """
    order: Order = _decode(line, ORDERS)
    return order


def decode_event(line: str | bytes) -> Event:
    """Return the event on a line that `encode_message` wrote.

    Raises:
        RunStopped: the line is not an event that this version knows.
    """
    event: Event = _decode(line, EVENTS)
    return event


def _decode(line: str | bytes, kinds: Mapping[str, type[BaseModel]]) -> Any:
    try:
        name, fields = json.loads(line)
        return kinds[name].model_validate(fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # both pydantic and json raise ValueErrors
        start = line[:SHOWN_LETTERS]
        raise RunStopped(
            f"the attempt and its ranks don't understand each other's messages: {start!r}: {type(error).__name__}",
            hint="start the run again: Holdfast was probably updated while the run trained",
        ) from error

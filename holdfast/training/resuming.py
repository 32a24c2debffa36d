"""The resume of a checkpoint in this process, and the gate: the checks that the restored state has to pass."""

import contextlib
import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from holdfast import state
from holdfast.checkpoint import Metadata, Payload, differences, shorten
from holdfast.checkpoint.found import LOGS
from holdfast.errors import ConfigDrift, GateTripped, NameMissing
from holdfast.recipe.probe import RESTORED, Gate, Probe, check_health, compare_outputs, compare_probes, explain
from holdfast.store import Store, open_store
from holdfast.training import capturing
from holdfast.training.build import Training
from holdfast.training.elastic import DATA_RANKS, count_other_data_ranks, count_others, take_position
from holdfast.training.examinations import examine_recipe
from holdfast.training.naming import has_names
from holdfast.training.probing import NOISE, has_noise, measure_probe
from holdfast.training.tying import tie_to_model

# The number of values that a refusal lists from the search.
MOST_SEARCHED = 8
SHOWN_NAMES = 3


@dataclass
class Resumed:
    """The result of a resume.

    Attributes:
        summary: the present rates, schedulers and anneal offset, as a line for a person.
        taken_over: names of the hyperparameters that were changed on purpose, and whose new values are used.
        note: how the probe's results differ, if the gate is set to record a difference instead of refusing it.
    """

    step: int
    summary: str = ""
    taken_over: list[str] = field(default_factory=list)
    note: str = ""


def resume(training: Training, payload: Payload, metadata: Metadata, gate: Gate, watch: Any) -> Resumed:
    """Restore a checkpoint's state and pass it through the gate.

    Args:
        watch: if a stream is read again, called with the number of micro-batches skipped so far, and the number to skip
            in all.

    Raises:
        StateError: the state doesn't fit the objects that the recipe has built.
        ConfigError: a different number of ranks saved the state, and the present ranks can't divide it among
        themselves.
        ConfigDrift: the recipe builds different hyperparameters than at the save, though no setting and no code has
            changed.
        GateTripped: the restored state differs from the saved state, has different probe results, or isn't healthy.
    """
    saved = capturing.decode(payload)
    capturing.restore(training, saved)
    tie_to_model(training, payload)
    _begin_data(training, saved, metadata, watch)
    _check_state(training, payload, saved)
    resumed = Resumed(training.progress.step)
    if gate.how == "record":
        from holdfast.training.merging import take_over  # only resumes after accepted changes call it

        resumed.taken_over = take_over(training, saved["built"])
    else:
        _check_built(training, payload)
    resumed.summary = summarize_rates(training)
    training.record.first_lrs = _read_first_lrs(metadata, open_store(training.config.store).inside(training.config.run))
    training.parent = metadata.checkpoint_sha256
    training.begun.restart(training.progress.step, training.parent)
    is_measured = training.recipe.is_measured
    training.record.measured = {name: value for name, value in metadata.metrics.items() if is_measured(name)}
    training.probes.last = _own_probe(training, metadata)
    training.probes.first.text = metadata.first_batch
    saved_by = count_other_data_ranks(training, saved)
    # Free the payload now: the probe may need all memory that a step needs, and a sharded payload is on the GPU.
    del payload, saved
    probe = measure_probe(training, saved_by)
    last = training.probes.last or probe
    difference = compare_probes(last, probe, gate.tolerance if gate.how == "tolerance" else 0.0)
    only_gradient = bool(difference) and gate.how == "exact" and not compare_outputs(last, probe)
    # all ranks measure again if one rank does, because they exchange buffers
    is_noise = any(training.ranks.gather(only_gradient)) and has_noise(training)
    complaints = check_health(probe, training.recipe.health)
    if difference and gate.how == "record":
        resumed.note = difference
    elif difference:
        suspects = [f"{name} ({kind})" for name, kind in training.probes.touched.items()]
        cause = f"{RESTORED}, but {difference}, and computed twice it differs, too: {NOISE}"
        message = "; ".join([cause if only_gradient and is_noise else explain(difference, gate), *complaints])
        found = _search_suspects(training)
        raise GateTripped(message, check="results", suspects=suspects, found=found, step=training.progress.step)
    if complaints:
        raise GateTripped("; ".join(complaints), check="health", step=training.progress.step)
    return resumed


def resume_weights(training: Training, payload: Payload) -> None:
    """Restore a checkpoint's weights and moments inside the first step after its resume.

    The step's number, the random generators and the position in the data stay as they are.
    """
    progress, generators = training.progress.state_dict(), training.generators.state_dict()
    capturing.restore(training, capturing.decode(payload))
    tie_to_model(training, payload)
    training.progress.load_state_dict(progress)
    training.generators.load_state_dict(generators)


def _search_suspects(training: Training) -> list[str]:
    """Return a line for each value that no checkpoint contains and that the program may change, the most likely first.

    The process that saved is gone, so no values can be compared. Modules, generators and other objects with a state
    may change. So may the values that a function other than ``__init__`` assigns.
    """
    found = (each for each in examine_recipe(training.recipe).found if each.name not in training.probes.touched)
    likely = [each for each in found if each.order < LOGS and (not each.is_plain or each.is_assigned)]
    return [f"{each}: {each.remedy}" for each in sorted(likely, key=lambda each: each.order)[:MOST_SEARCHED]]


def summarize_rates(training: Training) -> str:
    """Return a line for a person with the present rates, schedulers and anneals. Equal rates appear once."""
    rates = list(dict.fromkeys(f"{rate:.6g}" for rate in training.lrs))
    more = f" and {len(rates) - SHOWN_NAMES} more" if len(rates) > SHOWN_NAMES else ""
    schedulers = f"scheduler {', '.join(training.schedulers.describe())}" if training.schedulers else "no scheduler"
    offset = training.progress.anneal_offset
    return f"lr {', '.join(rates[:SHOWN_NAMES])}{more}, {schedulers}, anneal offset {offset}"


def _own_probe(training: Training, metadata: Metadata) -> Probe | None:
    """Return the probe that this rank measured at the save; None if the checkpoint doesn't contain it.

    The ranks' probes may differ, because each rank has its own extras, such as a normaliser. Older checkpoints contain
    only the main rank's probe.
    """
    probes = metadata.rank_probes
    rank = training.ranks.own_number
    if len(probes) == 1:
        return probes[0]
    if len(probes) == training.ranks.number:
        return probes[rank]
    return metadata.probe if training.ranks.own_state == 0 else None


def _begin_data(training: Training, saved: Mapping[str, Any], metadata: Metadata, watch: Any) -> None:
    began = monotonic()
    training.replayed = metadata.replayed
    if training.begin_data(take_position(training, saved), watch):
        micro_batches = training.progress.step * training.recipe.grad_accum
        training.replayed = {"micro_batches": float(micro_batches), "seconds": round(monotonic() - began, 3)}


def _check_state(training: Training, payload: Payload, saved: Mapping[str, Any]) -> None:
    """Capture each rank's state again. Raise `GateTripped` in all ranks if one rank's differs from the loaded state."""
    has_gpu = bool(training.generators.state_dict()["cuda"])
    is_same_device = all(bool(rng["cuda"]) == has_gpu for rng in saved["rng"])
    # Not compared here: hyperparameters as built, because `_check_built` compares them; the data's position, because
    # many streams know it only after the first batch; and, if the number of ranks has changed, the random generators
    # and data ranks.
    left_out = {"built", "data", DATA_RANKS, *(["rng"] if count_others(training, saved) else [])}
    captured = state.to_payload(_capture_as(training, saved))
    if not state.has_layouts(payload.tree):
        captured = Payload(captured.tensors, state.leave_out_layouts(captured.tree))
    found = {*differences(state.localize(payload), state.localize(captured)), *state.list_moved(payload, captured)}
    names = sorted(found)
    # Of the extras, compare only this rank's own: it may lack those of the other ranks.
    if training.ranks.has_others and not training.ranks.has_common_state:
        own = f"extras.{training.ranks.own_number if len(saved['extras']) > 1 else 0}."
        names = [name for name in names if name.startswith(own) or not name.startswith("extras.")]
    different = [
        name
        for name in names
        # The generators of GPUs aren't compared if a GPU was used only at the save, or only at the resume.
        if name.partition(".")[0] not in left_out and (is_same_device or not re.match(r"rng\.\d+\.cuda", name))
    ]
    # All ranks raise, because a rank that went on to the probe would wait there for the other ranks.
    gathered = training.ranks.gather(different)
    for rank, names in enumerate(gathered):
        if names:
            whose = "" if all(gathered) else f" of rank {rank}"
            some = shorten(names, SHOWN_NAMES)
            message = f"after the checkpoint was restored, {some}{whose} differ from the saved state"
            raise GateTripped(message, check="state", different=names)


def _capture_as(training: Training, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return this process's state in the form of ``saved``, a state that an earlier version may have saved."""
    captured = capturing.capture(training)
    if not has_names(saved["optimizer"]):
        captured["optimizer"] = training.optimizer.state_dict()
    if len(captured["extras"]) == 1:
        # All ranks have equal extras, which were captured once. Repeat them as often as the saved state has extras. The
        # first state isn't copied: it may have tensors of the model, which are encoded only once.
        captured["extras"] += [copy.deepcopy(captured["extras"][0]) for _ in saved["extras"][1:]]
    return captured


def _check_built(training: Training, payload: Payload) -> None:
    as_saved = Payload(payload.tensors, {"built": payload.tree["built"]})
    found = differences(as_saved, state.to_payload({"built": training.as_built.hyperparameters}))
    names = [name.removeprefix("built.") for name in found]
    if names:
        raise ConfigDrift(
            f"the recipe builds different values of {shorten(names, SHOWN_NAMES)} than at the save, though no setting "
            "and no known code has changed",
            hint="look for an environment variable, a file, or a module that Recipe(sources=...) should list; "
            "--set 'resume.accept_drift=[\"built\"]' accepts the new values",
            fields={name: [] for name in names},
        )


def _read_first_lrs(metadata: Metadata, folder: Store) -> list[list[float]]:
    """Return, for each epoch that had begun at the checkpoint, its first step's rates, one per parameter group.

    They are saved in the metadata and not in the payload, so that the content id doesn't depend on them.

    An earlier version of Holdfast recorded the rates of each epoch's last step. For its checkpoints, read the trail in
    ``metrics/``; if an epoch's trail is lost, return the rates recorded for the epoch's last step.

    Args:
        folder: the run's folder.
    """
    in_progress = metadata.epoch_first_lrs
    if in_progress is not None:
        return [*metadata.learning_rate_history, *([in_progress] if in_progress else [])]
    trail = _read_first_steps(folder, metadata.steps_per_epoch)
    recorded = [*metadata.learning_rate_history, *([] if metadata.is_at_epoch_end else [metadata.current_lrs])]
    return [trail.get(epoch, rates) for epoch, rates in enumerate(recorded)]


def _read_first_steps(folder: Store, steps_per_epoch: int) -> dict[int, list[float]]:
    """Return the rates of each epoch's first step, by epoch from 0; of several trails, the last counts."""
    found: dict[int, list[float]] = {}
    for name in folder.list("metrics"):
        with contextlib.suppress(NameMissing, ValueError, KeyError, TypeError):
            for text in folder.read(f"metrics/{name}").splitlines():
                line: dict[str, Any] = json.loads(text)
                epoch, within = divmod(line["step"] - 1, steps_per_epoch)
                if within == 0:
                    found[epoch] = [float(rate) for rate in line["lrs"]]
    return found

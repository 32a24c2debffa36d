"""The save of this process's training: copy the state, write it in the background, and describe it."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from holdfast import checkpoint, state
from holdfast.checkpoint.departure import compute_mean_loss
from holdfast.checkpoint.progress import EPOCHS_KEPT
from holdfast.errors import Unhealthy
from holdfast.journal import Origin, format_time, now
from holdfast.provenance.canonical import spell_floats
from holdfast.recipe.probe import Probe, check_health
from holdfast.store import Store
from holdfast.training.begun_saves import BegunSave
from holdfast.training.build import Training
from holdfast.training.capturing import capture
from holdfast.training.division import find_division
from holdfast.training.probing import measure_probe
from holdfast.training.recording import read_lines
from holdfast.training.restorable import check_same_ranks


@dataclass(frozen=True)
class SaveRequest:
    """A request to save: the place, the purpose and the measured times.

    Attributes:
        folder: the folder to write the checkpoint to.
        fingerprint: the fingerprint of the run's settings.
        environment: the record of the machine, code, packages, files and hyperparameters as built.
        origin: where the state comes from, if this run didn't train the state itself.
        is_aside: whether the checkpoint is for a rehearsal, and no commit will name it. The trail, texts and pictures
            are then kept for the next commit's checkpoint, which contains them, too.
        is_urgent: whether the ranks end with this save; see `checkpoint.CheckpointSave`.
        train_s: seconds that the steps since the last save took.
        slow_s: the seconds that the steps in `train_s` took longer because the last save was written in the background.
    """

    folder: Store
    fingerprint: str
    environment: dict[str, Any]
    origin: Origin | None = None
    is_aside: bool = False
    is_urgent: bool = True
    train_s: float = 0.0
    slow_s: float = 0.0


def begin_save(
    training: Training, request: SaveRequest, then: Callable[[checkpoint.Saved | None], object] = lambda saved: None
) -> None:
    """Copy the state and begin to write a checkpoint of it, with the trail of the steps since the last save.

    Training may continue once this returns. Only the main rank writes. But if each rank holds only a shard or a
    pipeline's stage of the state, each rank writes some of the checkpoint's parts. If the last save is still being
    written, wait for it first. All ranks call this together.

    Args:
        then: called with the checkpoint once it is durable, perhaps in another thread; only the main rank calls it. If
            a checkpoint for a rehearsal can't be written, or if the model is unhealthy, called with None.

    Raises:
        Unhealthy: the model is unhealthy; nothing was saved. Not raised for a rehearsal.
        StoreError: the last save has failed.
    """
    lines = read_lines(training)  # this waits for the device: count the time as training, not as a delay by the save
    began, trained_at = time.monotonic(), format_time(time.time())
    probe = measure_probe(training)
    if complaints := _find_complaints(training, probe):
        if request.is_aside:
            then(None)
            return
        raise Unhealthy(
            f"after step {training.progress.step} {'; '.join(complaints)}; nothing was saved",
            hint=training.program.advice.health,
            step=training.progress.step,
        )
    described = {"trained_at": trained_at} | _describe_request(request) | _describe_save(training, probe, lines)
    record, gallery = training.record, training.record.gallery
    unkept = {} if request.is_aside else record.unkept.find_changed(training.recipe)
    warnings = () if request.is_aside else (*record.warnings, *unkept.values())
    payload, shown = _take_payload(training), gallery.read() if request.is_aside else gallery.take()
    division = find_division(training, payload)
    if training.ranks.is_main or division is not None:
        training.saver.wait()  # wait for the last save, because its end sets training.parent
        payload = payload if division is None else division.unite(payload)
        stall_s: Future[float] = Future()  # `finish`, in another thread, waits for it: the stall may not have ended yet

        def finish(saved: checkpoint.Saved) -> None:
            if not request.is_aside:
                training.parent = saved.metadata.checkpoint_sha256
                took = {"train_s": request.train_s, "slow_s": request.slow_s, "stall_s": stall_s.result()}
                saved = saved.model_copy(update={**took, "warnings": warnings, "unkept": (*unkept,)})
            then(saved)

        save = checkpoint.CheckpointSave(
            request.folder,
            payload,
            described | {"previous_checkpoint_sha256": training.parent},
            _to_text(lines),
            finish,
            shown=shown,
            note_failure=(lambda _: then(None)) if request.is_aside else None,
            is_urgent=request.is_urgent and not request.is_aside,
            peers=None if division is None else division.peers,
        )
        try:
            training.saver.begin(save)
        finally:
            stall_s.set_result(time.monotonic() - began)
    if request.is_aside:
        return
    if training.can_survive and not training.ranks.is_main:
        training.begun.add(BegunSave(training.progress.step, None, lines, shown, request.train_s))
    record.lines, record.warnings = [], []
    training.probes.last = probe


def _describe_request(request: SaveRequest) -> dict[str, Any]:
    """Return the fields of `checkpoint.Metadata` that the request contains."""
    found = {"train_s": request.train_s, "config_fingerprint": request.fingerprint, "environment": request.environment}
    return found if request.is_aside else found | {"is_last": request.is_urgent, "origin": request.origin}


def _describe_save(training: Training, probe: Probe, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of `checkpoint.Metadata` that a save measures. All ranks call it together."""
    rank_probes = training.ranks.gather(probe) if training.ranks.number > 1 else []
    if all(each == probe for each in rank_probes):
        rank_probes = rank_probes[:1]
    return describe_state(training, probe) | {"loss": compute_mean_loss(lines), "rank_probes": rank_probes}


def _take_payload(training: Training) -> checkpoint.Payload:
    """Check that the ranks agree on the state. Return the state itself, not a copy. All ranks call it together."""
    check_same_ranks(training)
    payload = state.to_payload(capture(training))
    return payload if training.ranks.has_others else state.localize(payload)  # a single rank holds the whole state


def _to_text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(spell_floats(line), sort_keys=True) + "\n" for line in lines)


def _find_complaints(training: Training, probe: Probe) -> list[str]:
    """Return the complaints of the first rank in which the model is unhealthy; empty if it is healthy in all ranks."""
    found = training.ranks.gather(check_health(probe, training.recipe.health, training.probes.last))
    complaints: list[str] = next(filter(None, found), [])
    return complaints


def describe_state(training: Training, probe: Probe) -> dict[str, Any]:
    """Return the fields of `checkpoint.Metadata` that describe the training."""
    progress = training.progress
    epoch, within = divmod(progress.step, training.steps_per_epoch)
    completed = len(training.record.first_lrs) - bool(within)
    rates, in_progress = training.record.first_lrs[:completed][-EPOCHS_KEPT:], training.record.first_lrs[completed:]
    metrics = progress.history[-1]["metrics"] if progress.history else {}
    return {
        "epoch": epoch,
        "created_at": now(),
        "optimizer_steps_total": progress.step,
        "optimizer_steps_epoch": within or training.steps_per_epoch,
        "steps_per_epoch": training.steps_per_epoch,
        "grad_accum": training.recipe.grad_accum,
        "avg_loss": progress.avg_loss,
        "scheduler_type": training.scheduler_type,
        "current_lrs": training.lrs,
        "learning_rate_history": rates,
        "learning_rate_history_len": epoch,
        "epoch_first_lrs": in_progress[0] if in_progress else [],
        "metrics": metrics | training.record.measured,
        "anneals": training.set_anneals(),
        "anneal_offset": progress.anneal_offset,
        "probe": probe,
        "replayed": training.replayed,
        "first_batch": training.probes.first.text,
        "model_params": count_params(training),
        "model_configs": describe_configs(training.recipe.model),
    }


def count_params(training: Training) -> int:
    """Return the number of scalars in the model's parameters; tied parameters count once."""
    if training.ranks.stages is not None:
        return training.ranks.stages.params
    return sum(parameter.numel() for parameter in training.model.parameters())


def describe_configs(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return the configuration files of each part of a model that is a transformers model.

    Parts with peft's adapters are left out, because adapters rename the weights: ``from_pretrained`` wouldn't find the
    weights, and would use random weights instead.

    Returns:
        For each part, by its dotted name ("" for the whole model): the files that its ``save_pretrained`` writes, as
        contents by file name.
    """
    found: dict[str, dict[str, Any]] = {}
    adapted: list[str] = []
    for name, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if any(name.startswith(f"{outer}.") or not outer for outer in (*found, *adapted)):
            continue
        if hasattr(module, "peft_config"):
            adapted.append(name)
            continue
        if not hasattr(config, "model_type") or not hasattr(config, "to_json_string"):
            continue
        own = {"architectures": [type(module).__name__]}
        dtype = next((str(each.dtype).removeprefix("torch.") for each in module.parameters()), None)
        found[name] = {"config.json": json.loads(config.to_json_string()) | own | ({"dtype": dtype} if dtype else {})}
        generation: Any = getattr(module, "generation_config", None)
        if hasattr(generation, "to_json_string"):
            found[name]["generation_config.json"] = json.loads(generation.to_json_string())
    return found

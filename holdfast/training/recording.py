"""The recording of finished steps in the trail. Numbers such as the loss stay on the device until they are needed."""

from collections.abc import Iterator
from typing import Any

from holdfast.data import combine
from holdfast.errors import RecipeError
from holdfast.provenance.canonical import spell_floats
from holdfast.training.build import Training
from holdfast.training.capturing import await_device
from holdfast.training.checksums import describe_components
from holdfast.training.step_record import OWN_FIELDS

# In this many first steps of a process, ranks that should train the same samples compare the samples' names.
COMPARED_STEPS = 3


def record_step(training: Training) -> None:
    """Record the step that was trained last.

    `read_lines` reads the step's numbers later, because a read waits for the device.
    """
    record = training.record
    unread, record.trained = record.trained, None
    assert unread is not None
    training.progress.step = unread.step
    if (unread.step - 1) % training.steps_per_epoch == 0:
        record.first_lrs.append(unread.lrs)
    is_compared = record.is_detailed or record.recorded < COMPARED_STEPS
    if is_compared and training.ranks.has_groups and unread.samples:
        training.ranks.gather_samples(combine(unread.samples))
    record.recorded += 1
    # `read_lines` computes the digest: several digests one after the other take less time than one in each step
    facts: dict[str, Any] = {"rng": training.generators.state_dict()}
    if record.is_detailed or unread.step % record.checksum_every == 0:
        facts["state"] = describe_components(training, in_detail=record.is_detailed)
    if record.has_parts:
        components = facts["state"] if record.is_detailed else {}
        facts["parts"] = training.ranks.describe_parts(unread, record.drawn_from, components)
    record.unread.append((unread, facts))


def read_lines(training: Training) -> list[dict[str, Any]]:
    """Read the numbers of finished steps from the device.

    Return the trail since the last save: one line for each step.
    """
    record = training.record
    numbers, samples = _read_numbers(training), _read_samples(training)
    for each, facts in record.unread:
        facts["rng"] = training.generators.digest(facts["rng"])
        if "parts" in facts:  # gather the names here, because the ranks wait for each other here in any case
            facts["parts"] = [part for ranks in training.ranks.gather(facts["parts"]) for part in ranks]
        own = {name: next(numbers) for name in each.logged}
        if "loss" in each.numbers:
            training.progress.add_loss(own["loss"])
        epoch = (each.step - 1) // training.steps_per_epoch + 1
        line = {"step": each.step, "epoch": epoch, "lrs": each.lrs} | ({"skipped": True} if each.is_skipped else {})
        line |= {name: own.pop(name) for name in OWN_FIELDS if name in each.numbers}
        others = {"logged": own, "anneals": each.anneals, "samples": next(samples)}
        record.lines.append(line | {name: value for name, value in others.items() if value} | facts)
    if record.unread:
        record.unread.clear()
        record.note_lines(record.lines)
    return record.lines


def spell_lines(training: Training, after: int) -> list[dict[str, Any]]:
    """Return the trail of the steps after ``after`` that were trained since the last save, as an event sends it."""
    return [spell_floats(line) for line in read_lines(training) if line["step"] > after]


def _read_numbers(training: Training) -> Iterator[float]:
    """Return the numbers of all unread steps in order; with several ranks or shares, the means over ranks or shares."""
    unread = [each for each, _ in training.record.unread]
    if training.recipe.loss is None and training.accelerator.num_processes > 1:
        own = [[(name, number.dim()) for name, number in each.logged.items()] for each in unread]
        names = training.ranks.gather(own)
        if any(each != names[0] for each in names):
            raise RecipeError(
                "the ranks have logged numbers of different names or shapes, whose mean can't be computed",
                hint=training.program.advice.numbers,
            )
    found = [number for each in unread for number in each.logged.values()]
    await_device(training)
    return iter(training.ranks.mean(found).tolist() if found else [])


def _read_samples(training: Training) -> Iterator[str]:
    """Return, for each unread step, a name of this rank's samples; see `Cooperation.name_samples`."""
    unread = [each for each, _ in training.record.unread]
    named = training.ranks.name_samples(unread, lambda *asked: training.batches.read_names(*asked))
    return (combine(names) if names else "" for names in named)

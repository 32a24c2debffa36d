"""The recording of finished steps. Facts are recorded at once; numbers stay on the device until they are needed."""

from collections.abc import Iterator
from typing import Any

from holdfast.data import combine
from holdfast.errors import RecipeError
from holdfast.training.build import Training
from holdfast.training.checksums import describe_components
from holdfast.training.step_record import OWN_FIELDS

# The number of a process's first steps in which ranks that should train the same samples compare the samples' names.
COMPARED_STEPS = 3


def record_step(training: Training) -> None:
    """Record the step that was trained last. Its numbers stay on the device until `read_lines`: reading would wait."""
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
    facts: dict[str, Any] = {"rng": training.generators.digest()}
    if record.is_detailed or unread.step % record.checksum_every == 0:
        facts["state"] = describe_components(training, in_detail=record.is_detailed)
    if record.has_parts:
        components = facts["state"] if record.is_detailed else {}
        facts["parts"] = training.ranks.describe_parts(unread, record.drawn_from, components)
    record.unread.append((unread, facts))


def read_lines(training: Training) -> list[dict[str, Any]]:
    """Read the numbers of finished steps from the device; return the trail since the last save, a line per step."""
    record = training.record
    numbers, samples = _read_numbers(training), _read_samples(training)
    for each, facts in record.unread:
        if "parts" in facts:  # gathered here, where the ranks wait for each other in any case
            facts["parts"] = [part for ranks in training.ranks.gather(facts["parts"]) for part in ranks]
        own = {name: next(numbers) for name in each.numbers}
        if "loss" in own:
            training.progress.add_loss(own["loss"])
        epoch = (each.step - 1) // training.steps_per_epoch + 1
        line = {"step": each.step, "epoch": epoch, "lrs": each.lrs} | ({"skipped": True} if each.is_skipped else {})
        line |= {name: own.pop(name) for name in OWN_FIELDS if name in own}
        others = {"logged": own, "anneals": each.anneals, "samples": next(samples)}
        record.lines.append(line | {name: value for name, value in others.items() if value} | facts)
    if record.unread:
        record.unread.clear()
        record.note_lines(record.lines)
    return record.lines


def _read_numbers(training: Training) -> Iterator[float]:
    """Return the numbers of all unread steps in order; with several ranks or shares, the means over these."""
    unread = [each for each, _ in training.record.unread]
    if training.recipe.loss is None and training.accelerator.num_processes > 1:
        own = [[(name, number.dim()) for name, number in each.numbers.items()] for each in unread]
        names = training.ranks.gather(own)
        if any(each != names[0] for each in names):
            raise RecipeError(
                "the ranks have logged numbers of different names or shapes, of which no mean can be taken",
                hint=training.program.advice.numbers,
            )
    found = [number for each in unread for number in each.numbers.values()]
    return iter(training.ranks.mean(found).tolist() if found else [])


def _read_samples(training: Training) -> Iterator[str]:
    """Return a name for each unread step's samples: this rank's samples, or with virtual ranks those of all shares."""
    unread = [each for each, _ in training.record.unread]
    named = training.ranks.name_samples(unread, lambda *asked: training.batches.read_names(*asked))
    return (combine(names) if names else "" for names in named)

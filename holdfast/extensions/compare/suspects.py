"""The recorded differences between two trainings, ordered by how well each explains the first step that differs.

The first field that differs in a step's line of the trail is the evidence. The table `KINDS` says which evidence each
kind of difference explains, and why. Differences of settings, code and data come before differences of the machine,
because settings, code and data change the mathematics, and a machine may change only the rounding.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.attempt.lineage import Past
from holdfast.checkpoint.departure import COMPONENTS, Difference
from holdfast.machine.contract import TERMS, part_of
from holdfast.provenance.changes import CLASSES, Change, classify, compare_identities, format_value, is_same
from holdfast.provenance.fingerprint import ABSENT
from holdfast.provenance.recorded import compare_records

# The evidence says which field differs first, in the first step that differs. `start` is the loss of the run's first
# step; `rounding` is a loss or a gradient norm whose two values differ by no more than `ROUNDING`.
Evidence = Literal[
    "skipped",
    "samples",
    "content",
    "rates",
    "start",
    "loss",
    "rounding",
    "gradient",
    "update",
    "random",
    "metrics",
    "state",
]
# How well a difference explains the evidence, best first.
Tier = Literal["likely", "possible", "unlikely"]
TIERS: tuple[Tier, ...] = ("likely", "possible", "unlikely")

# The largest relative difference that counts as rounding. float32 rounds to 6e-8. A sum in a different order, or by
# another kernel, may differ by some hundred times this error.
ROUNDING = 1e-5
COMPUTED: tuple[Evidence, ...] = ("start", "loss", "rounding", "gradient", "update", "state")
EVERYTHING: tuple[Evidence, ...] = ("samples", "content", "rates", *COMPUTED, "random", "metrics")


@dataclass(frozen=True)
class Kind:
    """One kind of difference.

    Attributes:
        names: the prefixes of the dotted names that changes of this kind have.
        likely: the evidence that this kind explains best.
        possible: further evidence that this kind may cause.
        reason: why this kind causes the evidence.
    """

    name: str
    names: tuple[str, ...]
    likely: tuple[Evidence, ...]
    possible: tuple[Evidence, ...]
    reason: str


# The order matters: of two kinds that explain the evidence equally well, the one higher in this table is listed first.
# Built values (values of the objects that the recipe has built) come last, because they result from settings, code,
# data and packages.
KINDS = (
    Kind("recipe", ("recipe",), EVERYTHING, (), "a different function builds the model, the data and the optimizer"),
    Kind(
        "seed", ("seed",), ("samples", "content", "start", "random"), EVERYTHING,
        "the seed decides the order of samples, the first weights and every random number",
    ),
    Kind(
        "data", ("data", "files.", "tokenizer"), ("samples", "content", "start"), EVERYTHING,
        "the order of samples depends on their number, and a batch on their content",
    ),
    Kind(
        "ranks", ("compute.ranks",), ("samples", "content", "gradient", "random"), EVERYTHING,
        "each rank draws its own samples and random numbers, and gradients are summed over ranks",
    ),
    Kind("skip", ("skip",), ("skipped",), (*COMPUTED, "random"), "the skip list says which batches are drawn and not "
                                        "trained"),
    Kind("start", ("init_from",), ("start",), COMPUTED, "the first weights come from init_from"),
    Kind("setting", ("settings.",), (), EVERYTHING, "the recipe may use a setting for anything"),
    Kind(
        "precision", ("compute.mixed_precision", "determinism."), COMPUTED, ("rates", "random", "metrics"),
        "precision and determinism choose how results are rounded, and in which order they are summed",
    ),
    Kind("source", ("sources.",), (), EVERYTHING, "the recipe's code may change anything"),
    Kind("epochs", ("epochs",), ("rates",), (), "a schedule may end with the last epoch"),
    Kind(
        "package", ("packages.", "environment.torch", "environment.numpy", "environment.accelerate",
        "environment.torchdata", "environment.python"), COMPUTED, EVERYTHING,
        "a different version may compute, draw or load differently",
    ),
    Kind("machine", ("environment.",), COMPUTED, ("rates", "metrics"), "a different machine may round or sum "
                                        "differently"),
    Kind("holdfast", ("holdfast",), (), EVERYTHING, "every version of Holdfast should give the same bits"),
    Kind(
        "batch", ("built.batch_size", "built.grad_accum", "built.steps_per_epoch", "built.collate"),
        ("samples", "content"), COMPUTED, "these values decide which samples a step has",
    ),
    Kind(
        "schedule", ("built.schedule", "built.scheduler", "built.anneals", "built.optimizer"),
        ("rates", "loss", "rounding", "gradient", "update", "state"), (),
        "schedule and optimizer decide the learning rates, and how they are applied",
    ),
    Kind(
        "model", ("built.model", "built.loss", "built.extras", "built.step", "built.loop"),
        ("start", "loss", "gradient", "update", "random", "state"), ("rates", "rounding", "metrics"),
        "model and loss compute the loss and its gradient",
    ),
    Kind("built", ("built.",), ("start", "loss", "gradient", "update", "state"), EVERYTHING, "this object was built "
                                        "differently"),
)  # fmt: skip
NO_KIND = Kind("operational", ("",), (), (), "a change of this kind changes no bits")
ORDER = [kind.name for kind in (*KINDS, NO_KIND)]
SOURCES_OF_BUILT = {"data", "setting", "source", "package", "holdfast"}


@dataclass(frozen=True)
class Suspect:
    """A recorded difference between two trainings, and how well it explains the first step that differs.

    Attributes:
        cls: the class of the difference: identity, schedule, operational, code, data, built, package or machine.
    """

    tier: Tier
    cls: str
    change: Change
    reason: str


def find_evidence(first: Difference | None, values: tuple[Any, Any] = (None, None)) -> Evidence:
    """Return the evidence that the first difference between two trainings gives.

    Args:
        first: the first difference between the trails; None if no step's line differs.
        values: the two trainings' values of the first field that differs.
    """
    if first is None:
        return "state"
    name = first.fields[0]
    if name in ("loss", "grad_norm") and _is_rounding(*values):
        return "rounding"
    known: dict[str, Evidence] = {
        "samples": "samples", "batch content": "content", "lrs": "rates", "anneals": "rates", "grad_norm": "gradient",
        "rng": "random", "metrics": "metrics", "skipped": "skipped",
    }  # fmt: skip
    if name in ("loss", "logged"):
        return "start" if first.step == 1 else "loss"
    return known.get(name, "update" if name.partition(".")[0] in COMPONENTS else "state")


def _is_rounding(one: Any, other: Any) -> bool:
    is_number = all(type(value) in (int, float) for value in (one, other))
    return is_number and math.isclose(one, other, rel_tol=ROUNDING)


def list_changes(one: Past, other: Past, configs: tuple[dict[str, Any], dict[str, Any]]) -> list[tuple[str, Change]]:
    """Return every recorded difference between two trainings as a pair: its class and the change.

    Args:
        configs: all settings of both trainings. For settings of class identity, ``one`` and ``other`` are compared.
    """
    rows = [("identity", change) for change in compare_identities(one.identity or {}, other.identity or {}, {})]
    rows += [
        (classify(change.name), change)
        for change in compare_identities(*configs, {})
        if classify(change.name) != "identity" and change.name not in ("run", "store")
    ]
    records = compare_records(one.environment, other.environment) if other.environment else []
    rows += [(CLASSES[change.kind], change) for change in records]
    return rows + [("machine", change) for change in compare_machines(one.environment, other.environment)]


def compare_machines(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Change]:
    """Yield the differences between two environments in the values on which equal bits depend, such as the GPU.

    `holdfast.machine.contract` lists these values.
    """
    if not one or not other:
        return
    for key in dict.fromkeys(term.key for term in TERMS if term.on):
        terms = [term for term in TERMS if term.key == key and term.on]
        if all(part_of(term, one) == part_of(term, other) for term in terms):
            continue
        saved, current = one.get(key), other.get(key)
        if isinstance(saved, dict) and isinstance(current, dict):  # compare each environment variable by its own name
            yield from compare_identities({"environment": {key: saved}}, {"environment": {key: current}}, {})
            continue
        if terms[0].compared == "words":
            saved, current = _leave_out_common_words(str(saved), str(current))
        yield Change(name=f"environment.{key}", kind="value", saved=_shorten(saved), current=_shorten(current))


def _leave_out_common_words(one: str, other: str) -> tuple[str, str]:
    common = {*one.split()} & {*other.split()}
    left, right = (" ".join(word for word in text.split() if word not in common) for text in (one, other))
    return left, right


def _shorten(value: Any) -> Any:
    """Return an environment's value in a readable form: a GPU is shown by its name, an unknown value as ABSENT."""
    if isinstance(value, list):
        return ", ".join(str(each.get("name", each)) if isinstance(each, dict) else str(each) for each in value)
    return ABSENT if value is None else value


def rank(rows: Iterable[tuple[str, Change]], evidence: Evidence | None) -> list[Suspect]:
    """Order differences by how well they explain the evidence, best first.

    If a built value (the value of an object that the recipe has built) explains the evidence well, its source counts as
    likely, too. The source is a setting with the same two values, such as a learning rate. If there is no such setting,
    every difference of a kind in `SOURCES_OF_BUILT` counts as the source.

    Args:
        evidence: None if the trainings are equal, so that no difference had an effect.
    """
    rows = list(rows)
    explaining = [change for _, change in rows if change.kind == "built" and evidence in _find_kind(change).likely]
    is_traced = any(_has_same_values(change, each) for _, change in rows for each in explaining)
    found = []
    for cls, change in rows:
        kind = _find_kind(change)
        tier = _judge(kind, evidence)
        if tier == "possible" and explaining and kind.name in SOURCES_OF_BUILT:
            is_source = any(_has_same_values(change, each) for each in explaining)
            tier = "likely" if is_source or not is_traced else tier
        found.append((TIERS.index(tier), ORDER.index(kind.name), change.name, Suspect(tier, cls, change, kind.reason)))
    return [suspect for *_, suspect in sorted(found, key=lambda row: row[:3])]


def _judge(kind: Kind, evidence: Evidence | None) -> Tier:
    if evidence in kind.likely:
        return "likely"
    return "possible" if evidence in kind.possible else "unlikely"


def _find_kind(change: Change) -> Kind:
    return next((kind for kind in KINDS if change.name.startswith(kind.names)), NO_KIND)


def _has_same_values(change: Change, built: Change) -> bool:
    if change.kind == "built":
        return False
    return is_same(change.saved, built.saved) and is_same(change.current, built.current)


def describe_change(change: Change, one: str, other: str) -> str:
    """Describe a change as a difference between two runs with these names."""
    if change.kind == "renamed":
        return f"{change.was} in {one}, {change.name} in {other}: {format_value(change.current)}"
    if change.kind in ("source", "file") and ABSENT not in (change.saved, change.current):
        return f"{change.name}: another {'code' if change.kind == 'source' else 'content'}"
    saved = f"not in {one}" if change.saved == ABSENT else f"{format_value(change.saved)} in {one}"
    current = f"not in {other}" if change.current == ABSENT else f"{format_value(change.current)} in {other}"
    return f"{change.name}: {saved}, {current}"

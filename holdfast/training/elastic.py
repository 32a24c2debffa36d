"""The resume of a checkpoint that a different number of ranks has saved.

Usually each rank has its own generators, extras and position in the data. If they are equal in all
ranks, any number of ranks can resume from them. If generators differ, they are seeded anew. If extras or positions
differ, the resume is refused.
"""

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.checkpoint import digest_payload
from holdfast.errors import ConfigError
from holdfast.machine import determinism
from holdfast.state import to_payload
from holdfast.terminal import counted
from holdfast.training.build import Training

# The component of a state that contains the data ranks; only saved if several ranks train the same samples.
DATA_RANKS = "data_ranks"


def digest_state(name: str, state: Any) -> str:
    """Return the SHA-256 (hex) of a part of the state.

    Args:
        name: the part's name.
    """
    return digest_payload(to_payload({name: state}))


def count_others(training: Training, saved: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that saved a state; None if each present rank can continue one of the saved states.

    That is possible if the present ranks would save the same number of states, and if the same ranks train the same
    samples (see `DataRanks`). If all ranks have a common state, it is saved once, and any number of ranks continues.
    """
    others, ranks = len(saved["rng"]), training.ranks
    is_same = ranks.has_common_state or _list_data_ranks(saved) == [*ranks.data.numbers]
    return None if others == ranks.states and is_same else others


def count_other_data_ranks(training: Training, saved: Mapping[str, Any]) -> int | None:
    """Return the number of data ranks that saved a state; None if each present rank can continue one of the states."""
    return None if count_others(training, saved) is None else len(set(_list_data_ranks(saved)))


def _list_data_ranks(saved: Mapping[str, Any]) -> list[int]:
    """Return the data ranks of the ranks that saved a state, by rank."""
    return [*saved.get(DATA_RANKS, range(len(saved["rng"])))]


def restore_generators(training: Training, saved: Mapping[str, Any]) -> None:
    """Restore this rank's generators. Call it after ``training.progress`` was restored.

    If a different number of ranks saved them, seed them from the run's seed, the step and the data rank. Every resume
    at this step with this number of ranks then draws the same numbers.
    """
    if count_others(training, saved) is None:
        training.generators.load_state_dict(saved["rng"][training.ranks.own_state])
    else:
        number = 0 if training.ranks.has_common_state else training.ranks.data.number
        seed = determinism.derive_seed(training.config.seed, training.progress.step, f"rank {number}")
        training.generators.reseed(seed)


def take_extras(training: Training, saved: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the state of this rank's extras, by name.

    Args:
        names: the extras that are needed; all if None.

    Raises:
        ConfigError: a different number of ranks saved the extras, and they differed between the ranks.
    """
    parts: list[dict[str, Any]] = saved["extras"]
    if len(parts) == 1:
        return parts[0]
    if count_others(training, saved) is None and not training.ranks.has_common_state:
        return parts[training.ranks.own_state]
    for name in parts[0]:
        is_needed = names is None or name in names
        if is_needed and len({digest_state(name, part[name]) for part in parts}) > 1:
            raise _refuse(
                training,
                saved,
                f"the extra {name!r} differs between the ranks",
                "to continue with any number of ranks, change the extra only in after_step, which keeps it equal in "
                "all ranks",
            )
    return parts[0]


def take_position(training: Training, saved: Mapping[str, Any]) -> Any:
    """Return this rank's position in the data.

    Raises:
        ConfigError: a different number of ranks saved the positions, and the positions differ between the ranks.
    """
    parts = saved["data"]
    if count_others(training, saved) is None:
        return parts[training.ranks.own_number if len(parts) > 1 else 0]
    if not training.batches.has_common_position or len({digest_state("data", part) for part in parts}) > 1:
        raise _refuse(
            training,
            saved,
            "each rank has a position of its own in the data",
            "use map-style data, or a stream with state_dict and load_state_dict, to continue with any number of ranks",
        )
    return parts[0]


def _refuse(training: Training, saved: Mapping[str, Any], reason: str, hint: str) -> ConfigError:
    ranks, others = training.ranks.number, len(saved["rng"])
    return ConfigError(
        f"compute.ranks = {ranks}: the checkpoint of step {saved['progress']['step']}, which "
        f"{counted(others, 'rank')} saved, can't be divided over a different number of ranks: {reason}",
        hint=f"continue with compute.ranks = {others}; or, in a new run, {hint}",
    )

"""Seeds for the kept generators that the operating system has seeded, so that two runs draw the same numbers."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from holdfast.state.generators import is_generator, is_unseeded
from holdfast.state.objects import Objects


def list_unseeded(name: str, value: Any, stateful: Any) -> dict[str, np.random.Generator]:
    """Return the generators of a kept object that the operating system has seeded, by the line that seeds each.

    Args:
        name: the object's name in `run.keep`.
        stateful: the result of `as_stateful` for the value.
    """
    if is_unseeded(value):
        return {f"{name} = numpy.random.default_rng(0)": value}
    found = _list_attributes(stateful) if isinstance(stateful, Objects) else ()
    return {_seed(path, owner, key): each for path, owner, key, each in found if is_unseeded(each)}


def seed_unused(generators: dict[str, np.random.Generator], text: str) -> list[str]:
    """Seed the generators of `list_unseeded` from which nothing was drawn. Return the lines of all others.

    An environment's spaces have such generators: the library makes them, and many programs never draw from them.

    Args:
        text: the run's seed and the rank; each generator's seed is derived from this text.
    """
    for line, each in generators.items():
        if _is_unused(each):
            entropy = int.from_bytes(hashlib.sha256(f"{text}/{line}".encode()).digest()[:8], "little") >> 1
            bits: Any = each.bit_generator
            seeds = np.random.SeedSequence(entropy)
            bits.__setstate__((type(bits)(seeds).state, seeds))
    return [line for line, each in generators.items() if is_unseeded(each)]


def describe_unseeded(name: str, lines: list[str]) -> str:
    """Return a warning about generators that have drawn numbers without a seed, with the lines that seed them."""
    return (
        f"run.keep({name}=...): {len(lines)} of its generators have drawn numbers with a seed from the operating "
        f"system, so the program computes different values in each run; before the first draw: {'; '.join(lines)}"
    )


def _list_attributes(objects: Objects) -> Iterator[tuple[str, Any, str, Any]]:
    for path, owner in objects.list_objects():
        yield from ((path, owner, key, each) for key, each in vars(owner).items() if is_generator(each))


def _is_unused(generator: np.random.Generator) -> bool:
    bits: Any = generator.bit_generator
    seeds = bits.seed_seq
    if getattr(seeds, "n_children_spawned", 1):
        return False
    try:
        begun = type(bits)(seeds).state
    except Exception:  # a class of the user's own may be built from anything
        return False
    return repr(begun) == repr(bits.state)


def _seed(path: str, owner: Any, key: str) -> str:
    if callable(getattr(owner, "seed", None)):
        return f"{path}.seed(0)"
    return f"{path}.reset(seed=0)" if callable(getattr(owner, "reset", None)) else f"{path}.{key} = default_rng(0)"

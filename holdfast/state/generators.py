"""Training's random generators, isolated from all other code in a rank that draws random numbers.

Python, NumPy and torch have global generators. The recipe draws from them. Other code in the process may draw from
them, too: a store that waits a random time before a retry, an evaluation, a library that is imported late. Two
mechanisms isolate training:

- Between steps: `Generators.training` restores training's states for a step and captures them after it. So draws
  between two steps don't change training's states.
- Between threads: `determinism.separate_threads` reserves Python's global generator for the training thread, because
  a save may retry an upload while a step runs. (Holdfast's threads never draw from NumPy's or torch's global
  generators.)
"""

import array
import contextlib
import copy
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.errors import StateError
from holdfast.machine import determinism
from holdfast.state.generator_memory import Memory, read_numpy, read_python, to_numpy_state

# The state of a GPU's generator begins with the seed, which has this size in bytes. An offset follows, which grows with
# each draw. Source: at::CUDAGeneratorImpl::get_state.
SEED_BYTES = 8

_has_gpus = False

# A seed from the operating system has 128 bits; a seed in a program is nearly always shorter. Source: NumPy,
# ``SeedSequence``.
LONG = 2**64

# The key of the number of generators that `numpy.random.Generator.spawn` has made from a generator. NumPy's own state
# lacks this number, which decides what the next spawned generator draws. A state has the key if the number isn't 0.
SPAWNED = "spawned"


# NumPy's bit generators, by name.
BITS: dict[str, Any] = {
    each.__name__: each
    for each in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}


def _read_numpy(generator: np.random.Generator) -> dict[str, Any]:
    state = dict(generator.bit_generator.state)
    spawned = getattr(generator.bit_generator.seed_seq, "n_children_spawned", 0)
    return state | ({SPAWNED: spawned} if spawned else {})


def _write_numpy(generator: np.random.Generator, state: dict[str, Any]) -> None:
    own: Any = generator.bit_generator
    own.state = {key: each for key, each in state.items() if key != SPAWNED}
    seeds = own.seed_seq
    missing = state.get(SPAWNED, 0) - getattr(seeds, "n_children_spawned", 0)
    if missing > 0:
        seeds.spawn(missing)
    elif missing < 0:
        # NumPy can't lower the number, so replace the sequence of seeds.
        kind = type(seeds)
        seeds = kind(
            seeds.entropy, spawn_key=seeds.spawn_key, pool_size=seeds.pool_size,
            n_children_spawned=state.get(SPAWNED, 0),
        )  # fmt: skip
        own.__setstate__((own.state, seeds))


# The kinds of generators that a user's code may have, each with the functions that read and write its state.
KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    random.Random: (lambda each: each.getstate(), lambda each, state: each.setstate(state)),
    np.random.Generator: (_read_numpy, _write_numpy),
    np.random.RandomState: (lambda each: each.get_state(legacy=False), lambda each, state: each.set_state(state)),
    torch.Generator: (lambda each: each.get_state(), lambda each, state: each.set_state(state)),
}


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers."""
    return isinstance(value, tuple(KINDS))


def is_unseeded(value: Any) -> bool:
    """Return whether a value is a generator of NumPy's that the operating system has seeded."""
    seeds = getattr(getattr(value, "bit_generator", None), "seed_seq", None)
    entropy = getattr(seeds, "entropy", None)
    return isinstance(value, np.random.Generator) and isinstance(entropy, int) and entropy >= LONG


def name_generator(generator: Any) -> dict[str, Any]:
    """Return the description from which `make_generator` creates a generator of this kind.

    Raises:
        StateError: the generator's class, or that of its bit generator, is the user's own.
    """
    kind = type(generator)
    if kind not in KINDS or (kind is np.random.Generator and _name_bits(generator) not in BITS):
        raise StateError(
            f"a kept container has a new generator of random numbers, a {kind.__module__}.{kind.__qualname__}, which "
            "a resume couldn't make again",
            hint="make the generator, and put it into the container, before run.keep",
        )
    found: dict[str, Any] = {"kind": f"{kind.__module__.partition('.')[0]}.{kind.__name__}"}
    if kind is np.random.Generator:
        found["bits"] = _name_bits(generator)
        seeds = generator.bit_generator.seed_seq
        if type(seeds) is np.random.SeedSequence:
            found["seeds"] = [seeds.entropy, list(seeds.spawn_key), seeds.pool_size]
    if isinstance(generator, torch.Generator) and generator.device.type != "cpu":
        found["device"] = generator.device.type
    return found


def make_generator(named: dict[str, Any]) -> Any:
    """Return a new generator of the kind that `name_generator` has described.

    Raises:
        StateError: the generator was on a device that this process doesn't have.
    """
    if named["kind"] == "numpy.Generator":
        entropy, spawn_key, pool_size = named.get("seeds", [0, [], 4])
        seeds = np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size)
        return np.random.Generator(BITS[named["bits"]](seeds))
    if named["kind"] == "torch.Generator":
        return _make_torch_generator(named.get("device", "cpu"))
    return random.Random() if named["kind"] == "random.Random" else np.random.RandomState()


def _make_torch_generator(device: str) -> torch.Generator:
    try:
        return torch.Generator(device)
    except RuntimeError as error:
        raise StateError(
            f"a kept container had a generator of random numbers on the device {device!r}, which this machine doesn't "
            "have",
            hint="continue on a machine with such a device; or, in a new run, make the generator on the CPU, before "
            "run.keep",
        ) from error


def _name_bits(generator: np.random.Generator) -> str:
    return type(generator.bit_generator).__name__


def read_generator(generator: Any) -> Any:
    """Return the state of a generator of random numbers."""
    return _functions_of(generator)[0](generator)


def write_generator(generator: Any, state: Any) -> None:
    """Put a state from `read_generator` into a generator of the same kind."""
    _functions_of(generator)[1](generator, state)


def clone_generator(generator: Any) -> Any:
    """Return a copy of a generator of random numbers, with the same state."""
    return generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)


def _functions_of(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(functions for kind, functions in KINDS.items() if isinstance(generator, kind))


class Generators:
    """The states of Python's, NumPy's and torch's global generators between two steps of training.

    Most steps draw from one of them only. So a step reads, writes and hashes only the states that have changed.
    """

    def __init__(self) -> None:
        """Capture the current states."""
        # the memory of Python's and NumPy's generators when they had the states; None if it isn't known
        self._memory: tuple[Memory | None, Memory | None] = (None, None)
        self._hashed: tuple[dict[str, Any], Any] | None = None  # the states whose hash `digest` has begun, and the hash
        self._states = capture_rng()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Run the block with training's states. Draws in the block advance training's states."""
        self.resume()
        yield
        self.pause()

    def resume(self) -> None:
        """Restore training's states, for a step."""
        states, (python, numpy) = self._states, self._memory
        if python is None or python != read_python():
            random.setstate(states["python"])
        if numpy is None or numpy != read_numpy():
            np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        _restore_gpus(states["cuda"])

    def pause(self) -> None:
        """Capture training's states, after a step."""
        before, (python, numpy) = self._states, self._memory
        now = read_python(), read_numpy()
        self._states = {
            "python": before["python"] if python is not None and python == now[0] else random.getstate(),
            "numpy": before["numpy"] if numpy is not None and numpy == now[1] else _capture_numpy(now[1]),
            "torch": torch.get_rng_state(),
            "cuda": _capture_gpus(),
        }
        self._memory = now

    @contextlib.contextmanager
    def borrowed(self, seed: int | None = None) -> Iterator[None]:
        """Run the block with a copy of training's states, or with newly seeded generators if a seed is given.

        Draws in the block don't advance training's states.
        """
        if seed is None:
            restore_rng(self._states)
        else:
            determinism.reseed(seed)
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the states, as `capture_rng` does."""
        return self._states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load saved states. Leave the GPUs' states unchanged unless both the save and this process have GPUs."""
        own = self._states["cuda"]
        self._states = states if states["cuda"] and own else states | {"cuda": own}
        self._memory = (None, None)

    def reseed(self, seed: int) -> None:
        """Seed the global generators again, and use the new states as training's states."""
        determinism.reseed(seed)
        self._states = capture_rng()
        self._memory = (None, None)

    def digest(self, states: dict[str, Any] | None = None) -> str:
        """Return a digest of states from `state_dict`, by default the present ones; see `digest_rng`."""
        known, states = self._hashed, states or self._states
        if known is None or any(known[0][name] is not states[name] for name in ("python", "numpy")):
            known = self._hashed = states, _begin_digest(states)
        return _end_digest(known[1].copy(), states)


def capture_rng() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, and of GPUs if they are included.

    The list of GPUs' states begins with the process's own GPU. GPUs at the end of the list are left out if nothing was
    drawn from their generators since they were seeded. So the states don't depend on the number of other GPUs in the
    machine.
    """
    return {
        "python": random.getstate(),
        "numpy": _capture_numpy(read_numpy()),
        "torch": torch.get_rng_state(),
        "cuda": _capture_gpus(),
    }


def _capture_numpy(memory: Memory | None) -> dict[str, Any]:
    """Return the state of NumPy's generator, from its memory if that was read."""
    return np.random.get_state(legacy=False) if memory is None else to_numpy_state(memory)


def _capture_gpus() -> list[torch.Tensor]:
    gpus = [torch.cuda.get_rng_state(number) for number in _list_gpus()]
    while len(gpus) > 1 and torch.equal(gpus[-1], _as_seeded(gpus[0])):
        gpus.pop()
    return gpus


def restore_rng(states: dict[str, Any]) -> None:
    """Restore the states that `capture_rng` returned. States of GPUs that this machine doesn't have are ignored."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    _restore_gpus(states["cuda"])


def _restore_gpus(gpus: list[torch.Tensor]) -> None:
    for place, number in enumerate(_list_gpus() if gpus else ()):
        torch.cuda.set_rng_state(gpus[place] if place < len(gpus) else _as_seeded(gpus[0]), number)


def include_gpus(are_included: bool) -> None:
    """Choose whether `capture_rng` and `restore_rng` include GPUs. Training on a CPU leaves them out."""
    global _has_gpus
    _has_gpus = are_included


def includes_gpus() -> bool:
    """Return whether this process trains on a GPU; see `include_gpus`."""
    return _has_gpus


def _list_gpus() -> list[int]:
    """Return the numbers of the visible GPUs, this process's own GPU first; empty if it trains on a CPU."""
    if not _has_gpus:
        return []
    own = torch.cuda.current_device()
    return [own, *(number for number in range(torch.cuda.device_count()) if number != own)]


def _as_seeded(state: torch.Tensor) -> torch.Tensor:
    """Return the state that a GPU's generator has right after seeding with the seed in ``state``."""
    seeded = state.clone()
    seeded[SEED_BYTES:] = 0
    return seeded


def digest_rng(states: dict[str, Any]) -> str:
    """Return a digest (16 hex characters) of the states from `capture_rng`. It includes only the first GPU's state."""
    return _end_digest(_begin_digest(states), states)


def _begin_digest(states: dict[str, Any]) -> Any:
    """Return a SHA-256 object that has hashed the states of Python's and NumPy's generators."""
    _, words, gauss = states["python"]
    numpy = states["numpy"]
    sha256 = hashlib.sha256(array.array("Q", words).tobytes())
    sha256.update(repr((gauss, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])).encode())
    sha256.update(numpy["state"]["key"].tobytes())
    return sha256


def _end_digest(sha256: Any, states: dict[str, Any]) -> str:
    """Return the digest after a SHA-256 object from `_begin_digest` has hashed torch's states, too."""
    sha256.update(states["torch"].numpy())
    if states["cuda"]:
        sha256.update(states["cuda"][0].numpy())
    return str(sha256.hexdigest()[:16])

"""Training's random generators, isolated from all other code in a rank that draws random numbers.

Python, NumPy and torch have global generators. The recipe draws from them, and other code in the process may draw too:
a store that waits a random time before a retry, an evaluation, a library that is imported late. Two mechanisms isolate
training:

- Between steps: `Generators.training` puts training's states in place for a step and takes them out after it. Draws
  between two steps don't change them.
- Between threads: `determinism.separate_threads` reserves Python's global generator for the training thread, because
  a save may retry an upload while a step runs. (Holdfast's threads never draw from NumPy's or torch's global
  generators.)
"""

import array
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast import determinism

# The kinds of generators that a user's code may have, each with how its state is read and written.
KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    random.Random: (lambda each: each.getstate(), lambda each, state: each.setstate(state)),
    np.random.Generator: (
        lambda each: each.bit_generator.state,
        lambda each, state: setattr(each.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda each: each.get_state(legacy=False), lambda each, state: each.set_state(state)),
    torch.Generator: (lambda each: each.get_state(), lambda each, state: each.set_state(state)),
}


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers."""
    return isinstance(value, tuple(KINDS))


def read_generator(generator: Any) -> Any:
    """Return the state of a generator of random numbers."""
    return _functions_of(generator)[0](generator)


def write_generator(generator: Any, state: Any) -> None:
    """Put a state from `read_generator` into a generator of the same kind."""
    _functions_of(generator)[1](generator, state)


def _functions_of(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(functions for kind, functions in KINDS.items() if isinstance(generator, kind))


class Generators:
    """The states of Python's, NumPy's and torch's global generators between two steps of training."""

    def __init__(self) -> None:
        """Capture the current states."""
        self._states = capture_rng()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Run the block with training's states. Its draws advance them."""
        restore_rng(self._states)
        yield
        self._states = capture_rng()

    @contextlib.contextmanager
    def borrowed(self, seed: int | None = None) -> Iterator[None]:
        """Run the block with a copy of training's states, or from a seed. Its draws don't advance training's states."""
        if seed is None:
            restore_rng(self._states)
        else:
            determinism.reseed(seed)
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the states, as `capture_rng` does."""
        return self._states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Load saved states. On a machine with another number of GPUs, the GPUs' generators keep their own states."""
        has_same_gpus = len(states["cuda"]) == len(self._states["cuda"])
        self._states = states if has_same_gpus else states | {"cuda": self._states["cuda"]}

    def reseed(self, seed: int) -> None:
        """Begin anew, from a seed."""
        determinism.reseed(seed)
        self._states = capture_rng()

    def digest(self) -> str:
        """Return a digest of the states (16 hex characters). Of several GPUs, only the current one's state counts."""
        return digest_rng(self._states)


def capture_rng() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, including those of all CUDA devices."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Restore the states that `capture_rng` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def digest_rng(states: dict[str, Any]) -> str:
    """Return a digest (16 hex characters) of the states from `capture_rng`; of several GPUs, only the current one's."""
    _, words, gauss = states["python"]
    numpy = states["numpy"]
    sha256 = hashlib.sha256(array.array("Q", words).tobytes())
    sha256.update(repr((gauss, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])).encode())
    sha256.update(numpy["state"]["key"].tobytes())
    sha256.update(states["torch"].numpy().tobytes())
    if states["cuda"]:
        sha256.update(states["cuda"][torch.cuda.current_device()].numpy().tobytes())
    return sha256.hexdigest()[:16]

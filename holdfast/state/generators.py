"""Training's random generators, kept apart from everything else that draws in a rank.

Python, NumPy and torch have global generators. The recipe draws from them, and so may anything else in the process: a
store that pauses before its next try, an evaluation, a library that is imported late. Two walls keep them apart:

- in time: `Generators.training` puts training's states in place for a step and takes them out after it. Draws between
  two steps leave no trace.
- between threads: `determinism.separate_threads` leaves Python's global generator to the thread that trains. A save
  uploads, and pauses before its next try, while a step runs. (Nothing that such a thread of Holdfast calls draws from
  NumPy's or torch's global generators.)
"""

import array
import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from holdfast import determinism


class Generators:
    """The states of Python's, NumPy's and torch's global generators between two steps of training."""

    def __init__(self) -> None:
        """Take the states as they are now."""
        self._states = capture_rng()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Put training's states in place for the block, which advances them."""
        restore_rng(self._states)
        yield
        self._states = capture_rng()

    @contextlib.contextmanager
    def borrowed(self, seed: int | None = None) -> Iterator[None]:
        """Begin the block at training's states, or at a seed. Its draws do not advance training's states."""
        if seed is None:
            restore_rng(self._states)
        else:
            determinism.reseed(seed)
        yield

    def state_dict(self) -> dict[str, Any]:
        """Return the states, as `capture_rng` does."""
        return self._states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Take over saved states. On a machine with another number of GPUs, the GPUs' generators stay as they are."""
        has_same_gpus = len(states["cuda"]) == len(self._states["cuda"])
        self._states = states if has_same_gpus else states | {"cuda": self._states["cuda"]}

    def digest(self) -> str:
        """Return 16 hex characters that name the states; of several GPUs, the current one's."""
        return digest_rng(self._states)


def capture_rng() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators, those of all CUDA devices among them."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Put back what `capture_rng` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def digest_rng(states: dict[str, Any]) -> str:
    """Return 16 hex characters that name what `capture_rng` returned; of several GPUs, the current one's state."""
    _, words, gauss = states["python"]
    numpy = states["numpy"]
    sha256 = hashlib.sha256(array.array("Q", words).tobytes())
    sha256.update(repr((gauss, numpy["state"]["pos"], numpy["has_gauss"], numpy["gauss"])).encode())
    sha256.update(numpy["state"]["key"].tobytes())
    sha256.update(states["torch"].numpy().tobytes())
    if states["cuda"]:
        sha256.update(states["cuda"][torch.cuda.current_device()].numpy().tobytes())
    return sha256.hexdigest()[:16]

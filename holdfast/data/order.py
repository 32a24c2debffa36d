"""The order of samples: a function of seed, pass and index, so that the step's number is the position in the data.

Nothing about the order is saved. A loader that starts at step s yields the same samples as a loader that reached step
s, with any number of ranks or workers.
"""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FEISTEL_ROUNDS = 6
# Indices are computed in blocks of about this size, because a single index costs as much as hundreds at once.
BLOCK_SAMPLES = 4096


@dataclass(frozen=True)
class Order:
    """The order of samples over a whole run.

    Each pass is a new permutation of all samples. Samples at a pass's end that don't fill a whole step are dropped.

    Args:
        samples: the number of samples in the data.
        batch_size: the number of samples in a micro-batch, over all ranks.
        grad_accum: the number of micro-batches in a step.
    """

    samples: int
    batch_size: int
    grad_accum: int
    seed: int

    @property
    def steps_per_pass(self) -> int:
        return self.samples // (self.batch_size * self.grad_accum)

    def step_indices(self, step: int) -> NDArray[np.int64]:
        """Return the indices of a step's samples over all ranks; shape (grad_accum, batch_size), read-only."""
        number, within = divmod(step, self.steps_per_pass)
        steps = -(-BLOCK_SAMPLES // (self.batch_size * self.grad_accum))
        first = within // steps * steps
        stop = min(first + steps, self.steps_per_pass)
        indices: NDArray[np.int64] = _indices(self, number, first, stop)[within - first]
        return indices


@functools.lru_cache(maxsize=2)
def _indices(order: Order, number: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return the indices for the steps [start, stop) of a pass; shape (stop - start, grad_accum, batch_size)."""
    step_samples = order.batch_size * order.grad_accum
    positions = np.arange(start * step_samples, stop * step_samples, dtype=np.uint64)
    indices = permute(positions, order.samples, order.seed, number)
    indices.flags.writeable = False
    return indices.reshape(-1, order.grad_accum, order.batch_size)


def permute(positions: NDArray[np.uint64], size: int, seed: int, number: int) -> NDArray[np.int64]:
    """Return the images of some positions under a permutation of ``range(size)``; compute no other images.

    A Feistel network permutes the range up to the next power of four. Applying it again until the result is below
    ``size`` (cycle walking) permutes ``range(size)``. The result is the same on every machine and with every library
    version.

    Args:
        positions: numbers below ``size``; shape (n,).
        number: the number of the permutation among all permutations of one seed: the number of the pass.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): cycle walking, generalized Feistel.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [
        np.uint64(int.from_bytes(hashlib.sha256(f"{seed}/{number}/{round_}".encode()).digest()[:8], "little"))
        for round_ in range(FEISTEL_ROUNDS)
    ]
    result = _feistel(positions, half_bits, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half_bits, keys)
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each value: the finalizer of SplitMix64, modulo 2**64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def digest_indices(indices: NDArray[np.int64]) -> str:
    """Return a digest (16 hex characters) of a micro-batch's sample indices, in order."""
    return hashlib.sha256(indices.astype("<i8").tobytes()).hexdigest()[:16]

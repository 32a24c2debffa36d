"""A rank's share of a micro-batch, and the random numbers that are drawn for it."""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from holdfast.errors import RecipeError


@dataclass(frozen=True)
class Share:
    """A rank's part of each micro-batch: an equal, contiguous slice."""

    batch_size: int
    rank: int = 0
    ranks: int = 1

    def of(self, items: Any) -> Any:
        """Return the rank's slice of a micro-batch.

        Args:
            items: the micro-batch's samples, or their indices.

        Raises:
            RecipeError: the items can't be divided evenly between the ranks.
        """
        size, rest = divmod(len(items), self.ranks)
        if rest:
            raise RecipeError(
                f"a batch of {len(items)} samples can't be divided evenly over {self.ranks} ranks",
                hint="set drop_last=True, or a different batch_size",
            )
        return items[self.rank * size : (self.rank + 1) * size]


class Gathering(Protocol):
    """The methods of `holdfast.training.cooperation.Cooperation` that `holdfast.data` needs."""

    @property
    def own_number(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass to this call, by rank. All ranks call it together."""
        ...

    def gather_samples(self, name: str) -> list[str]:
        """Return the sample names of all ranks that train different samples. All ranks call it together."""
        ...


def list_divisors(number: int) -> str:
    """Return the divisors of a number, separated by commas, for a message."""
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the CPU's generators from ``numbers`` during the block, and restore their states afterwards."""
    seed = int.from_bytes(hashlib.sha256("/".join(map(str, numbers)).encode()).digest()[:8], "little")
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs' generators, too
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)

"""The samplers of a torch ``DataLoader``, with what the order of its batches depends on."""

import itertools
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from holdfast.state import Attributes


def list_generators(loader: "DataLoader[Any]") -> list[torch.Generator]:
    """Return the generators of the loader and of its samplers.

    accelerate's ``SeedableRandomSampler`` makes its generator when it is first used, and seeds it for each pass
    from its epoch, which is saved.
    """
    from accelerate.data_loader import SeedableRandomSampler  # not above: see `shares_out`

    samplers = (each for each in list_samplers(loader) if not isinstance(each, SeedableRandomSampler))
    found = [getattr(each, "generator", None) for each in samplers]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def list_samplers(loader: Any) -> list[Any]:
    """Return a torch loader, its samplers, and the samplers inside them."""
    found: list[Any] = [loader]
    for each in found:
        inner = [getattr(each, name, None) for name in ("batch_sampler", "sampler")]
        found += [one for one in inner if one is not None and not any(one is known for known in found)]
    return found


def keep_attributes(sampler: Any) -> Attributes:
    """Return the state of a sampler's plain attributes, apart from what `LoaderBatches` keeps beside them."""
    from accelerate.data_loader import SeedableRandomSampler  # not above: see `shares_out`

    is_seeded = isinstance(sampler, SeedableRandomSampler)
    return Attributes(lambda: sampler, lambda name: name == "epoch" or (is_seeded and name == "generator"))


def shares_out(loader: "DataLoader[Any]") -> bool:
    """Return whether a loader gives each rank batches of its own."""
    from accelerate.data_loader import BatchSamplerShard  # not above: loader processes import this module, too

    return isinstance(loader.batch_sampler, BatchSamplerShard) or isinstance(loader.sampler, DistributedSampler)


def pack_indices(indices: list[list[Any]]) -> dict[str, Any]:
    """Return the indices of batches in the form of a state: two arrays if they are numbers, as they mostly are."""
    flat = [each for batch in indices for each in batch]
    is_numbers = all(type(each) is int for each in flat)
    return {"flat": np.array(flat, np.int64) if is_numbers else flat, "sizes": np.array([*map(len, indices)], np.int64)}


def unpack_indices(packed: dict[str, Any]) -> list[list[Any]]:
    """Return the indices of batches from the result of `pack_indices`."""
    flat = iter(packed["flat"].tolist() if isinstance(packed["flat"], np.ndarray) else packed["flat"])
    return [list(itertools.islice(flat, size)) for size in packed["sizes"].tolist()]

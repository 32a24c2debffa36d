"""The data of a step: its samples, and the random numbers drawn for them, as functions of the step's number."""

from holdfast.data.content import combine, digest_content
from holdfast.data.loaders import (
    NoBatches,
    is_torch_loader,
    list_batch_sizes,
    list_saved,
    make_batches,
    take_apart,
)
from holdfast.data.loading import Batches, is_stream
from holdfast.data.order import Order, digest_indices, permute
from holdfast.data.samplers import is_endless, list_samplers
from holdfast.data.sharing import Share, list_divisors
from holdfast.data.streams import refuse_inexact

__all__ = [
    "Batches",
    "NoBatches",
    "Order",
    "Share",
    "combine",
    "digest_indices",
    "digest_content",
    "is_endless",
    "is_stream",
    "is_torch_loader",
    "list_batch_sizes",
    "list_divisors",
    "list_samplers",
    "list_saved",
    "make_batches",
    "permute",
    "refuse_inexact",
    "take_apart",
]

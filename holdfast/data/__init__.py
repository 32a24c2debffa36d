"""The data of a step: its samples, and the random numbers in them, as functions of the step's number."""

from holdfast.data.content import combine, digest_content
from holdfast.data.loaders import IterableBatches, LoaderBatches, NoBatches, take_apart
from holdfast.data.loading import Batches, Share, is_stream
from holdfast.data.order import Order, digest, permute

__all__ = [
    "Batches",
    "IterableBatches",
    "LoaderBatches",
    "NoBatches",
    "Order",
    "Share",
    "combine",
    "digest",
    "digest_content",
    "is_stream",
    "permute",
    "take_apart",
]

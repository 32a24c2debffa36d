"""The conversion of a state (tensors, numbers, states of random generators) to bytes and back, without pickle."""

from holdfast.state.attributes import Attributes, is_plain
from holdfast.state.decoding import from_payload
from holdfast.state.encoding import to_payload
from holdfast.state.generators import (
    Generators,
    capture_rng,
    digest_rng,
    include_gpus,
    is_generator,
    read_generator,
    restore_rng,
    write_generator,
)
from holdfast.state.layout import has_layouts, lay_as, leave_out_layouts, lies_by_rows, strides_of
from holdfast.state.originals import has_methods
from holdfast.state.sharded import gather_whole, has_shards, is_sharded, list_moved, local_of, localize
from holdfast.state.ties import Ties
from holdfast.state.values import as_stateful
from holdfast.state.writing import has_same_bits

__all__ = [
    "Attributes",
    "Generators",
    "Ties",
    "as_stateful",
    "capture_rng",
    "digest_rng",
    "from_payload",
    "gather_whole",
    "has_layouts",
    "has_methods",
    "has_same_bits",
    "has_shards",
    "include_gpus",
    "is_generator",
    "is_plain",
    "is_sharded",
    "lay_as",
    "leave_out_layouts",
    "lies_by_rows",
    "list_moved",
    "local_of",
    "localize",
    "read_generator",
    "restore_rng",
    "strides_of",
    "to_payload",
    "write_generator",
]

"""The conversion of a state (tensors, numbers, states of random generators) to bytes and back, without pickle."""

from holdfast.state.attributes import Attributes, is_plain
from holdfast.state.clocks import is_reading
from holdfast.state.decoding import from_payload
from holdfast.state.encoding import to_payload
from holdfast.state.generators import (
    Generators,
    capture_rng,
    digest_rng,
    include_gpus,
    includes_gpus,
    is_generator,
    read_generator,
    restore_rng,
    write_generator,
)
from holdfast.state.host import clone_on_host, copy_to_host, is_on_device
from holdfast.state.layout import has_layouts, lay_as, leave_out_layouts, lies_by_rows, strides_of
from holdfast.state.metrics import is_metric
from holdfast.state.objects import Objects
from holdfast.state.originals import has_methods
from holdfast.state.recorders import is_recorder
from holdfast.state.seeding import describe_unseeded, list_unseeded, seed_unused
from holdfast.state.tensor_forms import gather_whole, has_shards, is_sharded, list_moved, local_of, localize
from holdfast.state.ties import Ties
from holdfast.state.values import as_stateful, find_left_out
from holdfast.state.writing import has_same_bits

__all__ = [
    "Attributes",
    "Generators",
    "Objects",
    "Ties",
    "as_stateful",
    "capture_rng",
    "clone_on_host",
    "copy_to_host",
    "describe_unseeded",
    "find_left_out",
    "digest_rng",
    "from_payload",
    "gather_whole",
    "has_layouts",
    "has_methods",
    "has_same_bits",
    "has_shards",
    "include_gpus",
    "includes_gpus",
    "is_generator",
    "is_metric",
    "is_on_device",
    "is_plain",
    "is_reading",
    "is_recorder",
    "is_sharded",
    "lay_as",
    "leave_out_layouts",
    "list_unseeded",
    "lies_by_rows",
    "list_moved",
    "local_of",
    "localize",
    "read_generator",
    "restore_rng",
    "seed_unused",
    "strides_of",
    "to_payload",
    "write_generator",
]

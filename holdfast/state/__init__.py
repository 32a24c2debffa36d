"""Everything that the next step depends on: captured, put back, and turned into bytes without a pickle."""

from holdfast.state.captured import (
    capture,
    capture_own,
    decode,
    describe_built,
    load,
    own_part,
    restore,
)
from holdfast.state.encoding import from_payload, to_payload
from holdfast.state.generators import Generators, capture_rng, digest_rng, restore_rng
from holdfast.state.memory import pinning
from holdfast.state.merging import take_over
from holdfast.state.naming import has_names, name_parameters

__all__ = [
    "Generators",
    "capture",
    "capture_own",
    "capture_rng",
    "decode",
    "describe_built",
    "digest_rng",
    "from_payload",
    "has_names",
    "load",
    "name_parameters",
    "own_part",
    "pinning",
    "restore",
    "restore_rng",
    "take_over",
    "to_payload",
]

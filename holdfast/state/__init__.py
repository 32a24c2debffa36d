"""The conversion of values to bytes and back without pickle: tensors, numbers, and states of random generators."""

from holdfast.state.encoding import from_payload, to_payload
from holdfast.state.generators import (
    Generators,
    capture_rng,
    digest_rng,
    is_generator,
    read_generator,
    restore_rng,
    write_generator,
)

__all__ = [
    "Generators",
    "capture_rng",
    "digest_rng",
    "from_payload",
    "is_generator",
    "read_generator",
    "restore_rng",
    "to_payload",
    "write_generator",
]

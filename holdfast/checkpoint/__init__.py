"""A checkpoint's bytes: named, written and hashed in one pass, verified while they are read."""

from holdfast.checkpoint.difference import differences, shorten
from holdfast.checkpoint.format import PAYLOAD, Payload, Tensor, deserialize, serialize
from holdfast.checkpoint.saving import (
    FILES,
    METADATA,
    METRICS,
    Metadata,
    Saved,
    folder_name,
    hash_file,
    is_folder_name,
    save,
    step_of,
)
from holdfast.checkpoint.verifying import (
    FileDamage,
    check_saved,
    find_orphans,
    read_metadata,
    read_payload,
    read_saved,
    verify,
    verify_file,
)

__all__ = [
    "FILES",
    "METADATA",
    "METRICS",
    "PAYLOAD",
    "FileDamage",
    "Metadata",
    "Payload",
    "Saved",
    "Tensor",
    "check_saved",
    "deserialize",
    "differences",
    "find_orphans",
    "folder_name",
    "hash_file",
    "is_folder_name",
    "read_metadata",
    "read_payload",
    "read_saved",
    "save",
    "serialize",
    "shorten",
    "step_of",
    "verify",
    "verify_file",
]

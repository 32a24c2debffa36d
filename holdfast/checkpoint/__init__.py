"""Checkpoints on the store: their format and names, saving with hashes in one pass, and verified reading."""

from holdfast.checkpoint.difference import differences, shorten
from holdfast.checkpoint.files import FileDamage, hash_file
from holdfast.checkpoint.format import (
    HEADER_METADATA,
    PAYLOAD,
    Part,
    cut,
    deserialize,
    is_part,
    serialize,
    serialize_tensors,
)
from holdfast.checkpoint.metadata import (
    COPIES,
    METADATA,
    METRICS,
    SHOWN,
    Metadata,
    Saved,
    content_id,
    find_disagreements,
    folder_name,
    is_folder_name,
    step_of,
)
from holdfast.checkpoint.partial import Header, PartsReader, read_headers
from holdfast.checkpoint.payload import Payload, Piece, Tensor, copy_pieces, in_memory
from holdfast.checkpoint.peers import deal, list_batches
from holdfast.checkpoint.saving import Saver, count_cores, save
from holdfast.checkpoint.streaming import ABREAST, DEPTH, WINDOWS, Stream, Windows, count_window_bytes
from holdfast.checkpoint.trail import split_lines
from holdfast.checkpoint.verifying import (
    check_saved,
    find_orphans,
    find_parts,
    read_committed,
    read_metadata,
    read_payload,
    read_saved,
    verify,
)

__all__ = [
    "ABREAST",
    "COPIES",
    "DEPTH",
    "HEADER_METADATA",
    "METADATA",
    "METRICS",
    "PAYLOAD",
    "SHOWN",
    "WINDOWS",
    "FileDamage",
    "Header",
    "Metadata",
    "Part",
    "PartsReader",
    "Payload",
    "Piece",
    "Saved",
    "Saver",
    "Stream",
    "Tensor",
    "Windows",
    "check_saved",
    "content_id",
    "copy_pieces",
    "count_cores",
    "count_window_bytes",
    "cut",
    "deal",
    "deserialize",
    "differences",
    "find_disagreements",
    "find_orphans",
    "find_parts",
    "folder_name",
    "hash_file",
    "in_memory",
    "is_folder_name",
    "is_part",
    "list_batches",
    "read_headers",
    "read_committed",
    "read_metadata",
    "read_payload",
    "read_saved",
    "save",
    "serialize",
    "serialize_tensors",
    "shorten",
    "split_lines",
    "step_of",
    "verify",
]

"""Receipts: a signed file about a checkpoint and the chain of commits that led to it, which a stranger can check.

A receipt is a model signature in OpenSSF's form over the checkpoint's files, or over those of an export. Beside them it
signs the chain: what was trained with which settings, code, data and machines, and which commits other machines have
trained again. A stranger with the run's store, code and data checks that the store has this chain, and trains chunks
again that a public seed chooses. `holdfast/FORMAT.md` lists the fields.
"""

from holdfast.proof.receipt.auditing import CHUNKS, ReceiptAudit, audit_receipt
from holdfast.proof.receipt.checking import check_receipt
from holdfast.proof.receipt.signed import MAX_RECEIPT_BYTES, Receipt, describe_commit, open_receipt, seal_receipt
from holdfast.proof.receipt.slsa import seal_provenance

__all__ = [
    "CHUNKS",
    "MAX_RECEIPT_BYTES",
    "Receipt",
    "ReceiptAudit",
    "audit_receipt",
    "check_receipt",
    "describe_commit",
    "open_receipt",
    "seal_provenance",
    "seal_receipt",
]

"""Receipts: a receipt is a signed file about a checkpoint, and about the commits that led to it.

A receipt is a model signature in OpenSSF's form over the files of the checkpoint, or over the files of an export. It
also signs the chain: the settings, code, data and machines of each commit, and the commits that other machines have
trained again. A stranger with the run's store, code and data can check that the store has this chain, and can train
again the chunks that a public seed chooses. `holdfast/FORMAT.md` lists the fields.
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

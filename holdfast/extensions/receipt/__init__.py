"""Receipts: a receipt is a signed file about a checkpoint, and about the commits that led to it.

A receipt is a model signature in OpenSSF's form over the files of the checkpoint, or over the files of an export. It
also signs the chain: the settings, code, data and machines of each commit, and the commits that other machines have
trained again. A stranger with the run's store, code and data can check that the store has this chain, and can train
again the chunks that a public seed chooses. `holdfast/FORMAT.md` lists the fields.
"""

from holdfast.extending import Command, Extension

extension = Extension(
    "receipt",
    commands=(
        Command(
            "receipt",
            "holdfast.extensions.receipt.command:receipt_command",
            "Write a signed receipt: the chain of commits that led to a checkpoint, with settings, code, data "
            "and machines.",
            usage="holdfast receipt RUN [COMMIT] OUT.json --signing-key KEY [--model PATH]",
        ),
    ),
    views={"receipt": "holdfast.extensions.receipt.command:audit_file"},
)

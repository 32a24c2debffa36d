"""The command `receipt`, and the audit of a receipt for `holdfast audit --receipt`."""

import secrets
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from holdfast.errors import ConfigError, NameTaken, WrongUse
from holdfast.extensions.receipt.auditing import CHUNKS, audit_receipt
from holdfast.extensions.receipt.signed import MAX_RECEIPT_BYTES, describe_commit, open_receipt, seal_receipt
from holdfast.journal import Journal
from holdfast.journal.finding import find_commit, open_journal
from holdfast.journal.signature import load_signing_key, load_trusted_key
from holdfast.keeping.export import creating
from holdfast.proof.audit import keep_audit
from holdfast.recipe.trust import Trust
from holdfast.terminal.options import print_json, split_out


def receipt_command(
    run: str,
    /,
    *what: Annotated[str, Parameter(name="[COMMIT] OUT.json")],
    signing_key: str,
    model: Path | None = None,
    part: str = "",
) -> None:
    """Write a signed receipt: the chain of commits that led to a checkpoint, with settings, code, data and machines.

    `holdfast audit RUN --receipt OUT.json --key KEY.pub` checks the receipt on any machine, and trains some
    of its chunks again. The receipt is also a model signature of the checkpoint's folder, or of an exported model:
    model_signing verifies it.

    Args:
        run: <store>/<run>.
        what: The commit (its number, its folder, or best; by default the newest) and the file to make.
        signing_key: The private key, a PEM file of holdfast keygen, or env:NAME.
        model: Sign this file or folder, which must contain the commit's weights as export writes them: as safetensors
            or for transformers. The folder may contain more files, such as a tokenizer.
        part: The part of the model that was exported.
    """
    *commit, out = split_out(what, "OUT.json", "for example: holdfast receipt runs/language receipt.json ...")
    if part and model is None:
        raise WrongUse("--part needs --model")
    journal = open_journal(run)
    journal.read_run()
    found = find_commit(journal, *commit)
    key = load_signing_key(signing_key)
    told = describe_commit(journal, found, model, part)
    try:
        with creating(Path(out).absolute()) as writer:
            writer.write(seal_receipt(told, key))
    except NameTaken:
        raise ConfigError(f"{out} exists", hint="choose a different name, or remove the existing file") from None
    print(f"{out}: receipt of commit {found.number} of run {journal.run}, step {found.step}, {found.checkpoint_sha256}")
    if told.others:
        print(f"signed, but the run didn't make these files: {', '.join(told.others)}")


def audit_file(
    journal: Journal, path: Path, keys: list[str], chunks: int | None, seed: int | None, trust: Trust, *, json: bool
) -> int:
    """Audit a receipt for `holdfast audit`, print the result, and return the exit code."""
    if not keys:
        raise WrongUse("--receipt needs the public key of the receipt's signer", hint="add --key KEY.pub")
    if chunks is not None and chunks < 1:
        raise WrongUse(f"--random {chunks}: expected at least 1")
    try:
        with path.open("rb") as file:
            envelope = file.read(MAX_RECEIPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    opened = open_receipt(envelope, [load_trusted_key(source) for source in keys])
    chosen = secrets.randbelow(2**31) if seed is None else seed
    found = audit_receipt(journal, opened, chunks or CHUNKS, chosen, trust)
    for each in found.audits:
        keep_audit(journal, each)
    if json:
        print_json(found.model_dump() | {"is_good": found.is_good})
    else:
        print(found)
    return 0 if found.is_good else 2

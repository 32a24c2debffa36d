"""The parts of a rehearsal inside a rank: continue from a checkpoint that no commit names, and describe the state."""

import hashlib
from typing import Any

from holdfast import state
from holdfast.checkpoint import SHOWN, Metadata, read_checkpoint_lines
from holdfast.provenance.canonical import read_floats
from holdfast.provenance.fingerprint import canonical_json
from holdfast.store import Store
from holdfast.training.build import Training
from holdfast.training.capturing import capture

# The components that `digest_form` leaves out. A trail's lines compare the random generators and the samples, and a
# loader may describe the same position in several ways.
LEFT_OUT = ("rng", "data", "built")


def take_up(training: Training, folder: Store, path: str, metadata: Metadata) -> None:
    """Take up the steps of a restored checkpoint that no commit names: the next save contains them.

    Args:
        folder: the folder with the checkpoint.
        path: the checkpoint's name in the folder.
    """
    record = training.record
    record.lines = [read_floats(line) for line in read_checkpoint_lines(folder, path)]
    if metadata.shown:
        record.gallery.put_back(folder.read(f"{path}/{SHOWN}"))
    record.unsaved_s = metadata.train_s
    training.parent = metadata.previous_checkpoint_sha256
    training.begun.restart(int(record.lines[0]["step"]) - 1, training.parent)


def forget_committed(training: Training, content_id: str) -> None:
    """Forget the recorded steps, because a commit of the present step, with this content id, contains them."""
    training.record.forget()
    training.parent = content_id
    training.begun.restart(training.progress.step, content_id)


def digest_form(training: Training) -> dict[str, str]:
    """Return a digest of each component's form, as a save would write it now: names, dtypes, shapes and plain values.

    The bytes of tensors are not included, because the lines of a detailed trail have their checksums. All ranks call
    this together, and get digests over all ranks.
    """
    payload = state.to_payload(capture(training))
    forms: dict[str, list[Any]] = {name: [each] for name, each in payload.tree.items() if name not in LEFT_OUT}
    for name, tensor in payload.tensors.items():
        component = name.partition(".")[0]
        if component in forms:
            forms[component].append([name, tensor.dtype, [*tensor.shape]])
    digests = {name: hashlib.sha256(canonical_json(form)).hexdigest()[:16] for name, form in forms.items()}
    ranks = training.ranks.gather(digests)
    return {name: "-".join(dict.fromkeys(each[name] for each in ranks if name in each)) for name in ranks[0]}

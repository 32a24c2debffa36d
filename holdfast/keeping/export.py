"""`holdfast export`: the weights of a verified checkpoint, written as files that other tools can read.

Equal weights give equal bytes, on every machine and in every run. The one exception is torch.distributed.checkpoint:
its metadata contains a new id at each export, but the weights are equal.
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from holdfast.checkpoint import Payload, Tensor, read_metadata, read_payload, serialize_tensors
from holdfast.errors import ConfigError, NameTaken, StoreError
from holdfast.journal import Commit, Journal
from holdfast.store import Bytes, Writer
from holdfast.store.local import LocalStore

Form = Literal["safetensors", "transformers", "torch", "dcp"]

EXTRAS = "extras"


def export(journal: Journal, commit: Commit, out: Path, form: Form, part: str = "") -> list[str]:
    """Write a checkpoint's weights to the new file ``out``, and return the tensors' names.

    For the forms ``transformers`` and ``dcp``, ``out`` is a new folder.

    Args:
        part: dotted name of a part of the model, ``extras.NAME`` for one of the extras, or "" for the whole model.

    Raises:
        CheckpointDamaged: a file is missing or differs from its commit.
        ConfigError: there is no such part, the form can't represent it, or ``out`` exists.
    """
    if os.path.lexists(out):  # refuse before reading the whole checkpoint
        raise _taken(out)
    files = _find_configs(journal, commit, part) if form == "transformers" else {}
    payload = read_payload(journal.store, commit)
    weights = find_weights(payload, part)
    try:
        if form == "transformers":
            _write_folder(out, weights, files)
        elif form == "dcp":
            _write_dcp(out, weights)
        else:
            with creating(out) as writer:
                _write_torch(weights, writer) if form == "torch" else _write_pieces(weights, writer)
    except NameTaken:
        raise _taken(out) from None
    return sorted(weights)


def hash_export(journal: Journal, commit: Commit, part: str = "") -> tuple[str, set[str]]:
    """Return the SHA-256 of the safetensors file that `export` would write, and the set of other files' SHA-256.

    The other files are those that `export` writes into a folder for transformers besides the safetensors file.

    Raises:
        CheckpointDamaged: a file is missing or differs from its commit.
        ConfigError: there is no such part.
    """
    weights = hashlib.sha256()
    for piece in serialize_tensors(find_weights(read_payload(journal.store, commit), part)):
        weights.update(piece)
    metadata = read_metadata(journal.store, commit.path)
    configs = metadata.model_configs.get(part, {}) if metadata else {}
    return weights.hexdigest(), {hashlib.sha256(_spell_config(each)).hexdigest() for each in configs.values()}


@contextlib.contextmanager
def creating(out: Path) -> Iterator[Writer]:
    """Create a file on this machine's disk. Yield a writer, as `Store.creating` does.

    Raises:
        ConfigError: the file can't be written.
        NameTaken: the file exists.
    """
    with contextlib.ExitStack() as stack:
        try:
            writer = stack.enter_context(LocalStore(str(out.parent)).creating(out.name))
        except StoreError as error:
            raise ConfigError(str(error), hint="give a path that you may write to") from None
        yield writer


def find_weights(payload: Payload, part: str = "") -> dict[str, Tensor]:
    """Return the tensors of the model, or of a part of it, by their names in the ``state_dict``.

    Raises:
        ConfigError: no tensor belongs to the part.
    """
    tree = payload.tree
    extras = tree.get(EXTRAS) or [{}]
    known = dict(_list_tensors(tree.get("model", {}))) | {
        f"{EXTRAS}.{name}": tensor for name, tensor in _list_tensors(extras[0] if isinstance(extras, list) else extras)
    }
    if part:
        chosen = {name.removeprefix(f"{part}."): each for name, each in known.items() if name.startswith(f"{part}.")}
    else:
        chosen = {name: each for name, each in known.items() if not name.startswith(f"{EXTRAS}.")}
    if not chosen:
        found = sorted({_name_part(name) for name in known})
        raise ConfigError(
            f"the checkpoint has no weights named {part}" if part else "the checkpoint has no weights",
            hint=f"--part names one of: {', '.join(found)}" if found else "",
        )
    return {name: payload.tensors[tensor] for name, tensor in chosen.items()}


def _list_tensors(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names of the tensors in a state's tree, each with its name in the payload."""
    if isinstance(value, dict):
        if set(value) == {"$as"}:  # skip the memory layout, because other tools' files are row-major
            value = value["$as"][0]
        if set(value) == {"$tensor"}:
            yield name, value["$tensor"]
        items = value["$dict"] if set(value) == {"$dict"} else value.items()
        for key, inner in items:
            yield from _list_tensors(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _list_tensors(inner, f"{name}.{number}" if name else str(number))


def _name_part(name: str) -> str:
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == EXTRAS else first


def _find_configs(journal: Journal, commit: Commit, part: str) -> dict[str, Any]:
    metadata = read_metadata(journal.store, commit.path)
    configs = metadata.model_configs if metadata else {}
    if part in configs:
        return configs[part]
    known = ", ".join(sorted(filter(None, configs)))
    raise ConfigError(
        f"{part or 'the model'} can't be exported for transformers: it isn't a model of transformers, has adapters, "
        "or was saved by an earlier Holdfast",
        hint=f"--part {known}" if known else "use --form safetensors, which holds any model",
    )


def _write_pieces(weights: Mapping[str, Tensor], writer: Writer) -> None:
    for piece in serialize_tensors(weights):
        writer.write(piece)


def _write_folder(out: Path, weights: Mapping[str, Tensor], files: Mapping[str, Any]) -> None:
    """Write a folder for ``from_pretrained``. Write config.json last: without it the folder is no model."""
    folder = LocalStore(str(out))
    with creating(out / "model.safetensors") as writer:
        _write_pieces(weights, writer)
    for name, content in sorted(files.items(), reverse=True):
        folder.create(name, _spell_config(content))


def _spell_config(content: Any) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _write_torch(weights: Mapping[str, Tensor], writer: Writer) -> None:
    import torch  # imported late, because the import takes seconds and the other forms don't need this module

    torch.save(_to_state(weights), cast(BinaryIO, _File(writer)))


def _write_dcp(out: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a folder for ``torch.distributed.checkpoint.load``. Its metadata contain an id that differs at each save.

    Raises:
        ConfigError: ``out`` exists, or can't be written.
    """
    # imported late, because the import takes seconds and the other forms don't need this module
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        out.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if only one process saves
            save(_to_state(weights), checkpoint_id=out, no_dist=True)
    except FileExistsError:
        raise _taken(out) from None
    except OSError as error:
        reason = f"{out} can't be written: {error.strerror}"
        raise ConfigError(reason, hint="give a path that you may write to") from None


def _to_state(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return weights as torch's tensors, by name."""
    from holdfast.state import from_payload

    state: dict[str, Any] = from_payload(Payload(weights, {name: {"$tensor": name} for name in weights}))
    return state


@dataclass
class _File:
    """A file with only those methods that ``torch.save`` uses."""

    writer: Writer

    def write(self, data: Bytes) -> int:
        self.writer.write(data)
        return len(memoryview(data).cast("B"))

    def flush(self) -> None:
        pass


def _taken(out: Path) -> ConfigError:
    return ConfigError(f"{out} exists", hint="choose a different name, or remove the existing file")

"""The readers of other programs' checkpoints, one for each format, and the choice between them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError
from holdfast.extensions.importing.accelerate_folder import is_accelerate, read_accelerate
from holdfast.extensions.importing.dcp_folder import is_dcp, read_dcp
from holdfast.extensions.importing.foreign import ForeignCheckpoint
from holdfast.extensions.importing.lightning_file import is_lightning, read_lightning
from holdfast.extensions.importing.safetensors_files import is_safetensors, read_safetensors
from holdfast.extensions.importing.torch_file import is_torch_file, read_torch_file
from holdfast.extensions.importing.trainer_folder import is_trainer, read_trainer


class SourceForm(NamedTuple):
    """The reader of one format of checkpoints.

    Attributes:
        is_of: returns whether a path is a checkpoint of this format.
        read: reads the checkpoint at a path, for the rank of the given number.
    """

    name: str
    is_of: Callable[[Path], bool]
    read: Callable[[Path, int], ForeignCheckpoint]


# The first reader whose `is_of` accepts the path reads it.
FORMS = (
    SourceForm("a Trainer's checkpoint", is_trainer, read_trainer),
    SourceForm("accelerate's save_state", is_accelerate, read_accelerate),
    SourceForm("a folder of torch.distributed.checkpoint", is_dcp, read_dcp),
    SourceForm("safetensors and an optimizer's file", is_safetensors, read_safetensors),
    SourceForm("a Lightning checkpoint", is_lightning, read_lightning),
    SourceForm("a file of torch.save", is_torch_file, read_torch_file),
)


def read_foreign(path: Path, rank: int) -> ForeignCheckpoint:
    """Read another program's checkpoint.

    Raises:
        ConfigError: the path doesn't exist, its format isn't known, or it can't be read.
    """
    if not path.exists():
        raise ConfigError(
            f"there is no file or folder {path}", hint="give the file, or the folder, that the other program has saved"
        )
    for form in FORMS:
        if form.is_of(path):
            return _read(form, path, rank)
    raise ConfigError(
        f"{path} isn't a checkpoint that can be imported",
        hint=f"expected one of: {', '.join(form.name for form in FORMS)}",
    )


def _read(form: SourceForm, path: Path, rank: int) -> ForeignCheckpoint:
    try:
        return form.read(path, rank)
    except ConfigError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path} doesn't have the structure of {form.name}: {type(error).__name__}: {error}",
            hint="compare the file with the one that the other program saved: some of its bytes may be missing",
        ) from None

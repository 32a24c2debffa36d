"""The distribution that installs Holdfast. Its name isn't the package's: ``holdfast`` on PyPI is another project."""

import os
import warnings
from pathlib import Path

DISTRIBUTION = "holdfast-train"
# Records of runs may hold Holdfast itself as a package, by its distribution's present or former name.
OWN_NAMES = frozenset({DISTRIBUTION, "holdfast"})


def spell_install(extra: str) -> str:
    """Return the command that installs Holdfast with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def find_other(folder: Path) -> str:
    """Return the name of holdfast's ``.dist-info`` folder in a folder of packages, or an empty string if there is none.

    List the folder and read only names: reading the metadata of all packages would take most of the import's time.
    """
    try:
        names = os.listdir(folder)
    except OSError:  # a zip file, or a folder that may be searched and not listed
        return ""
    return next((name for name in names if name.startswith("holdfast-") and name.endswith(".dist-info")), "")


def warn_of_other(folder: Path) -> None:
    """Warn in one line if the distribution ``holdfast``, another project or an earlier Holdfast, is in the same folder.

    Args:
        folder: the folder in which Holdfast is installed.
    """
    if other := find_other(folder):
        text = (
            "the distribution holdfast, another project or an earlier Holdfast, lies in the same folder, and each may "
            f"have replaced the other's files: pip uninstall holdfast {DISTRIBUTION}, then install {DISTRIBUTION} again"
        )
        # Python prints the source line of a warning, but a folder has none. So the warning takes one line.
        warnings.warn_explicit(text, RuntimeWarning, str(folder / other), 1)

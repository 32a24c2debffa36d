"""The distribution that installs Holdfast. On PyPI a different project has the name ``holdfast``."""

import os
import warnings
from pathlib import Path

DISTRIBUTION = "holdfast-train"
# The names under which a run's records may list Holdfast itself as a package: its distribution's present and old name.
OWN_NAMES = frozenset({DISTRIBUTION, "holdfast"})


def spell_install(extra: str) -> str:
    """Return the command that installs Holdfast with one of its extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def find_other(folder: Path) -> str:
    """Find a package named ``holdfast`` that is installed in a folder. Return the name of its ``.dist-info``.

    This only lists the names in the folder: reading the metadata of all packages would take most of the time of
    ``import holdfast``.
    """
    try:
        names = os.listdir(folder)
    except OSError:  # the folder is a zip file, or may not be listed
        return ""
    return next((name for name in names if name.startswith("holdfast-") and name.endswith(".dist-info")), "")


def warn_of_other(folder: Path) -> None:
    """Warn if a package ``holdfast`` (a different project, or an earlier Holdfast) is installed in the same folder.

    Args:
        folder: the folder in which Holdfast is installed.
    """
    if other := find_other(folder):
        text = (
            "the package holdfast (another project, or an earlier Holdfast) is installed beside "
            f"{DISTRIBUTION}, and may have overwritten its files: pip uninstall holdfast {DISTRIBUTION}, then install "
            f"{DISTRIBUTION} again"
        )
        # Python prints a warning's source line, too. A folder has no source line, so the warning is a single line.
        warnings.warn_explicit(text, RuntimeWarning, str(folder / other), 1)

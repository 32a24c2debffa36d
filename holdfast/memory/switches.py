"""The switches of the optimizations: the variable ``HOLDFAST_WITHOUT`` names the optimizations that are off."""

import functools
import os

from holdfast.errors import ConfigError

WITHOUT_VARIABLE = "HOLDFAST_WITHOUT"
NAMES = ("buffers", "huge pages", "direct", "priority", "pinning", "late compiler")


def is_on(name: str) -> bool:
    """Return whether an optimization is on: whether HOLDFAST_WITHOUT doesn't name it.

    Raises:
        ConfigError: HOLDFAST_WITHOUT has an unknown name.
    """
    assert name in NAMES
    return name not in _read(os.environ.get(WITHOUT_VARIABLE, ""))


def check_names() -> None:
    """Check the names in HOLDFAST_WITHOUT. Call this before ranks start, because an unknown name would end the ranks.

    Raises:
        ConfigError: a name is unknown.
    """
    _read(os.environ.get(WITHOUT_VARIABLE, ""))


@functools.cache
def _read(text: str) -> frozenset[str]:
    names = frozenset(filter(None, (name.strip() for name in text.split(","))))
    if unknown := sorted(names - {*NAMES}):
        raise ConfigError(
            f"{WITHOUT_VARIABLE}: there is no optimization {unknown[0]!r}", hint=f"known: {', '.join(NAMES)}"
        )
    return names

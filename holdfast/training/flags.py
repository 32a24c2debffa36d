"""The check that a program doesn't change torch's global settings, with the user's line in the error."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.config import Determinism
from holdfast.errors import DeterminismError
from holdfast.machine import determinism
from holdfast.machine.compiling import steady_compiler


@contextlib.contextmanager
def locating_flags() -> Iterator[None]:
    """If the block raises DeterminismError, add the user's line that changes torch's setting to the message."""
    try:
        yield
    except DeterminismError as error:
        from holdfast.provenance.settings_lines import find_setter  # only for this message

        place = find_setter(error.data.get("flags", ()))
        if not place:
            raise
        raise DeterminismError(f"{place}{error.message}", hint=error.hint, **error.data) from error


def check_built_flags(settings: Determinism) -> dict[str, Any]:
    """Check torch's settings after the recipe was built, and return them.

    Raises:
        DeterminismError: in strict mode, a setting is not what strict mode needs.
    """
    with locating_flags():
        determinism.check(settings, "after the recipe was built")
    steady_compiler(settings)
    return determinism.read_flags()


def check_flags(settings: Determinism, built: Mapping[str, Any], step: int) -> None:
    """Check that a step has left torch's settings as `check_built_flags` returned them.

    Raises:
        DeterminismError: in strict mode, a setting has changed.
    """
    with locating_flags():
        determinism.check_unchanged(settings, built, f"after step {step}")
    steady_compiler(settings)

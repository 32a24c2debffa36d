"""The libraries whose private parts Holdfast relies on: the tested versions, and the installed versions.

Holdfast's package sets no upper bound for most libraries, because a bound would exclude newer versions for every user.
`holdfast doctor` reports an installed version that was never tested. `make test-versions` tests the oldest and the
newest version.
"""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# For each library: the oldest version that pyproject.toml allows, and the newest version with which Holdfast's tests of
# this library have passed.
TESTED = {
    "torch": ("2.9.0", "2.14.1"),
    "accelerate": ("1.15.0", "1.15.0"),
    "torchdata": ("0.11.0", "0.11.0"),
    "prefect": ("3.9.1", "3.9.1"),
    "transformers": ("5.3.0", "5.24.0"),
    "lightning": ("2.6.0", "2.6.6"),
}


def find_installed() -> dict[str, str]:
    """Return the versions of the libraries of `TESTED` that are installed. This imports none of them."""
    found = {}
    for name in TESTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_versions(installed: Mapping[str, str]) -> dict[str, tuple[str, bool]]:
    """Return, for each library in ``installed``, a text about its version, and whether this version was tested."""
    described = {}
    for name, here in installed.items():
        oldest, newest = TESTED[name]
        between = f"tested with {oldest}" + (f" to {newest}" if newest != oldest else "")
        is_tested = _order(oldest) <= _order(here) <= _order(newest)
        described[name] = f"{here}, {between}", is_tested
    return described


def _order(number: str) -> tuple[int, ...]:
    """Return a sort key for versions. 2.13.0+cpu and 2.13.0 count as 2.13, and 2.15.0rc1 counts as 2.15."""
    release = re.match(r"\d+(?:\.\d+)*", number)
    parts = [int(part) for part in release[0].split(".")] if release else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)

"""No command opens, connects to, starts or imports what any value of any record of a run names."""

from pathlib import Path

import pytest

from tests.conftest import IN_SOAK, IS_SOAK
from tests.support.lives import Lives
from tests.support.walked import OPENERS, make_run

pytestmark = pytest.mark.slow

# Of the leaves of all records, one in so many; and how many openers each of these gets.
PARTS, MOST = (1, len(OPENERS)) if IS_SOAK else (200, 1)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["reading", *(pytest.param(each, marks=IN_SOAK) for each in ("training", "flows"))])
def test_no_command_opens_what_a_leaf_of_a_record_names(
    tmp_path: Path, nursery: Lives, kind: str, request: pytest.FixtureRequest
) -> None:
    make_run(tmp_path, nursery)
    most, server = MOST if kind == "reading" else 1, request.getfixturevalue("prefect_api") if kind == "flows" else {}
    done = nursery.call("tests.support.walked:walk", str(tmp_path), kind, 7, PARTS, most, **server)
    assert done.returncode == 0, done.stdout + done.stderr

"""No command opens, connects to, starts or imports what any value of any record of a run names."""

import random
from pathlib import Path

import pytest

from tests.conftest import IN_SOAK, IS_SOAK
from tests.support.lives import Lives
from tests.support.walked import OPENERS, make_run

pytestmark = pytest.mark.slow

# The 1,700 leaves of all records are walked in parts, each in a process of its own, which has ten minutes. Each leaf
# gets one opener: all 39 in each leaf would be 1.9 million commands that read. Each soak takes its turn, which its
# output names.
PARTS = 200
WALKED, TURN = (range(PARTS), random.randrange(len(OPENERS))) if IS_SOAK else ([7], 0)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["reading", *(pytest.param(each, marks=IN_SOAK) for each in ("training", "flows"))])
def test_no_command_opens_what_a_leaf_of_a_record_names(
    tmp_path: Path, nursery: Lives, kind: str, request: pytest.FixtureRequest
) -> None:
    make_run(tmp_path, nursery)
    server = request.getfixturevalue("prefect_api") if kind == "flows" else {}
    for part in WALKED:
        done = nursery.call("tests.support.walked:walk", str(tmp_path), kind, part, PARTS, TURN, **server)
        assert done.returncode == 0, done.stdout + done.stderr

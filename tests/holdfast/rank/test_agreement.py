"""All ranks learn of a rank's wish to save or to stop, at the same step."""

import json
from pathlib import Path

import pytest

from holdfast.rank.agreement import Wish
from tests.support.agreeing import RANKS
from tests.support.lives import Lives

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("is_slow", "late"), [(False, 1), (True, 0)])
def test_all_ranks_do_what_one_wishes_once(nursery: Lives, tmp_path: Path, is_slow: bool, late: int) -> None:
    """Beside a step the answer takes one step more; ranks with slow steps wait for it, as all do for the first."""
    done = nursery.call("tests.support.agreeing:agree", str(tmp_path), is_slow)
    assert done.returncode == 0, done.stderr
    answers = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    expected = [Wish.NOTHING] * 6
    expected[0], expected[2 + late], expected[4 + late] = Wish.SAVE, Wish.SAVE, Wish.STOP
    assert answers == [expected] * RANKS

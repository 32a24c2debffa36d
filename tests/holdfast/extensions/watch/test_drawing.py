"""The view fits every terminal, and no text of a store controls it."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, ConsoleDimensions, RenderableType

from holdfast.extensions.watch.drawing import BARS, Poll, draw_run, draw_store, make_sparks
from holdfast.extensions.watch.lines import Lines, follow
from holdfast.extensions.watch.reading import RunReader, StoreReader
from holdfast.extensions.watch.seen import Seen
from holdfast.journal import Journal
from holdfast.journal.endings import Ending
from holdfast.machine.slow_ranks import SlowRank
from holdfast.store import open_store
from tests.support.makers import make_commit, make_latest
from tests.support.watched import make_long_run

# Sets the title, clears the screen, goes up, writes right to left, ends a line, and a C1 control.
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[A\u202eevil\r\n\t\x9b31m\x00"


def draw(view: RenderableType, width: int = 100, height: int = 40) -> list[str]:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None, width=width, height=height).print(view)
    return out.getvalue().splitlines()


def read(folder: Path, **options: bool) -> Seen:
    make_long_run(str(folder), "long", 12, epochs=24, **options)
    return RunReader(Journal(open_store(str(folder)), "long")).begin()


def at(seen: Seen, age_s: float = 1.0, **fields: object) -> Poll:
    return Poll(seen.sign_at + age_s, **fields)  # type: ignore[arg-type]


def test_three_preemptions_of_different_reasons_are_shown(tmp_path: Path) -> None:
    seen = read(tmp_path, is_ended=False)
    lines = draw(draw_run(seen, at(seen), ConsoleDimensions(110, 40)), 110)
    text = "\n".join(lines)
    assert lines[1] == "training: attempt 4 on host (pid 4)"
    assert "step 120 of 240" in lines[2]
    assert "epoch 12 of 24" in lines[2]
    assert "probe entropy  0.5" in text
    assert "5 steps/s, 24 s left at this speed" in text
    assert "13: steps 120-130, began 1 s ago, and its commit is expected after 2 s" in text
    for number, ended in enumerate(("preempted: as it was told", "vanished: as", "out of memory: as"), start=1):
        assert any(line.startswith(f"{number} ") and ended in line for line in lines), ended
    assert lines[-1] == "q leaves"


@pytest.mark.parametrize("width", [20, 60, 79, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_no_line_is_longer_than_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    seen = read(tmp_path, is_ended=False)
    size = ConsoleDimensions(width, height)
    lines = draw(draw_run(seen, at(seen, trouble="no answer"), size), width, height)
    lines += draw(draw_store("s", [seen] * 50, at(seen), size), width, height)
    assert max(map(len, lines)) <= width
    if width >= 60:
        assert any(line.startswith("12 ") and "110-120" in line for line in lines)
    assert height < 24 or len(draw(draw_run(seen, at(seen), size), width, height)) <= height


@pytest.mark.parametrize("width", [70, 200])
def test_a_stalled_run_says_what_it_waits_for_on_every_terminal(tmp_path: Path, width: int) -> None:
    seen = read(tmp_path, is_ended=False)
    lines = draw(draw_run(seen, at(seen, age_s=500.0), ConsoleDimensions(width, 24)), width, 24)
    assert lines[1] == "stalled: waits for a commit of attempt 4, or for a further attempt"
    assert lines[2].startswith("no commit for 8 min, expected after 2 s; the attempt on host")
    assert len(lines) <= 24
    assert (
        sum("0-" in line.split("  epoch")[0] and line[:1].isdigit() for line in lines) == 5
    )  # the reason takes a line
    assert " stalled " in "\n".join(draw(draw_store("s", [seen], at(seen, age_s=500.0), ConsoleDimensions(width, 24))))


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    seen = read(tmp_path, is_ended=False)
    newest = seen.commits[-1].model_copy(update={"metrics": {"avg_loss": None}})
    seen = replace(seen, commits=(*seen.commits[:-1], newest))
    lines = draw(draw_run(seen, at(seen), ConsoleDimensions(110, 40)), 110)
    assert any(line.startswith("loss ") and line.rstrip().endswith("not finite") for line in lines)
    assert any(line.startswith("12 ") and "not finite" in line for line in lines)


def test_a_slow_rank_is_shown_with_the_newest_commit(tmp_path: Path) -> None:
    seen = read(tmp_path, is_ended=False)
    slow = seen.commits[-1].model_copy(update={"slow_rank": SlowRank(1, f"node{EVIL}", 0.46, 10, 120)})
    assert "waited" not in "".join(draw(draw_run(seen, at(seen), ConsoleDimensions(110, 40)), 110))
    seen = replace(seen, commits=(*seen.commits[:-1], slow))
    text = "the other ranks waited for rank 1 on node"
    drawn = [line for line in draw(draw_run(seen, at(seen), ConsoleDimensions(110, 40)), 110) if "waited" in line]
    assert [bool(re.match(f"slow rank +{text}", line)) and EVIL not in line for line in drawn] == [True]
    printed = [line for line in Lines().list_new(seen, seen.sign_at) if "waited" in line]
    assert [line.startswith(f"note: {text}") for line in printed] == [True]


def test_an_unproved_resume_is_shown_with_the_command_that_audits_it(tmp_path: Path) -> None:
    seen = read(tmp_path)
    seen = replace(seen, commits=(seen.commits[-1].model_copy(update={"unproved": [7]}),))
    drawn = "".join(draw(draw_run(seen, at(seen), ConsoleDimensions(400, 40)), 400))
    assert f"(holdfast audit {tmp_path}/long --commit 7)" in drawn


def test_a_store_of_many_runs_shows_those_that_train_first(tmp_path: Path) -> None:
    seen = read(tmp_path, is_ended=False)
    runs = [replace(seen, run=f"r{number:02d}", problem="damaged") for number in range(30)] + [seen]
    lines = draw(draw_store("s", runs, at(seen), ConsoleDimensions(100, 12)))
    assert lines[2].startswith("long ")
    assert "and 25 more runs" in lines


def test_what_the_store_doesnt_answer_is_said(tmp_path: Path) -> None:
    seen = read(tmp_path)
    lines = draw(draw_run(seen, at(seen, trouble="refused", silent_s=12.0), ConsoleDimensions(100, 40)))
    assert lines[-2] == "no answer from the store for 12 s, trying again; this view is out of date: refused"


def test_no_text_of_a_store_controls_the_terminal(tmp_path: Path) -> None:
    journal = Journal(open_store(str(tmp_path)), "evil\x1b[31m")
    journal.begin(EVIL)
    journal.claim_attempt(1, EVIL, EVIL, 1, {})
    commit = make_commit(1, metrics={"avg_loss": 1.0, EVIL: 2.0}, why=EVIL)
    journal.publish_commit(commit)
    journal.publish_latest(make_latest(commit))
    journal.end_attempt(1, Ending(EVIL, EVIL, 10))
    seen = RunReader(journal).begin()
    assert seen.head is not None
    assert EVIL in seen.head.metrics
    poll = at(seen, trouble=EVIL, notes=(EVIL,))
    size = ConsoleDimensions(400, 60)
    shown = replace(seen, missing=(EVIL,))
    store = StoreReader(open_store(str(tmp_path)))
    views = [
        draw_run(shown, poll, size),
        draw_store(EVIL, [*store.begin(), Seen(EVIL, problem=EVIL)], poll, size),
    ]
    printed = [next(follow(store, 1.0))]
    text = "\n".join([*printed, *(line for view in views for line in draw(view, 400))])
    assert text.count("evil") > 8
    assert not {character for character in text if not character.isprintable()} - {"\n"}
    assert "\\x1b[2J" in text


def test_a_curve_spans_its_values_and_survives_odd_ones() -> None:
    assert make_sparks([0.0, 1.0, 2.0], 9) == BARS[0] + BARS[4] + BARS[-1]
    assert make_sparks([1.0, 1.0], 9) == BARS[0] * 2
    assert make_sparks([], 9) == ""
    assert make_sparks(list(map(float, range(99))), 9, is_plain=True).isascii()
    assert len(make_sparks([-1e308, 1e308], 9)) == 2

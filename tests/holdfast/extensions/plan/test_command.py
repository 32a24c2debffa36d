"""The command ``plan``: the best chunks, the costs of audits, and how virtual ranks are dealt."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import app, run_app
from holdfast.config import Retention
from holdfast.journal.endings import Ending
from holdfast.keeping.retention import prune_by_policy
from holdfast.store import open_store
from tests.support.makers import (
    IDENTITY,
    SETTINGS,
    STEPS_PER_EPOCH,
    head_step,
    make_line,
    save_next,
    train,
)


def ask_json(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run_app(app, [*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_shows_costs_losses_and_the_best_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = make_line(open_store(str(tmp_path)), "run")
    run = f"{tmp_path}/run"
    assert run_app(app, ["plan", run]) == 1
    assert (
        "no commit yet that counts\nhint: train until the first commit, which records how long a save takes"
        in capsys.readouterr().err
    )
    train(line)
    assert run_app(app, ["plan", run]) == 1
    assert "have no record of how long their steps and saves took" in capsys.readouterr().err
    took = {"train_s": 5.0, "stall_s": 2.0, "save_s": 4.0, "restart_s": 20.0}
    line.commit(save_next(line).model_copy(update=took), "chunk")
    line.journal.end_attempt(1, Ending("rank_crashed", step=head_step(line)))

    planned = ask_json("plan", run, capsys=capsys)
    assert planned["measured"] == {
        "step_s": 0.5,
        "stall_s": 2.0,
        "save_s": 4.0,
        "restart_s": 20.0,
        "slow_s": 0.0,
        "count": 1,
    }
    assert (planned["losses"]["count"], planned["losses"]["attempts"]) == (1, 1)
    assert planned["mean_between_losses_s"] == pytest.approx(1800, abs=60)
    assert (planned["interval"]["steps"], planned["interval"]["bound"]) == (pytest.approx(170, abs=2), "least lost")
    assert planned["best"]["steps"] == planned["interval"]["steps"]
    assert planned["current"]["steps"] == STEPS_PER_EPOCH
    line.journal.record_config(SETTINGS, IDENTITY, {"epochs": 9})
    assert ask_json("plan", run, capsys=capsys)["current"] is None, "its settings are not whole"
    assert run_app(app, ["plan", run]) == 0
    shown = capsys.readouterr().out
    assert "a save stalls training for 2 s" in shown
    assert "an attempt trains 20 s after it has begun" in shown
    assert re.search(r"losses    1 unannounced in \S+ h of 1 attempt\n", shown)
    assert re.search(r"interval  8\d\.\d s, 1\d\d steps: sqrt\(2 x cost x time between losses\)", shown)
    assert "audits" not in shown


def test_plan_says_what_a_share_of_audits_costs_and_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = make_line(open_store(str(tmp_path)), "run")
    run = f"{tmp_path}/run"
    for _ in range(4):
        took = {"train_s": 7200.0, "stall_s": 720.0, "save_s": 4.0, "restart_s": 60.0}
        line.commit(save_next(line).model_copy(update=took), "chunk")
    planned = ask_json("plan", run, "--audit-share", "0.02", capsys=capsys)["audits"]
    training_s = 0.02 * 86400 / 1.1
    assert planned["audits_a_day"] == pytest.approx(training_s / 7200)
    assert planned["gpu_s"] == pytest.approx(training_s * (1 + 60 / 7200))
    assert (planned["once"], planned["within_s"]) == (pytest.approx(0.02), 5 * 86400 + 7200)
    assert run_app(app, ["plan", run, "--audit-share", "0.02"]) == 0
    shown = capsys.readouterr().out
    assert "audits    0.218 a day for 0.02 of the training time\n          each trains 7,200 s again" in shown
    assert "costs     1,584 s of GPUs a day, of 1 rank:\n          1,571 s of training, and 13.1 s to start\n" in shown
    assert "finds     a single chunk that was computed wrongly: with a probability of at least 2.00%\n" in shown
    assert "          in the first night with a probability of 22%, surely within 122 h\n" in shown
    prune_by_policy(line.journal, Retention(keep_last=2), STEPS_PER_EPOCH)
    assert ask_json("plan", run, "--audit-share", "1", capsys=capsys)["audits"]["audits_a_day"] == 1
    assert run_app(app, ["plan", run, "--audit-share", "2"]) == 1
    assert "--audit-share 2: expected a share of the training time, such as 0.01" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chunk", "steps", "is_auto"), [("[chunk]\nsteps = 4", 4, False), ("", 10, False), ('chunk = "auto"', 170, True)]
)
def test_plan_compares_with_the_chunks_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chunk: str, steps: int, is_auto: bool
) -> None:
    line = make_line(open_store(str(tmp_path)), "run")
    took = {"train_s": 5.0, "stall_s": 2.0, "save_s": 4.0}
    line.commit(save_next(line).model_copy(update=took), "chunk")
    line.journal.end_attempt(1, Ending("rank_crashed", step=head_step(line)))
    config = tmp_path / "a.toml"
    config.write_text(f'recipe = "m:f"\nrun = "run"\nstore = "{tmp_path}"\nepochs = 999\n{chunk}\n')
    planned = ask_json("plan", str(config), capsys=capsys)
    assert (planned["current"]["steps"], planned["is_auto"]) == (steps, is_auto)
    current, best = (planned[name]["expected"] for name in ("current", "best"))
    assert current["redone"] / best["redone"] == pytest.approx(steps / planned["best"]["steps"])
    assert run_app(app, ["plan", str(config)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.split()[:2] == (["automatic,", "with"] if is_auto else ["as", "it"])
    assert last.rstrip().endswith(f"{sum(current.values()):.2%}")


@pytest.mark.parametrize(
    ("compute", "dealing", "said"),
    [
        ("ranks = 3\nvirtual_ranks = 8", (3, 8, 3, 1 / 9), ["waits for 11% of a step", "with 12 to 24 virtual ranks"]),
        ("ranks = 4\nvirtual_ranks = 8", (4, 8, 3, 1 / 9), ["at worst, with 3,", "with 16 to 32 virtual ranks"]),
        ("ranks = 4\nvirtual_ranks = 32", (4, 32, 3, 1 / 33), ["with 3, an average rank waits for 3% of a step"]),
        ('ranks = 2\nnodes = "1:2"\nvirtual_ranks = 8\nrendezvous = "a:1"', (4, 8, 3, 1 / 9), ["ranks     4, which"]),
        ("ranks = 1\nvirtual_ranks = 8", None, []),
        ("ranks = 4", None, []),
    ],
)
def test_plan_says_how_evenly_virtual_ranks_are_dealt(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    compute: str,
    dealing: tuple[int, int, int, float] | None,
    said: list[str],
) -> None:
    line = make_line(open_store(str(tmp_path)), "run")
    line.commit(save_next(line).model_copy(update={"train_s": 5.0, "stall_s": 2.0, "save_s": 4.0}), "chunk")
    config = tmp_path / "a.toml"
    config.write_text(f'recipe = "m:f"\nrun = "run"\nstore = "{tmp_path}"\nepochs = 9\n[compute]\n{compute}\n')
    planned = ask_json("plan", str(config), capsys=capsys)["dealing"]
    assert (planned and tuple(planned.values())) == (dealing and pytest.approx(dealing))
    assert run_app(app, ["plan", str(config)]) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in said)
    assert ("virtual ranks" in shown) == (dealing is not None)
    assert ("a new run does better" in shown) == (dealing is not None and dealing[1] < 4 * dealing[0])

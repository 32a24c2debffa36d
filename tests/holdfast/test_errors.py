"""Every error says what to do, is what a caller would catch, and survives a process boundary."""

import pickle
import re

import pytest
from cyclopts import App

from holdfast import errors
from holdfast.errors import HoldfastError
from holdfast.terminal.command import complain, run_app


def classes() -> list[type[HoldfastError]]:
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, HoldfastError)]


@pytest.mark.parametrize("cls", classes())
def test_is_drawn_in_the_tree(cls: type[HoldfastError]) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if cls.__name__ in line)
    builtins = [base.__name__ for base in cls.__bases__ if not issubclass(base, HoldfastError)]
    assert all(name in line for name in builtins if cls is not HoldfastError)


@pytest.mark.parametrize("cls", classes())
def test_crosses_processes(cls: type[HoldfastError]) -> None:
    error = cls("what failed", hint="what to do", step=3)
    for copy in (pickle.loads(pickle.dumps(error)), errors.from_json(errors.to_json(error))):
        assert type(copy) is cls
        assert (str(copy), copy.hint, copy.data) == ("what failed", "what to do", error.data)
        assert copy.data["step"] == 3


def test_an_unknown_class_is_still_an_error() -> None:
    assert type(errors.from_json({"class": "Exception", "message": "m"})) is errors.RunStopped


def test_exit_codes_are_the_documented_ones() -> None:
    assert {cls.exit_code for cls in classes()} == {1, 2, 3}


@pytest.mark.parametrize(
    "cls", [errors.RankHung, errors.OutOfMemory, errors.NoProgress, errors.StoreFull, errors.Damage]
)
def test_a_command_names_the_page_if_an_error_has_no_hint(
    cls: type[HoldfastError], capsys: pytest.CaptureFixture[str]
) -> None:
    app = App()

    @app.default
    def fail(*, hint: str = "") -> None:
        raise cls("what failed", hint=hint)

    assert run_app(app, []) == cls.exit_code
    said, hint = capsys.readouterr().err.splitlines()
    assert said == "error: what failed"
    assert hint.startswith("hint: holdfast docs troubleshooting#what-to-do-")
    run_app(app, ["--hint", "free some space"])
    assert capsys.readouterr().err == "error: what failed\nhint: free some space\n"


def test_a_slurm_jobs_last_lines_have_a_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is queued again appends to the same file."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    complain("what failed", "do this", 3)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "error: what failed", "hint: do this",
    ]  # fmt: skip
    assert all(line.startswith("20") for line in lines)

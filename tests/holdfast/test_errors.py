"""Every error says what to do, is what a caller would catch, and survives a process boundary."""

import pickle

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError


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

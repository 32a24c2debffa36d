"""An error names the line of the user's own code that led to it."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.provenance.location import describe_error, find_hint
from holdfast.provenance.ownership import is_own_file
from holdfast.recipes import language


@pytest.mark.parametrize(
    ("filename", "is_own"),
    [
        (__file__, True),
        (language.__file__, True),
        (holdfast.__file__, False),
        (torch.__file__, False),
        (json.__file__, False),
        (f"{sysconfig.get_paths()['purelib']}/anything.py", False),
        ("/opt/other/lib/python3.11/site-packages/package/module.py", False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_own_code_is_distinguished_from_installed_code(filename: str, is_own: bool) -> None:
    assert is_own_file(filename) is is_own


def test_the_line_is_the_last_one_of_the_users_code() -> None:
    """Torch's function raises, three calls further down."""
    with pytest.raises(ValueError, match="batch_size") as caught:
        torch.nn.CrossEntropyLoss()(torch.ones(2, 3), torch.ones(4).long())
    here = caught.traceback[0].lineno + 1
    assert describe_error(caught.value).startswith(f"{__file__}:{here}: ValueError: Expected input batch_size")


def test_without_user_code_the_line_is_the_one_that_raised() -> None:
    def own() -> None:
        json.loads("{")

    with pytest.raises(json.JSONDecodeError) as caught:
        own()
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    assert describe_error(caught.value).startswith(str(Path(json.__file__).parent))


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError("lost")


def test_an_error_of_a_loader_worker_is_one_line() -> None:
    with pytest.raises(KeyError) as caught:
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    line = Broken.__getitem__.__code__.co_firstlineno + 1
    assert describe_error(caught.value) == f"{__file__}:{line}: KeyError: 'lost', in a loader worker"


def test_an_operation_without_a_deterministic_form_has_a_hint() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert 'determinism.mode="fast"' in find_hint(caught.value)

"""The error of a rank: whether new ranks would raise it again."""

import json
import queue
import urllib.error

import pytest
import torch
from torch.distributed import DistBackendError

from holdfast.errors import OutOfMemory, RecipeBroken, RecipeFailed
from holdfast.rank.failure import comes_again, describe_failure


class BadLabelError(Exception):
    """The user's own class."""


def multiply() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def read() -> None:
    json.loads("{")


@pytest.mark.parametrize("call", [multiply, read, lambda: [][0], lambda: {}["x"], lambda: 1 / 0, lambda: int("x")])
def test_an_error_of_a_program_comes_again(call: object) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        call()  # type: ignore[operator]
    assert comes_again(raised.value)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (BadLabelError("-1"), True),
        (AssertionError(), True),
        (NotImplementedError("later"), True),
        (RecursionError("maximum recursion depth exceeded"), True),
        (RuntimeError("element 0 of tensors does not require grad"), True),
        (RuntimeError("the shapes of a skip connection differ"), True),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"), True),
        (RuntimeError("the relationship of heads and width"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), False),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Bus error."), False),
        (RuntimeError("Pin memory thread exited unexpectedly"), False),
        (RuntimeError("unable to open shared memory object </torch_1> in read-write mode"), False),
        (RuntimeError("received 0 items of ancdata"), False),
        (torch.AcceleratorError("device-side assert triggered"), False),
        (DistBackendError("a peer is gone"), False),
        (OSError(5, "Input/output error"), False),
        (FileNotFoundError("shard-17.tar"), False),
        (urllib.error.HTTPError("http://data", 503, "try later", None, None), False),  # type: ignore[arg-type]
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (EOFError(), False),
        (queue.Empty(), False),
    ],
)
def test_an_error_of_the_surroundings_may_not_come_again(error: Exception, again: bool) -> None:
    assert comes_again(error) is again
    described = describe_failure(None, error)
    assert type(described) is (RecipeBroken if again else RecipeFailed)
    assert described.is_retryable is not again


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 4 bytes")])
def test_too_little_memory_has_an_error_of_its_own(error: Exception) -> None:
    assert isinstance(describe_failure(None, error), OutOfMemory)

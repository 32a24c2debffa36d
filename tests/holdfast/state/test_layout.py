"""Elements that share memory, as ``expand`` makes them."""

import pytest
import torch
from torch import Tensor

from holdfast.state.layout import copy_into, is_expanded


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(1).expand(4, 3),
        torch.zeros(4, 1).expand(4, 3),
        torch.zeros(3, 4).T,
        torch.zeros(()),
        torch.zeros(4, 0),
        torch.eye(4).to_sparse(),
    ],
    ids=["of one number", "of a column", "of columns", "without dimensions", "empty", "sparse"],
)
def test_a_copy_writes_into_a_tensor_of_any_layout(target: Tensor) -> None:
    source = (target * 0 + 7) if target.layout is torch.strided else target * 3
    strides = target.stride() if target.layout is torch.strided else None
    copy_into(target, source)
    assert torch.equal(target.to_dense(), source.to_dense())
    assert strides is None or target.stride() == strides


def test_a_tensor_is_expanded_if_elements_share_memory() -> None:
    assert is_expanded(torch.zeros(1).expand(2))
    assert not is_expanded(torch.zeros(1).expand(1))
    assert not is_expanded(torch.zeros(2, 2))
    assert not is_expanded(torch.eye(2).to_sparse())

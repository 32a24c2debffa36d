"""The norm of a gradient."""

from collections.abc import Iterable

from torch import Tensor, nn

from holdfast.state import gather_whole


def take_local_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of the gradient of parameters; if they are sharded, all have to be on one mesh."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    return gather_whole(nn.utils.get_total_norm(dense))

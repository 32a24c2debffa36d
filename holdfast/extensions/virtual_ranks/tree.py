"""A sum in the order of a fixed binary tree, so that the bits of the sum don't depend on which rank adds which numbers.

Floating-point addition is commutative but not associative. So the shape of the tree alone decides the result. Leaf i is
node (0, i). Node (level, index) is the sum of the nodes (level - 1, 2 * index) and (level - 1, 2 * index + 1). If no
leaf is under the second of these, the node is equal to the first.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class Node:
    """A node of the tree: the sum of the leaves from ``index * 2**level`` to before ``(index + 1) * 2**level``."""

    level: int
    index: int


class TreeSum:
    """A sum of tensors over all or some leaves of a tree. Its partial sums are kept as in a binary counter.

    Args:
        leaves: the number of leaves of the whole tree.

    Attributes:
        parts: the partial sums, by node: the smallest set of nodes that together cover the added leaves.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._root = Node((leaves - 1).bit_length(), 0)
        self.parts: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor) -> None:
        """Add ``value``, the sum of a node's leaves. Don't use it afterwards, because this object may change it."""
        while node != self._root:
            if node.index % 2:
                left = self.parts.pop(Node(node.level, node.index - 1), None)
                if left is None:
                    break
                value = left.add_(value)
            elif (node.index + 1) << node.level < self._leaves:
                right = self.parts.pop(Node(node.level, node.index + 1), None)
                if right is None:
                    break
                value = value.add_(right)
            node = Node(node.level + 1, node.index // 2)
        self.parts[node] = value

    @property
    def is_complete(self) -> bool:
        """Return whether all leaves have been added."""
        return self._root in self.parts

    def root(self) -> Tensor:
        """Return the sum over all leaves. Each leaf must have been added once."""
        return self.parts[self._root]


@functools.cache
def list_parts(leaves: int, block: range) -> list[Node]:
    """Return the nodes that `TreeSum.parts` has after a block of leaves was added."""
    tree = TreeSum(leaves)
    for leaf in block:
        tree.add(Node(0, leaf), torch.zeros(()))
    return list(tree.parts)


def sum_columns(values: Tensor) -> Tensor:
    """Return the sum of each row of a matrix, shape (n, m) to (n,). A row's sum doesn't depend on the other rows.

    The second half of the columns is added to the first half, again and again, until one column is left. ``Tensor.sum``
    would add in an order that depends on the shape, the device and the number of threads. The matrix is overwritten.
    """
    if not values.shape[1]:
        return values.new_zeros(len(values))
    while (columns := values.shape[1]) > 1:
        half = (columns + 1) // 2
        values[:, : columns - half].add_(values[:, half:])
        values = values[:, :half]
    return values[:, 0]


def split_leaves(leaves: int, parts: int) -> list[range]:
    """Return the leaves, divided into contiguous blocks whose sizes differ by one at most."""
    size, more = divmod(leaves, parts)
    starts = [number * size + min(number, more) for number in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(starts)]

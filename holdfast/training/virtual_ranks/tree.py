"""A sum in the order of a fixed binary tree, so that its bits don't depend on which rank adds which part.

Floating-point addition is commutative but not associative: the shape of the tree fixes the result. Leaf i is node
(0, i). Node (level, index) is the sum of the nodes (level - 1, 2 * index) and (level - 1, 2 * index + 1), or equal to
the first if no leaf is under the second.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class Node:
    """A node of the tree: the sum of the leaves ``index * 2**level`` up to ``(index + 1) * 2**level``."""

    level: int
    index: int


class TreeSum:
    """A sum of tensors over all leaves of a tree, or some of them. It works like a binary counter.

    Args:
        leaves: the number of leaves of the whole tree.

    Attributes:
        parts: the sums so far, by node. They are the fewest nodes that together cover the added leaves.
    """

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._root = Node((leaves - 1).bit_length(), 0)
        self.parts: dict[Node, Tensor] = {}

    def add(self, node: Node, value: Tensor) -> None:
        """Add the sum of a node. This object may then change the tensor."""
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
        """Return the sum over all leaves, each of which was added once."""
        return self.parts[self._root]


@functools.cache
def list_parts(leaves: int, block: range) -> list[Node]:
    """Return the nodes in `TreeSum.parts` after the leaves of a block were added."""
    tree = TreeSum(leaves)
    for leaf in block:
        tree.add(Node(0, leaf), torch.zeros(()))
    return list(tree.parts)


def sum_columns(values: Tensor) -> Tensor:
    """Return the sum of each row of a matrix, shape (n, m) to (n,). Its bits don't depend on the other rows.

    The second half of the columns is added to the first half until one column is left. ``Tensor.sum`` would add in an
    order that depends on the shape, the device and the number of threads. The matrix is overwritten.
    """
    if not values.shape[1]:
        return values.new_zeros(len(values))
    while (columns := values.shape[1]) > 1:
        half = (columns + 1) // 2
        values[:, : columns - half].add_(values[:, half:])
        values = values[:, :half]
    return values[:, 0]


def split_leaves(leaves: int, parts: int) -> list[range]:
    """Return contiguous blocks of the leaves, one for each part. The blocks' sizes differ by one at most."""
    size, more = divmod(leaves, parts)
    starts = [number * size + min(number, more) for number in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(starts)]

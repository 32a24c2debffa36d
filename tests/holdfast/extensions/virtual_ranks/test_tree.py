"""A sum in the order of a fixed tree: equal bits, however the leaves are dealt out."""

import itertools

import pytest
import torch

from holdfast.extensions.virtual_ranks.tree import Node, TreeSum, list_parts, split_leaves, sum_columns


def add_leaves(values: torch.Tensor, block: range) -> TreeSum:
    tree = TreeSum(len(values))
    for leaf in block:
        tree.add(Node(0, leaf), values[leaf].clone())
    return tree


def add_in_blocks(values: torch.Tensor, blocks: list[range]) -> torch.Tensor:
    """Sum each block alone, and then the blocks' sums, as ranks do."""
    whole = TreeSum(len(values))
    for block in blocks:
        for node, value in add_leaves(values, block).parts.items():
            whole.add(node, value)
    return whole.root()


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6, 7, 8, 11, 12, 13, 16, 24])
def test_any_number_of_parts_gives_the_same_bits(leaves: int) -> None:
    values = torch.randn(leaves, 300, generator=torch.Generator().manual_seed(leaves)) ** 9
    straight = add_leaves(values, range(leaves)).root()
    for parts in range(1, leaves + 1):
        assert torch.equal(add_in_blocks(values, split_leaves(leaves, parts)), straight), parts


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_of_the_parts_does_not_count(order: tuple[int, ...]) -> None:
    values = torch.randn(7, 300, generator=torch.Generator().manual_seed(7)) ** 9
    blocks = split_leaves(7, 4)
    straight = add_leaves(values, range(7)).root()
    assert torch.equal(add_in_blocks(values, [blocks[number] for number in order]), straight)


def test_the_tree_is_the_balanced_one() -> None:
    a, b, c, d, e, f = values = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) ** 9
    assert torch.equal(add_leaves(values, range(6)).root(), ((a + b) + (c + d)) + (e + f))
    assert not torch.equal(add_leaves(values, range(6)).root(), a + b + c + d + e + f), "the order shows in the bits"


@pytest.mark.parametrize("leaves", range(1, 20))
def test_the_parts_of_a_block_are_the_largest_nodes_inside_it(leaves: int) -> None:
    def cover(node: Node, block: range) -> list[Node]:
        own = range(node.index << node.level, min((node.index + 1) << node.level, leaves))
        if not {*own} - {*block}:
            return [node] if own else []
        halves = (Node(node.level - 1, 2 * node.index + half) for half in (0, 1))
        return [each for half in halves if node.level for each in cover(half, block)]

    for start, stop in itertools.combinations(range(leaves + 1), 2):
        block = range(start, stop)
        assert list_parts(leaves, block) == cover(Node((leaves - 1).bit_length(), 0), block)
        assert list_parts(leaves, block) == list(add_leaves(torch.ones(leaves, 1), block).parts)


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 7, 8, 100, 4097])
def test_a_rows_sum_does_not_depend_on_the_other_rows(columns: int) -> None:
    values = torch.randn(50, columns, generator=torch.Generator().manual_seed(columns)) ** 9
    sums = sum_columns(values.clone())
    torch.testing.assert_close(sums.double(), values.double().sum(1), rtol=1e-4, atol=1e-4)
    for start, stop in ((0, 1), (3, 20), (49, 50), (7, 7)):
        assert torch.equal(sum_columns(values[start:stop].clone()), sums[start:stop])


def test_blocks_are_contiguous_and_almost_equal() -> None:
    assert split_leaves(8, 3) == [range(3), range(3, 6), range(6, 8)]
    assert split_leaves(5, 5) == [range(number, number + 1) for number in range(5)]

"""Packed blocks hold what padded blocks hold, in order, and lead back to it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dsde.execution import row_block
from hf_dsde.execution.row_block import WIDEST_TREE, RowBlock
from hf_dsde.kernels.block import Block

NOTHING = -7
"""Stands in columns without a token: whoever reads one finds a number that is no token and no position."""


@dataclass(frozen=True)
class RaggedBlock:
    """A padded block, and what a pass has to see of it."""

    tokens: torch.Tensor
    positions: torch.Tensor
    counts: list[int]
    size: int

    def packed(self) -> tuple[Block, torch.Tensor]:
        return RowBlock(self.tokens, self.positions, counts=torch.tensor(self.counts), size=self.size).packed()

    def columns(self) -> list[tuple[int, int]]:
        """Row and column of every token, in the order of a packed block."""
        return [(row, column) for row, count in enumerate(self.counts) for column in range(count)]


def ragged_block(counts: list[int], width: int, spare: int = 0) -> RaggedBlock:
    """Return a block whose tokens are all different, and whose rows begin at different positions."""
    tokens = torch.full((len(counts), width), NOTHING)
    positions = torch.full((len(counts), width), NOTHING)
    for row, count in enumerate(counts):
        tokens[row, :count] = 1000 * (row + 1) + torch.arange(count)
        positions[row, :count] = 10 * row + 3 + torch.arange(count)
    return RaggedBlock(tokens, positions, counts, sum(counts) + spare)


@st.composite
def ragged_blocks(draw: st.DrawFn) -> RaggedBlock:
    width = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(0, width), min_size=1, max_size=7))
    # A pass without room holds nothing, and nobody asks for one.
    spare = draw(st.integers(0 if any(counts) else 1, 9))
    return ragged_block(counts, width, spare)


def check(block: RaggedBlock) -> None:
    """Compare with a walk over the rows, one token after the other."""
    packed, unpacked = block.packed()
    places = block.columns()
    used = len(places)
    assert packed.tokens.shape == packed.rows.shape == packed.positions.shape == (block.size,)
    assert packed.tokens[:used].tolist() == [int(block.tokens[place]) for place in places]
    assert packed.positions[:used].tolist() == [int(block.positions[place]) for place in places]
    assert packed.rows[:used].tolist() == [row for row, _ in places]
    assert packed.positions[used:].tolist() == [-1] * (block.size - used)
    # Whoever looks up a cache row or a count by them must find one.
    assert all(0 <= row < len(block.counts) for row in packed.rows.tolist())
    assert packed.counts.tolist() == block.counts
    assert packed.starts.tolist() == [sum(block.counts[:row]) for row in range(len(block.counts))]
    dtypes = (packed.tokens.dtype, packed.rows.dtype, packed.positions.dtype, unpacked.dtype)
    assert set(dtypes) == {torch.int64}
    assert {packed.starts.dtype, packed.counts.dtype} == {torch.int32}


@given(ragged_blocks())
def test_a_packed_block_holds_the_tokens_of_all_rows_one_after_another(block: RaggedBlock) -> None:
    check(block)


@given(ragged_blocks())
def test_the_way_back_finds_every_token(block: RaggedBlock) -> None:
    packed, places = block.packed()
    assert places.shape == block.tokens.shape
    unpacked = packed.tokens[places]  # raises where an index points outside
    for place in block.columns():
        assert unpacked[place] == block.tokens[place]
    assert places.min() >= 0


@pytest.mark.parametrize(
    ("counts", "width", "spare"),
    [
        ([0, 0, 3], 3, 0),
        ([3, 0, 0], 3, 5),
        ([0, 2, 0, 0, 1, 0], 4, 2),
        ([0, 0, 0], 4, 8),
        ([1, 1, 1, 1], 1, 0),
        ([1, 0, 1], 1, 6),
        ([5], 5, 3),
        ([0], 1, 1),
    ],
    ids=str,
)
def test_empty_rows_single_columns_and_spare_room(counts: list[int], width: int, spare: int) -> None:
    check(ragged_block(counts, width, spare))


def test_a_tree_is_packed_with_its_slots_and_ancestors() -> None:
    positions = torch.tensor([[4, 5, 5], [7, -1, -1]])
    slots = torch.tensor([[4, 5, 6], [7, -1, -1]])
    ancestors = torch.tensor([[1, 3, 5], [1, 0, 0]])
    packed, _ = RowBlock(positions, positions, slots, ancestors, torch.tensor([3, 1]), size=8).packed()
    assert packed.slots.tolist() == [4, 5, 6, 7, -1, -1, -1, -1]
    assert packed.ancestors is not None
    assert packed.ancestors[:4].tolist() == [1, 3, 5, 1]
    chain, _ = RowBlock(positions, positions, counts=torch.tensor([3, 1]), size=8).packed()
    assert chain.slots is chain.positions
    assert chain.ancestors is None


@pytest.mark.parametrize(("given", "missing"), [("slots", "ancestors"), ("ancestors", "slots")])
def test_half_a_tree_is_refused(given: str, missing: str) -> None:
    block = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=f"{given}: given without `{missing}`"):
        RowBlock(block, block, **{given: block})


def test_a_tree_wider_than_its_masks_is_refused() -> None:
    block = torch.zeros(1, WIDEST_TREE + 1, dtype=torch.long)
    RowBlock(block, block)
    with pytest.raises(ValueError, match="ancestors: a row has 65 columns, but a mask names 64"):
        RowBlock(block, block, block, block)


def test_nothing_depends_on_where_the_padding_points() -> None:
    block = ragged_block([2, 0, 3], 4, 3)
    other = RaggedBlock(
        block.tokens.masked_fill(block.tokens == NOTHING, 55),
        block.positions.masked_fill(block.positions == NOTHING, 99),
        block.counts,
        block.size,
    )
    (first, places), (second, other_places) = block.packed(), other.packed()
    assert torch.equal(places, other_places)
    used = sum(block.counts)
    assert torch.equal(first.tokens[:used], second.tokens[:used])
    for name in ("rows", "positions", "starts", "counts"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@given(block=ragged_blocks())
def test_what_the_host_holds_gets_to_a_device_in_one_transfer(block: RaggedBlock) -> None:
    chain = RowBlock(block.tokens, block.positions, counts=torch.tensor(block.counts), size=block.size)
    transfers: list[torch.Tensor] = []

    def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        transfers.append(values)
        return values.clone()

    elsewhere = torch.device("meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_block, "upload", upload)
        there, (packed, places) = chain.on(elsewhere), chain.packed_on(elsewhere)
    assert len(transfers) == 2
    assert there.tokens.equal(block.tokens)
    assert there.positions.equal(block.positions)
    expected, its_places = chain.packed()
    assert chain.on(torch.device("cpu")) is chain
    assert places.equal(its_places)
    assert packed.max_count == expected.max_count
    for name in ("tokens", "rows", "positions", "starts", "counts", "slots"):
        mine, its = getattr(packed, name), getattr(expected, name)
        assert mine.dtype == its.dtype, name
        assert mine.equal(its), name


def test_trees_and_states_get_to_a_device_as_well() -> None:
    block = torch.arange(6).view(2, 3)
    tree = RowBlock(block, block, slots=block, ancestors=block, counts=torch.tensor([3, 3]), size=6)
    states = RowBlock(block, block, counts=torch.tensor([3, 3]), size=6, states=torch.rand(2, 3, 4))
    for each, names in ((tree, ("slots", "ancestors")), (states, ("states",))):
        there, (packed, _) = each.on(torch.device("cpu")), each.packed_on(torch.device("cpu"))
        for name in names:
            assert getattr(there, name).equal(getattr(each, name))
            assert getattr(packed, name).flatten().equal(getattr(each, name).flatten())

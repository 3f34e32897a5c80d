"""Tokens land in the slot that is their position, whatever lies around them."""

from __future__ import annotations

import pytest
import torch

from hf_dsde.execution.kv_cache import RaggedCache

ROWS, HEADS, HEAD_DIM = 3, 2, 4


def states(width: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, HEADS, width, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def write(
    cache: RaggedCache, positions: list[list[int]], view: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write one block into layer 0; return what was written and the keys and values shown."""
    block = states(len(positions[0]), seed=seed)
    cache.aim(torch.tensor(positions), view)
    keys, values = cache.update(block, 2 * block, 0)
    return block, keys, values


def test_every_token_is_in_the_slot_of_its_position() -> None:
    cache = RaggedCache(1, capacity=8)
    positions = [[0, 1, 2], [4, 5, 6], [3, 1, 7]]
    block, keys, values = write(cache, positions, view=8)
    assert keys.shape == (ROWS, HEADS, 8, HEAD_DIM)
    for row, slots in enumerate(positions):
        for column, slot in enumerate(slots):
            assert torch.equal(keys[row, :, slot], block[row, :, column])
            assert torch.equal(values[row, :, slot], 2 * block[row, :, column])
        untouched = [slot for slot in range(8) if slot not in slots]
        assert not keys[row][:, untouched].any()


def test_what_is_no_token_reaches_no_slot_in_view() -> None:
    cache = RaggedCache(1, capacity=4)
    _, keys, values = write(cache, [[-1, -1, 0], [-1, -5, -1], [-1, 2, 3]], view=4)
    shown = keys.abs().sum(dim=(1, 3)) > 0
    assert shown.tolist() == [[True, False, False, False], [False] * 4, [False, False, True, True]]
    assert torch.equal(values, 2 * keys)


def test_the_next_write_replaces_what_was_rejected() -> None:
    cache = RaggedCache(1, capacity=6)
    first, _, _ = write(cache, [[0, 1, 2]] * ROWS, view=6, seed=1)
    second, keys, _ = write(cache, [[1, 2], [2, 3], [3, 4]], view=6, seed=2)
    assert torch.equal(keys[0, :, :3], torch.stack([first[0, :, 0], second[0, :, 0], second[0, :, 1]], dim=1))
    assert torch.equal(keys[1, :, :4], torch.cat([first[1, :, :2], second[1]], dim=1))
    assert torch.equal(keys[2, :, :5], torch.cat([first[2], second[2]], dim=1))


def test_layers_are_written_independently_with_one_aim() -> None:
    cache = RaggedCache(2, capacity=4)
    cache.aim(torch.tensor([[1], [2], [3]]), 4)
    keys = [cache.update(states(1, seed=layer), states(1, seed=layer), layer)[0] for layer in (0, 1)]
    assert torch.equal(keys[0][0, :, 1], states(1, seed=0)[0, :, 0])
    assert torch.equal(keys[1][0, :, 1], states(1, seed=1)[0, :, 0])


def test_view_shows_the_first_slots_only() -> None:
    cache = RaggedCache(1, capacity=8)
    _, keys, _ = write(cache, [[0], [1], [2]], view=3)
    assert keys.shape[2] == 3
    assert cache.get_seq_length() == 3
    assert cache.get_mask_sizes(1, 0) == (3, 0)


def test_growth_keeps_every_state_and_the_discard_slot_out_of_view() -> None:
    cache = RaggedCache(1, capacity=4)
    block, _, _ = write(cache, [[-1, 0, 3], [-1, 1, 2], [-1, 2, 3]], view=4)
    cache.reserve(5)
    assert cache.capacity == 6
    _, keys, _ = write(cache, [[5], [5], [5]], view=6, seed=3)
    assert torch.equal(keys[0, :, 3], block[0, :, 2])
    assert torch.equal(keys[2, :, 2], block[2, :, 1])
    # What was thrown away before now lies in slot 4, which has become a real one: junk is allowed there, since no
    # query looks beyond its own position and every position is written before it is looked at. It must be finite.
    assert keys.isfinite().all()


def test_room_that_is_there_is_not_made_again() -> None:
    cache = RaggedCache(1, capacity=4)
    write(cache, [[0], [0], [0]], view=4)
    buffer = cache.layers[0].keys
    cache.reserve(4)
    assert cache.layers[0].keys is buffer
    assert cache.capacity == 4


def test_growth_before_the_first_write() -> None:
    cache = RaggedCache(1, capacity=2)
    cache.reserve(9)
    block, keys, _ = write(cache, [[8], [7], [0]], view=9)
    assert torch.equal(keys[0, :, 8], block[0, :, 0])


def test_long_texts_are_copied_a_logarithmic_number_of_times() -> None:
    cache = RaggedCache(1, capacity=16)
    capacities = []
    for length in range(1, 4097):
        cache.reserve(length)
        capacities.append(cache.capacity)
    assert len(set(capacities)) < 20


def test_rows_are_kept_in_the_order_asked_for() -> None:
    cache = RaggedCache(2, capacity=4)
    positions = torch.tensor([[0], [1], [2]])
    cache.aim(positions, 4)
    before = [cache.update(states(1, seed=layer), states(1, seed=layer), layer)[0].clone() for layer in (0, 1)]
    cache.select_rows(torch.tensor([2, 0]))
    for layer in (0, 1):
        assert torch.equal(cache.layers[layer].keys[:, :, :4], before[layer][[2, 0]])
        assert torch.equal(cache.layers[layer].values[:, :, :4], before[layer][[2, 0]])


def test_rows_can_be_selected_before_the_first_write() -> None:
    RaggedCache(1, capacity=4).select_rows(torch.tensor([0]))


def test_view_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match=r"view: 9 slots.*holds 4.*reserve\(9\)"):
        RaggedCache(1, capacity=4).aim(torch.zeros(1, 1, dtype=torch.long), 9)

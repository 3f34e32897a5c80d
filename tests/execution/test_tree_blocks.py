"""A block of trees gives every token what plain decoding of its path gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, PLAIN_NEEDS_FLOAT32, tiny_model
from tiny_trees import LENGTHS, PARENTS, Trees
from transformers import PreTrainedModel

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock

pytestmark = pytest.mark.usefixtures("recording")
TREES = Trees.drawn()
LAYERS = (1, 2)
FUSED = [family for family in FAMILIES if why_not_fused(tiny_model(family)) is None]
SIZE = 32
WAYS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "eager": ("eager", {}, None),
    "stock attention": ("eager", {"packed_attention": False}, None),
    "recorded": ("graph", {"fused_layers": False}, None),
    "fused": ("graph", {}, None),
    "packed": ("graph", {}, SIZE),
}
CASES = [
    (family, way)
    for family in FAMILIES
    for way in WAYS
    if (family in FUSED or way not in {"fused", "packed"}) and (family != "mixtral" or way != "recorded")
]


def runner_of(model: PreTrainedModel, way: str, layers: tuple[int, ...] = ()) -> ModelRunner:
    runner, settings, _ = WAYS[way]
    return create_runner(model, len(LENGTHS), 32, RuntimeOptions(**settings), runner, hidden_layers=layers)


def tolerance(model: PreTrainedModel, family: str) -> float:
    """What is shown as logits is float32."""
    return 1e-3 if family in PLAIN_NEEDS_FLOAT32 else 1e-6


@pytest.mark.parametrize(("family", "way"), CASES)
def test_every_token_of_a_tree_gets_what_its_path_gives(family: str, way: str) -> None:
    model = tiny_model(family)
    size = WAYS[way][2]
    runner = runner_of(model, way, LAYERS)
    for _ in range(2):  # the second time, everything is recorded
        found = TREES.run(runner, TREES.block(size))
        assert found.packed_tokens == size
        TREES.check(model, found, tolerance(model, family), LAYERS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 2])
def test_a_window_goes_by_positions_and_not_by_slots(window: int, way: str) -> None:
    model = tiny_model("mistral", sliding_window=window)
    size = WAYS[way][2]
    runner = runner_of(model, way)
    TREES.check(model, TREES.run(runner, TREES.block(size)), 1e-6)


def wrong_blocks() -> dict[str, RowBlock]:
    """What a pass would run that takes a tree for something else."""
    block = TREES.block()
    real = block.positions >= 0
    before = torch.where(real, (2 << torch.arange(block.width)) - 1, 0)
    return {
        "a slot for a depth": replace(block, positions=block.slots),
        "a depth for a slot": replace(block, slots=block.positions),
        "all that came before for ancestors": replace(block, ancestors=before),
        "no ancestors": replace(block, ancestors=torch.where(real, 1 << torch.arange(block.width), 0)),
        "a chain": RowBlock(block.tokens, block.slots),
    }


@pytest.mark.parametrize("mutant", wrong_blocks())
@pytest.mark.parametrize("way", ["eager", "fused"])
def test_trees_taken_for_something_else_are_noticed(way: str, mutant: str) -> None:
    model = tiny_model()
    runner = runner_of(model, way)
    found = TREES.run(runner, wrong_blocks()[mutant])
    with pytest.raises(AssertionError):
        TREES.check(model, found, 1e-3)


@pytest.mark.parametrize("way", ["eager", "recorded", "fused", "packed"])
def test_chains_and_trees_may_follow_each_other(way: str) -> None:
    model = tiny_model("mistral")
    runner = runner_of(model, way)
    chains = torch.tensor(LENGTHS)[:, None] - 1 + torch.arange(3)
    tokens = TREES.tokens[:, :3]
    counts = torch.full((len(LENGTHS),), 3)
    expected = None
    for _ in range(2):
        TREES.check(model, TREES.run(runner, TREES.block(WAYS[way][2])), 1e-6)
        found = TREES.run(runner, RowBlock(tokens, chains, counts=counts, size=WAYS[way][2])).logits
        for row, length in enumerate(LENGTHS):
            text = torch.cat([TREES.texts[row, : length - 1], tokens[row]])
            plain = model(input_ids=text[None]).logits[0, -3:].float()
            torch.testing.assert_close(found[row], plain, rtol=1e-6, atol=1e-6)
        assert expected is None or torch.equal(found, expected)
        expected = found


def test_rows_that_left_do_not_disturb_the_trees_of_others() -> None:
    model = tiny_model()
    for way in ("eager", "fused", "packed"):
        runner = runner_of(model, way)
        everyone = TREES.run(runner, TREES.block(WAYS[way][2])).logits
        runner.keep_rows([0, 2])
        with runner.active(), torch.no_grad():
            block = TREES.block(WAYS[way][2])
            counts = torch.tensor([len(parents) if row in (0, 2) else 0 for row, parents in enumerate(PARENTS)])
            found = runner.forward(replace(block, counts=counts), max(LENGTHS) + block.width).logits
        for row in (0, 2):
            real = block.positions[row] >= 0
            torch.testing.assert_close(found[row, real], everyone[row, real], rtol=1e-6, atol=1e-6)


def test_a_chain_given_as_a_tree_is_a_chain() -> None:
    model = tiny_model("gemma3")
    runner = runner_of(model, "eager")
    positions = (torch.tensor(LENGTHS)[:, None] - 1 + torch.arange(12)).masked_fill(torch.arange(12) > 9, -1)
    tokens = torch.randint(3, 90, positions.shape, generator=torch.Generator().manual_seed(2))
    chain = TREES.run(runner, RowBlock(tokens, positions)).logits
    ancestors = ((2 << torch.arange(12)) - 1).expand(len(LENGTHS), -1)
    tree = TREES.run(runner, RowBlock(tokens, positions, positions.clone(), ancestors)).logits
    torch.testing.assert_close(tree[:, :10], chain[:, :10], rtol=1e-6, atol=1e-6)

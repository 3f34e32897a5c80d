"""A block that the host has put together is the one that the device would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ragged_batch

from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.row_block import RowBlock

CPU = torch.device("cpu")


class Blocks:
    """Keeps the blocks of the target's passes."""

    def __init__(self) -> None:
        self.calls: list[tuple[RowBlock, Any, int]] = []

    def stage(self, block: RowBlock, host_counts: Any, longest: int) -> Callable[[], PassOutput]:
        self.calls.append((block, host_counts, longest))
        return lambda: PassOutput(block.tokens)


def sequences_of(lengths: list[int], appended: list[int]) -> SequenceBatch:
    inputs = ragged_batch(lengths)
    sequences = SequenceBatch(inputs["input_ids"], inputs["attention_mask"], 20, 8, None)
    tokens = torch.randint(3, 50, (len(lengths), max(1, *appended)))
    sequences.append(tokens, torch.tensor(appended))
    sequences.synchronise(appended, tokens)
    return sequences


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(3, 50), max_size=6), st.booleans()),
        min_size=2,
        max_size=7,
    )
)
def test_tokens_positions_and_counts_are_the_same(rows: list[tuple[int, int, list[int], bool]]) -> None:
    prompts, appended, drafts, active = map(list, zip(*rows, strict=True))
    drafts = [draft if on else [] for draft, on in zip(drafts, active, strict=True)]
    candidates = CandidateBatch.of_lists(drafts, CPU)
    plan = RoundPlan([*map(len, drafts)], active, CPU)
    target, nobody, sequences = Blocks(), object(), sequences_of(prompts, appended)
    for each in (candidates, replace(candidates, host_tokens=None)):
        RunAhead(target, nobody, sequences).run_target(each, plan)  # type: ignore[arg-type]
    (block, *others), (expected, *its_others) = target.calls
    assert others == its_others
    assert block.counts is not None
    assert expected.counts is not None
    assert block.counts.equal(expected.counts)
    assert block.positions.equal(expected.positions)
    there = expected.positions >= 0
    assert there.sum(dim=1).equal(expected.counts)
    assert block.tokens[there].equal(expected.tokens[there])

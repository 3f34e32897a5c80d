"""Spans of tokens are divided into passes without losing, doubling or reordering any."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import NotingCapture
from stored import store_texts
from tiny_models import VOCABULARY, tiny_model

from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span, flat_places, portions, similar_counts, total_count
from hf_dsde.utils import tuning

counts = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def places_of(spans: list[Span]) -> list[tuple[int, int]]:
    return [(span.row, position) for span in spans for position in range(span.start, span.end)]


@given(counts=counts, starts=st.integers(0, 9))
@settings(deadline=None)
def test_places_are_rows_and_positions_of_all_tokens(counts: list[int], starts: int) -> None:
    spans = [Span(row * 2, starts + row, count) for row, count in enumerate(counts)]
    rows, positions = flat_places(spans)
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == places_of(spans)


@given(counts=counts, most=st.integers(1, 60))
@settings(deadline=None)
def test_passes_hold_all_tokens_in_order_and_are_few_and_alike(counts: list[int], most: int) -> None:
    spans = [Span(row, row, count) for row, count in enumerate(counts)]
    passes = portions(spans, most)
    assert [place for part in passes for place in places_of(part)] == places_of(spans)
    sizes = [total_count(part) for part in passes]
    assert max(sizes) <= most
    assert len(passes) <= -(-sum(counts) // most) + 1
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) == 0
    for part in passes:
        assert len({span.row for span in part}) == len(part)


@given(counts=counts, worth=st.integers(1, 100))
@settings(deadline=None)
def test_groups_split_where_it_saves_enough_padding(counts: list[int], worth: int) -> None:
    groups = similar_counts(counts, worth)
    assert sorted(index for group in groups for index in group) == list(range(len(counts)))
    for group in groups:
        lengths = sorted((counts[index] for index in group), reverse=True)
        for place, length in enumerate(lengths):
            assert (lengths[0] - length) * (len(lengths) - place) < worth


@pytest.mark.parametrize("kind", ["eager", "graph"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize(("chunk", "recorded"), [(8192, 1024), (8192, 4), (7, 1024), (7, 4)])
def test_texts_of_all_lengths_are_stored_as_if_alone(
    recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch, family: str, kind: str, chunk: int, recorded: int
) -> None:
    """Rows in groups of similar length, cut into chunks, replayed or not, and a second time over rows of a batch."""
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, split_saving=5, stored_sizes=(2, recorded)))
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(3)
    runner = create_runner(model, 4, 8, RuntimeOptions(prefill_chunk=chunk, view_bucket=4), kind)
    texts = torch.randint(3, VOCABULARY, (4, 30), generator=generator)
    lengths = [9, 0, 29, 10]
    with runner.active(), torch.no_grad():
        store_texts(runner, texts, lengths)
        other = torch.randint(3, VOCABULARY, (20,), generator=generator)
        runner.store([Span(2, 0, 3), Span(0, 9, 17)], other)
        texts[2, :3], texts[0, 9:26], lengths = other[:3], other[3:], [26, 0, 3, 10]
        at = torch.tensor(lengths)[:, None]
        logits = runner.forward(RowBlock(texts.gather(1, at), at), longest=27).logits[:, -1]
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = model(input_ids=texts[row : row + 1, : length + 1]).logits[0, -1].float()
        torch.testing.assert_close(logits[row], alone, rtol=1e-4, atol=1e-4)

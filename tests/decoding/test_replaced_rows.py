"""A row that begins another text is a row that began with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import NotingCapture
from tiny_models import PAD, VOCABULARY, ragged_batch, tiny_model

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.execution.create_runner import create_runner
from hf_dsde.execution.options import RuntimeOptions
from hf_dsde.execution.row_block import RowBlock
from hf_dsde.execution.spans import Span

LENGTHS = [5, 2, 9]


def batch(lengths: list[int], limit: int = 6) -> SequenceBatch:
    return SequenceBatch(**ragged_batch(lengths), max_new_tokens=limit, scratch=15, pad_token=PAD)


text = st.lists(st.integers(3, VOCABULARY - 1), min_size=1, max_size=14)


@given(
    replaced=st.lists(st.tuples(text, st.integers(1, 12)), min_size=1, max_size=3),
    rows=st.permutations(range(3)),
    grown=st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
@settings(deadline=None)
def test_replaced_rows_hold_their_prompt_and_the_others_are_untouched(
    replaced: list[tuple[list[int], int]], rows: list[int], grown: list[int]
) -> None:
    sequences = batch(LENGTHS)
    texts = [row[-n:].tolist() for row, n in zip(ragged_batch(LENGTHS)["input_ids"], LENGTHS, strict=True)]
    sequences.append(torch.full((3, 6), 7), torch.tensor(grown))
    sequences.synchronise(list(grown), torch.full((3, 6), 7))
    limits = [6, 6, 6]
    texts = [text + [7] * count for text, count in zip(texts, grown, strict=True)]
    generated = list(grown)
    chosen = rows[: len(replaced)]
    sequences.replace_rows(chosen, [prompt for prompt, _ in replaced], [limit for _, limit in replaced])
    for row, (prompt, limit) in zip(chosen, replaced, strict=True):
        texts[row], limits[row], generated[row] = list(prompt), limit, 0
    assert sequences.length_counts == [len(text) for text in texts] == sequences.lengths.tolist()
    assert sequences.remaining.tolist() == [limit - n for limit, n in zip(limits, generated, strict=True)]
    tokens, positions = sequences.tail(30)
    for row, expected in enumerate(texts):
        assert tokens[row][positions[row] >= 0].tolist() == expected
    for row, expected in enumerate(texts):
        end = sequences.prompt_width + generated[row]
        assert sequences.host_tokens[row, end - len(expected) : end].tolist() == expected
    # There is room for all that a row may emit, and for drafts after it.
    left = sequences.remaining
    block = torch.full((3, int(left.max())), 9)
    sequences.append(block, left)
    sequences.synchronise(sequences.generated.tolist(), block)
    sequences.write_drafts(torch.full((3, 3), 8))
    tokens, positions = sequences.tail(40)
    for row, expected in enumerate(texts):
        assert tokens[row][positions[row] >= 0].tolist() == expected + [9] * int(left[row])
        end = sequences.prompt_width + limits[row]
        assert sequences.host_tokens[row, :end].tolist() == sequences.tokens[row, :end].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("kind", ["eager", "graph"])
def test_the_next_pass_sees_the_new_text(recording: list[NotingCapture], family: str, kind: str) -> None:
    model = tiny_model(family)
    runner = create_runner(model, 3, 16, RuntimeOptions(view_bucket=4, prefill_chunk=5), kind)
    first, second = batch(LENGTHS), ragged_batch([13, 1], seed=4)["input_ids"]
    others = [second[0].tolist(), second[1, -1:].tolist()]
    with runner.active(), torch.no_grad():
        prompts = [Span(row, 0, length - 1) for row, length in enumerate(LENGTHS)]
        runner.store(prompts, first.tokens_at(prompts))
        runner.forward(RowBlock(*first.tail(1)), longest=9)
        replaced = [Span(row, 0, len(prompt) - 1) for row, prompt in zip([2, 0], others, strict=True)]
        runner.store(replaced, torch.tensor([token for prompt in others for token in prompt[:-1]]))
        last = torch.tensor([others[1][-1:], first.tail(1)[0][1].tolist(), others[0][-1:]])
        positions = torch.tensor([[0], [LENGTHS[1] - 1], [12]])
        logits = runner.forward(RowBlock(last, positions), longest=13).logits[:, -1]
    texts = [others[1], first.tail(2)[0][1].tolist(), others[0]]
    for row, expected in enumerate(texts):
        with torch.no_grad():
            alone = model(input_ids=torch.tensor([expected])).logits[0, -1].float()
        torch.testing.assert_close(logits[row], alone, rtol=1e-4, atol=1e-4)

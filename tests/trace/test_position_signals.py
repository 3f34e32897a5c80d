"""The scalars of a position against their definitions in plain floats."""

from __future__ import annotations

import pytest
import torch
from reference_signals import position_scalars, rejected_law, softmax

from hf_dsde import signals
from hf_dsde.trace.position_signals import position_signals, residual_draft_probability
from hf_dsde.trace.schema import AGREEMENT_COLUMNS, SIGNAL_COLUMNS, TOKEN_COLUMNS

POSITIONS, VOCABULARY = 40, 17


def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    draft = target + torch.randn(POSITIONS, VOCABULARY, generator=generator)
    return target, draft, torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)


def test_every_scalar_is_what_its_definition_says():
    target, draft, tokens = logits(0)
    found = position_signals(target, draft, tokens, None)
    assert set(found) == {*SIGNAL_COLUMNS, *AGREEMENT_COLUMNS, *TOKEN_COLUMNS} - {"token"}
    for row in range(POSITIONS):
        expected = position_scalars(target[row].tolist(), draft[row].tolist(), int(tokens[row]))
        for name, value in expected.items():
            if name != "token":
                assert float(found[name][row]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), (name, row)


def test_positions_are_worked_on_a_few_at_a_time_with_the_same_result(monkeypatch):
    target, draft, tokens = logits(1)
    draws = torch.rand(POSITIONS, generator=torch.Generator().manual_seed(2))
    whole = position_signals(target, draft, tokens, draws)
    monkeypatch.setattr(signals, "CPU_CACHE_ELEMENTS", 3 * VOCABULARY)
    parts = position_signals(target, draft, tokens, draws)
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, rtol=0, atol=0)


def test_no_position_is_a_block_too():
    target, draft, tokens = (tensor[:0] for tensor in logits(0))
    assert {len(values) for values in position_signals(target, draft, tokens, None).values()} == {0}


def test_a_rejected_token_at_temperature_0_is_the_drafts_best_one():
    target, draft, tokens = logits(3)
    found = position_signals(target, draft, tokens, None)
    torch.testing.assert_close(found["residual_draft_probability"], found["draft_top1"], rtol=0, atol=0)


def test_a_rejected_token_follows_the_law_of_what_is_left():
    target, draft, _ = (tensor[:1] for tensor in logits(4))
    law = rejected_law(target[0].tolist(), draft[0].tolist())
    q = softmax(draft[0].tolist())
    draws = 20_000
    # Evenly spaced draws instead of random ones: inversion then hits every token to within one draw.
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    probs = target.softmax(-1).expand(draws, -1), draft.softmax(-1).expand(draws, -1)
    found = residual_draft_probability(*probs, uniform)
    for token, share in enumerate(law):
        hits = int((found - q[token]).abs().lt(1e-6).sum())
        assert abs(hits - share * draws) <= 2, token


@pytest.mark.parametrize("draw", [0.0, 0.9999999403953552])
def test_the_outermost_draws_choose_tokens_that_can_be_rejected(draw):
    target, draft, _ = logits(5)
    p, q = target.softmax(-1), draft.softmax(-1)
    found = residual_draft_probability(p, q, torch.full((POSITIONS,), draw))
    for row in range(POSITIONS):
        candidates = q[row][q[row] > p[row]]
        assert bool((candidates - found[row]).abs().lt(1e-7).any()), row


def test_equal_distributions_give_a_token_of_the_draft():
    target, _, _ = logits(6)
    probs = target.softmax(-1)
    found = residual_draft_probability(probs, probs, torch.full((POSITIONS,), 0.5))
    assert bool((found > 0).all())


def test_ids_that_a_model_lacks_do_no_harm():
    target, draft, tokens = logits(7)
    draft[:, -3:] = -1e4
    found = position_signals(target, draft, tokens, torch.rand(POSITIONS))
    assert all(bool(values.isfinite().all()) for values in found.values())

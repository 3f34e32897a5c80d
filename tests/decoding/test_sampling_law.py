"""Sampled output has the target's own law: chi-squared against exact enumeration, end to end through `generate`.

The law of the first tokens is enumerated by running the target over every prefix, with the processors that plain
`generate` would apply. Broken variants of the decoder have to fail the same test, which shows that it can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson, toy_model
from scipy import stats
from tiny_calls import config_of
from tiny_models import noisy_copy
from tiny_policies import RandomLengths
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding import verification
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.processing.block_text import BlockText
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.policies import (
    BatchInfo,
    DraftStep,
    DSDEStoppingPolicy,
    Signal,
    StoppingPolicy,
    available_policies,
    create_policy,
)

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

RIGHT, WRONG = 1e-4, 1e-6
"""A right decoder's p-value lies above the first, a wrong one's below the second. Seeds are fixed, so that a test
always passes or always fails."""
ROWS = 4096
CONFIG = config_of(view_bucket=8, max_draft_length=2)
"""Drafts end well inside the tokens that are looked at: what follows a fully accepted draft has to be seen as well."""


TARGET, DRAFT = toy_model(5), noisy_copy(toy_model(5), 0.5)


def p_value(
    policy: str | StoppingPolicy,
    options: dict[str, Any],
    *,
    target: PreTrainedModel = TARGET,
    draft: PreTrainedModel = DRAFT,
    rows: int = ROWS,
    depth: int = 3,
    new_tokens: int = 5,
) -> float:
    """Generate a batch and test the joint law of its first tokens, prompt by prompt."""
    options = {"do_sample": True, "max_new_tokens": new_tokens, "top_k": 0, **options}
    torch.manual_seed(0)
    repeats = rows // len(PROMPTS)
    output = target.generate(
        input_ids=PROMPTS.repeat(repeats, 1),
        attention_mask=PROMPT_MASK.repeat(repeats, 1),
        assistant_model=draft,
        speculation_policy=policy,
        speculation_config=CONFIG,
        return_dict_in_generate=True,
        **options,
    )
    # The rejection test and the residual have to have had work to do.
    assert 0.1 < output.speculation_statistics.acceptance_rate < 0.97
    vocabulary = target.config.vocab_size
    digits = output.sequences[:, PROMPTS.shape[1] :][:, :depth]
    outcomes = (digits * vocabulary ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for prompt in range(len(PROMPTS)):
        observed = outcomes[prompt :: len(PROMPTS)].bincount(minlength=vocabulary**depth).double()
        law = exact_law(target, prompt, depth, options)
        assert float(law.sum()) == pytest.approx(1.0)
        part, more = pearson(observed, law * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    return float(stats.chi2.sf(statistic, max(freedom, 1)))


def make_policy(name: str) -> StoppingPolicy:
    """A policy by name, or one of the variants that matter here."""
    made: dict[str, Callable[[], StoppingPolicy]] = {
        # Calibration ends within the first round or two, so that the lengths come from the equations.
        "dsde, past calibration": lambda: DSDEStoppingPolicy(long_window=3),
        "random lengths with stops": lambda: RandomLengths(4, stop_probability=0.3),
    }
    return made[name]() if name in made else create_policy(name)


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.3": {"temperature": 1.3},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "repetition penalty": {"repetition_penalty": 2.5},
    "end of sequence": {"eos_token_id": 2},
    "everything": {
        "temperature": 0.7,
        "top_k": 3,
        "top_p": 0.95,
        "repetition_penalty": 2.0,
        "eos_token_id": 2,
        "min_new_tokens": 2,
    },
    "history": {"temperature": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": [[[1, 3], 1.5], [[2], -0.5]]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_keeps_its_law(options: dict[str, Any]) -> None:
    assert p_value(make_policy("random lengths with stops"), options) > RIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, "temperature 1" if number % 2 else "everything")
        for number, name in enumerate([*available_policies(), "dsde, past calibration"])
    ],
)
def test_no_policy_changes_the_law(name: str, options: str) -> None:
    assert p_value(make_policy(name), OPTIONS[options]) > RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dsde, past calibration", "confidence", "random lengths with stops"])
def test_the_law_holds_six_tokens_deep(name: str) -> None:
    options = {"suppress_tokens": [0, 1], "temperature": 1.3, "repetition_penalty": 1.3}  # 729 texts are possible
    assert p_value(make_policy(name), options, depth=6, new_tokens=8, rows=4096) > RIGHT


@pytest.mark.parametrize("vocabulary", [4, 7])
def test_a_draft_whose_vocabulary_is_padded_differently_keeps_the_law(vocabulary: int) -> None:
    options = {"top_k": 4, "temperature": 1.3}
    assert p_value(make_policy("static"), options, draft=toy_model(vocabulary)) > RIGHT


# Decoders that are wrong on purpose, each in a way that somebody has shipped or is tempted to ship.

Propose = Callable[..., CandidateBatch]


def mutate_drafter(monkeypatch: pytest.MonkeyPatch, change: Callable[[CandidateBatch], CandidateBatch]) -> None:
    original: Propose = ModelDrafter.get_candidates

    def get_candidates(self: ModelDrafter, *arguments: Any) -> CandidateBatch:
        return change(original(self, *arguments))

    monkeypatch.setattr(ModelDrafter, "get_candidates", get_candidates)


class StopAfterUnsure(StoppingPolicy):
    """Stops after a token that the draft gave little probability, and asks for the draft's logits too."""

    name = "stop-after-unsure"
    requires = frozenset({Signal.KLD})
    threshold = 0.2

    def start(self, batch: BatchInfo) -> None:
        self._lengths = torch.full((batch.rows,), batch.max_draft_length)

    def draft_lengths(self) -> Tensor:
        return self._lengths

    def should_stop(self, step: DraftStep) -> Tensor:
        return step.confidence < self.threshold


def drop_an_unsure_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exclusive stop: the token that made the policy stop is not submitted."""

    def change(candidates: CandidateBatch) -> CandidateBatch:
        assert isinstance(candidates.law, Sampled)
        q = candidates.law.probs.gather(2, candidates.tokens[:, :, None])[:, :, 0]
        last = q.gather(1, (candidates.lengths - 1).clamp_min(0)[:, None])[:, 0]
        dropped = (candidates.lengths > 0) & (last < StopAfterUnsure.threshold)
        return replace(candidates, lengths=candidates.lengths - dropped.long())

    mutate_drafter(monkeypatch, change)


def verify_against_raw_draft_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers #32867 and #47932 report: drawn from processed scores, verified against the raw softmax."""

    def change(candidates: CandidateBatch) -> CandidateBatch:
        assert candidates.logits is not None
        return replace(candidates, law=Sampled(candidates.logits.over_target().softmax(dim=-1)))

    mutate_drafter(monkeypatch, change)


def replace_by_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected token is replaced by a draw from p in place of the residual."""

    def law(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor, lengths: Tensor) -> Tensor:
        return target_probs[torch.arange(len(accepted)), accepted]

    monkeypatch.setattr(verification, "residual_distribution", law)


def add_to_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """p / (q + epsilon), with an epsilon that shows."""
    original = verification.speculative_sampling

    def rule(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, lengths: Tensor) -> verification.VerifiedBlock:
        q = draft_probs.gather(2, tokens[:, :, None])
        raised = draft_probs.scatter(2, tokens[:, :, None], q + 0.1)
        accepted = original(target_probs, raised, tokens, lengths).accepted
        leftover = verification.residual_distribution(target_probs, draft_probs, accepted, lengths)
        return verification.VerifiedBlock(accepted, torch.multinomial(leftover, num_samples=1)[:, 0])

    monkeypatch.setattr(verification, "speculative_sampling", rule)


def draw_the_bonus_from_a_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a fully accepted draft is drawn as if the last draft token had been rejected."""
    original = verification.residual_distribution

    def law(target_probs: Tensor, draft_probs: Tensor, accepted: Tensor, lengths: Tensor) -> Tensor:
        return original(target_probs, draft_probs, accepted, lengths + (lengths > 0).long())

    monkeypatch.setattr(verification, "residual_distribution", law)


def hide_drafts_from_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions of a block are processed with the prefix of its first one."""

    def ends(self: BlockText) -> Tensor:
        text = self._sequences
        return (text.prompt_width + text.generated[:, None]).expand(-1, self._width)

    monkeypatch.setattr(BlockText, "ends", property(ends))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "options"),
    [
        (drop_an_unsure_last_token, "temperature 1"),
        (drop_an_unsure_last_token, "everything"),
        (verify_against_raw_draft_probabilities, "temperature 0.7"),
        (verify_against_raw_draft_probabilities, "top-k"),
        (replace_by_the_target, "temperature 1"),
        (add_to_the_ratio, "temperature 1"),
        (draw_the_bonus_from_a_residual, "temperature 1"),
        (hide_drafts_from_processors, "repetition penalty"),
    ],
)
def test_wrong_decoders_are_found_out(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], options: str
) -> None:
    mutate(monkeypatch)
    assert p_value(StopAfterUnsure(), OPTIONS[options]) < WRONG


def test_stopping_after_the_same_unsure_token_is_right() -> None:
    """The control of the dropping decoder: the same rule, but the token is submitted."""
    assert p_value(StopAfterUnsure(), OPTIONS["temperature 1"]) > RIGHT


def test_equal_seeds_give_equal_samples() -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(
            TARGET.generate(
                input_ids=PROMPTS,
                attention_mask=PROMPT_MASK,
                assistant_model=DRAFT,
                speculation_policy="dsde",
                do_sample=True,
                max_new_tokens=20,
            )
        )
    assert torch.equal(*outputs)

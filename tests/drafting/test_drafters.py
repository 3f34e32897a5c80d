"""Whatever drafts, the text is the target's own: generators of transformers, a user's drafter, in ragged batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson, toy_model
from scipy import stats
from tiny_calls import assert_same_text, compared, plain, speculative
from tiny_models import VOCABULARY, ragged_batch, tiny_model
from tiny_policies import ScriptedLengths
from tiny_rounds import Notes
from tokenizers import Tokenizer, decoders, models
from torch import LongTensor, Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

import hf_dsde
from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts
from hf_dsde.decoding import verification
from hf_dsde.drafting import CandidateBatch, Drafter, DraftMonitor, RoundPlan, Sampled, SequenceBatch
from hf_dsde.policies import Signal

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

DOCUMENT = Path(hf_dsde.__file__).parents[1] / "docs" / "drafters.md"
EIGHT = [1, 5, 3, 7, 2, 4, 6, 8]


def repeating_drafter() -> Drafter:
    """The drafter that the documentation shows, of at most 30 lines."""
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = [block for block in blocks if "class RepeatingDrafter" in block]
    assert code.count("\n") <= 30
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - what a reader would paste
    drafter: Drafter = names["RepeatingDrafter"]()
    return drafter


LETTERS = "".join(chr(0x100 + number) for number in range(VOCABULARY))
SPECIAL = 3


def letter_tokenizer(order: Sequence[int]) -> PreTrainedTokenizerFast:
    """A tokenizer of one letter per token, token `i` being letter `order[i]`."""
    core = Tokenizer(models.BPE(vocab={LETTERS[letter]: token for token, letter in enumerate(order)}, merges=[]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left")


@cache
def cycling_model(order: tuple[int, ...] = tuple(range(VOCABULARY))) -> PreTrainedModel:
    """A target whose next letter follows from the last one, so that its text soon repeats itself.

    Args:
        order: Token `i` is letter `order[i]`; letters follow each other likewise in all orders.
    """
    model = tiny_model("llama", num_hidden_layers=1, eos_token_id=None)
    layer = model.model.layers[0]
    torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    torch.nn.init.ones_(model.model.norm.weight)
    generator = torch.Generator().manual_seed(0)
    letters = torch.randn(VOCABULARY, model.config.hidden_size, generator=generator, dtype=torch.float64)
    letters = letters / letters.norm(dim=1, keepdim=True)
    letter = torch.arange(VOCABULARY - SPECIAL)
    after = letter // 3 * 3 + (letter + 1) % 3  # cycles of three
    follows = torch.cat([torch.arange(SPECIAL), SPECIAL + after])
    index = torch.tensor(order)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(letters[index])
        heads = torch.empty_like(letters)
        heads[follows] = letters
        model.lm_head.weight.copy_(heads[index])
    return hf_dsde.enable(model)


@pytest.mark.parametrize("policy", ["static", "goodput", "auto"])
def test_the_documented_drafter_of_a_users_own(policy: str) -> None:
    target, inputs = cycling_model(), ragged_batch(EIGHT)
    drafter = repeating_drafter()
    for _ in range(2):  # one drafter serves many calls
        output = compared(target, drafter, inputs, policy, max_new_tokens=40)
        assert policy != "static" or output.speculation_statistics.acceptance_rate > 0.5


def test_prompt_lookup_of_transformers_serves_a_batch() -> None:
    target, inputs = cycling_model(), ragged_batch(EIGHT)
    expected = plain(target, inputs, max_new_tokens=40)
    by_name = target.generate(
        **inputs,
        prompt_lookup_num_tokens=4,
        speculation_policy="static",
        max_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
    )
    by_object = speculative(
        target, PromptLookupCandidateGenerator(max_length=100), inputs, hf_dsde.StaticPolicy(4), max_new_tokens=40
    )
    for output in (by_name, by_object):
        assert_same_text(output, expected)
        assert output.speculation_statistics.acceptance_rate > 0.5


def translated(**arguments: Any) -> dict[str, Any]:
    """Arguments of a call in which the draft has the target's letters in the opposite order."""
    order = (*range(SPECIAL), *reversed(range(SPECIAL, VOCABULARY)))
    return {
        "draft": cycling_model(order),
        "tokenizer": letter_tokenizer(range(VOCABULARY)),
        "assistant_tokenizer": letter_tokenizer(order),
        **arguments,
    }


def test_universal_assisted_generation_serves_a_batch_of_eight() -> None:
    target, inputs = cycling_model(), ragged_batch(EIGHT)
    output = speculative(target, inputs=inputs, policy=hf_dsde.StaticPolicy(3), **translated(max_new_tokens=16))
    assert_same_text(output, plain(target, inputs, max_new_tokens=16))
    assert output.speculation_statistics.acceptance_rate > 0.5


def taking_turns() -> ScriptedLengths:
    """In each round some rows draft nothing, and in every third round none drafts."""
    return ScriptedLengths([[(row + turn) % 4 if turn % 3 else 0 for row in range(8)] for turn in range(40)])


def test_a_row_that_sat_out_of_a_round_is_drafted_for_as_before() -> None:
    """Generators count on seeing every token, and rounds without drafts show them none."""
    target, inputs = cycling_model(), ragged_batch(EIGHT)
    output = speculative(target, inputs=inputs, policy=taking_turns(), **translated(max_new_tokens=24))
    assert_same_text(output, plain(target, inputs, max_new_tokens=24))
    assert output.speculation_statistics.acceptance_rate > 0.5


class Told(CandidateGenerator):
    """Proposes nothing that stands, and notes what it is told."""

    def __init__(self, told: list[tuple[int, tuple[int, ...], int]]) -> None:
        self.told = told

    def __deepcopy__(self, memory: dict[int, Any]) -> Told:
        return Told(self.told)

    def get_candidates(self, input_ids: LongTensor, **_: Any) -> tuple[LongTensor, None]:
        return torch.cat([input_ids, torch.full((1, 2), 2)], dim=1), None

    def update_candidate_strategy(self, input_ids: LongTensor, scores: Tensor, num_matches: int) -> None:
        self.told.append((input_ids.shape[1], tuple(scores.shape), num_matches))


def test_a_users_generator_hears_of_its_own_row_only() -> None:
    told: list[tuple[int, tuple[int, ...], int]] = []
    target, inputs = cycling_model(), ragged_batch([2, 5])
    compared(target, Told(told), inputs, hf_dsde.StaticPolicy(2), max_new_tokens=4)
    lengths = [length + emitted for emitted in (1, 2, 3) for length in (2, 5)]
    assert [length for length, _, _ in told] == lengths  # the last token is never drafted
    assert {matches for _, _, matches in told} == {0}
    assert all(shape[0] == 1 and shape[2] == VOCABULARY for _, shape, _ in told)


class Unfounded(Drafter):
    """Proposes what follows from the text by a rule that has nothing to do with the target."""

    def get_candidates(self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor) -> CandidateBatch:
        vocabulary = self.call.vocabulary_size
        texts = [sequences.host_text(row) for row in range(sequences.rows)]
        drafts = [
            [(sum(text) + 3 * place) % vocabulary for place in range(most)]
            for text, most in zip(texts, plan.length_counts, strict=True)
        ]
        return CandidateBatch.of_lists(drafts, sequences.device)


class Short(Drafter):
    """Proposes fewer tokens than it may, in each row another number."""

    def get_candidates(self, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor) -> CandidateBatch:
        drafts = [[7] * min(most, row % 3) for row, most in enumerate(plan.length_counts)]
        made = CandidateBatch.of_lists(drafts, sequences.device)
        return made if sequences.generated_counts[0] % 2 else CandidateBatch(made.tokens, made.lengths)


class FavoursByLength(LogitsProcessor):
    """A processor of a user's own, which is called position by position."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = scores.clone()
        favoured[:, 40 + input_ids.shape[1] % 5] += 3
        return favoured


def test_a_drafter_may_propose_less_than_it_may_under_a_users_processor() -> None:
    target, inputs = cycling_model(), ragged_batch([2, 5, 3, 4])
    call = {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([FavoursByLength()])}
    output = speculative(target, Short(), inputs, hf_dsde.StaticPolicy(4), **call)
    assert_same_text(output, plain(target, inputs, **call))


def law_p_value(assistant: Any, rows: int = 4096, depth: int = 3, **options: Any) -> float:
    """Sample a batch and test the joint law of its first tokens, prompt by prompt."""
    target, statistic, freedom = toy_model(5), 0.0, 0
    options = {"do_sample": True, "max_new_tokens": 5, "top_k": 0, **options}
    torch.manual_seed(0)
    repeats = rows // len(PROMPTS)
    output = target.generate(
        input_ids=PROMPTS.repeat(repeats, 1),
        attention_mask=PROMPT_MASK.repeat(repeats, 1),
        assistant_model=assistant,
        speculation_policy=hf_dsde.StaticPolicy(3),
        **options,
    )
    digits = output[:, PROMPTS.shape[1] :][:, :depth]
    outcomes = (digits * 5 ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    for prompt in range(len(PROMPTS)):
        observed = outcomes[prompt :: len(PROMPTS)].bincount(minlength=5**depth).double()
        law = exact_law(target, prompt, depth, options)
        part, more = pearson(observed, law * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 2.0}], ids=["plain", "processed"]
)
def test_sampled_text_has_the_targets_law_whatever_is_drafted(options: dict[str, Any]) -> None:
    assert law_p_value(Unfounded(), **options) > 1e-4


def test_sampled_text_has_the_targets_law_when_a_generator_is_asked_row_by_row() -> None:
    assert law_p_value(PromptLookupCandidateGenerator(max_length=100, max_matching_ngram_size=1), rows=1024) > 1e-4


def test_a_wrong_rule_for_what_is_drafted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right rule for drawn tokens is wrong for chosen ones: it takes q for what they were drawn from."""
    right = verification.verify

    def wrong(scores: Tensor, candidates: CandidateBatch, **how: Any) -> verification.VerifiedBlock:
        even = torch.full((*candidates.tokens.shape, scores.shape[-1]), 1 / scores.shape[-1])
        return right(scores, replace(candidates, law=Sampled(even)), **how)

    monkeypatch.setattr("hf_dsde.decoding.loop.verify", wrong)
    assert law_p_value(Unfounded()) < 1e-6


def test_universal_assisted_generation_keeps_the_law_of_a_batch_of_eight() -> None:
    """A cycle without doubt: at a temperature, each row's law is that of one step, whatever was accepted."""
    target, inputs = cycling_model(), {name: part.repeat(40, 1) for name, part in ragged_batch([2, 5]).items()}
    torch.manual_seed(0)
    call = translated(max_new_tokens=3, do_sample=True, top_k=4, temperature=1.0)
    output = speculative(target, inputs={**inputs}, policy=hf_dsde.StaticPolicy(2), **call)
    assert output.speculation_statistics.acceptance_rate > 0.1
    with torch.no_grad():
        logits = target(output.sequences[:, 4:-1]).logits.float()
    best = logits.topk(4).values.softmax(-1)
    ranks = (logits.topk(4).indices == output.sequences[:, 5:, None]).double()
    assert bool((ranks.sum(-1) == 1).all())
    observed, expected = ranks.sum((0, 1)), best.double().sum((0, 1))
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert float(stats.chi2.sf(statistic, 3)) > 1e-4


@pytest.mark.parametrize("policy", ["dsde", "svip", "confidence", "static"])
def test_who_looks_at_distributions_refuses_a_drafter_that_has_none(policy: str) -> None:
    who = "speculation_listeners: Notes" if policy == "static" else f"speculation_policy='{policy}'"
    named = {"max_new_tokens": 4, "speculation_listeners": [Notes(Signal.KLD)]}
    with pytest.raises(ValueError, match=rf"{who}.*Unfounded has none.*'static'"):
        speculative(cycling_model(), Unfounded(), ragged_batch([2]), policy, **named)


def test_a_generator_that_needs_the_targets_hidden_states_is_refused() -> None:
    generator = Told([])
    generator.requires_model_outputs = True
    with pytest.raises(ValueError, match=r"assistant_model=Told.*hidden states"):
        speculative(cycling_model(), generator, ragged_batch([2]), "static", max_new_tokens=4)


def test_costs_of_a_drafter_are_learnt_from_its_rounds() -> None:
    """A drafter without a model costs nothing until a round has shown what it costs."""
    live = LiveCosts(CostModel({4: BatchCosts(None, CostCurve((1, 2, 5), (1.0, 1.1, 1.4)))}), 4)
    live.observe(draft_steps=2, width=3, draft=0.5, verify=1.2, overhead=0.0)
    assert [live.current.draft_seconds(steps) for steps in range(4)] == pytest.approx([0, 0.25, 0.5, 0.75])
    live.set_rows(2)
    assert live.current.draft_seconds(1) > 0

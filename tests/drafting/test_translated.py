"""Drafts of another tokenizer in a batch: exact, out of shared tokens alone, from texts of the draft's own."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from other_tokenizer import (
    LACKED,
    NOT_LACKED,
    SHARED,
    TOKENIZERS,
    as_read,
    best_guesses,
    draft_for,
    only_shared,
    translated_pair,
)
from recorded import NotingCapture
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson, toy_model
from scipy import stats
from tiny_calls import QUIET, assert_same_text, plain, speculative
from tiny_models import BOS, EOS, PAD, ragged_batch, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_rounds import Notes
from tiny_text import spelling_tokenizer, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.translated import TranslatedDrafter
from hf_dsde.drafting.translation import Translation

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
EIGHT = ragged_batch([1, 5, 3, 7, 2, 4, 6, 8])


@pytest.mark.parametrize(
    ("policy", "recorded"),
    [("static", False), ("dsde", True), ("svip", False), (RandomLengths(6, stop_probability=0.2), True)],
    ids=["static", "dsde", "svip", "random"],
)
def test_a_batch_of_eight_has_the_text_of_plain_decoding(
    policy: str | hf_dsde.StoppingPolicy, recorded: bool, request: pytest.FixtureRequest
) -> None:
    if recorded:
        request.getfixturevalue("recording")
    target, draft = translated_pair(0.02)
    output = speculative(target, draft, EIGHT, policy, max_new_tokens=24, **TOKENIZERS)
    assert_same_text(output, plain(target, EIGHT, max_new_tokens=24))
    assert torch.isin(output.sequences[:, 8:], torch.tensor(list(LACKED))).any()
    assert 0.1 < output.speculation_statistics.acceptance_rate < 1.0


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_that_agrees_on_what_both_have_is_always_right_where_nothing_else_is_written(sampled: bool) -> None:
    """Ids, order and normalisation are those of the target's own law there, or some token would be rejected."""
    target, draft = translated_pair()
    call = {"do_sample": sampled, "max_new_tokens": 24, **NOT_LACKED}
    torch.manual_seed(0)
    output = speculative(target, draft, only_shared(EIGHT), hf_dsde.StaticPolicy(4), **call, **TOKENIZERS)
    assert output.speculation_statistics.acceptance_rate == 1.0


def test_a_wrong_map_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays exact, and the draft is useless."""
    made = Translation.__init__

    def turned(self: Translation, *args: Any) -> None:
        made(self, *args)
        theirs, ours = zip(*self.shared, strict=True)
        self.shared = list(zip(theirs, (*ours[1:], ours[0]), strict=True))

    monkeypatch.setattr(Translation, "__init__", turned)
    monkeypatch.setattr("hf_dsde.integration.vocabularies._translations", WeakKeyDictionary())
    target, draft = translated_pair()
    output = speculative(target, draft, only_shared(EIGHT), "static", max_new_tokens=12, **NOT_LACKED, **TOKENIZERS)
    assert_same_text(output, plain(target, only_shared(EIGHT), max_new_tokens=12, **NOT_LACKED))
    assert output.speculation_statistics.acceptance_rate < 0.2


class Proposals:
    """Notes every proposal, with the texts that it was made after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[list[tuple[list[int], list[int]]], list[list[int]]]] = []
        original = TranslatedDrafter.get_candidates

        def noted(drafter: Any, sequences: SequenceBatch, plan: RoundPlan, monitor: Any) -> CandidateBatch:
            texts = [
                (text[: sequences.prompt_lengths[row]], text[sequences.prompt_lengths[row] :])
                for row, text in enumerate(map(sequences.host_text, range(sequences.rows)))
            ]
            candidates = original(drafter, sequences, plan, monitor)
            tokens = candidates.tokens.tolist()
            self.made.append((texts, [row[:n] for row, n in zip(tokens, candidates.counts, strict=True)]))
            return candidates

        monkeypatch.setattr(TranslatedDrafter, "get_candidates", noted)


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_proposals_are_those_of_a_draft_that_reads_the_whole_text_each_time(
    recorded: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Rows that sit out, tokens in two pieces, rejected drafts: the cache holds what the text says all the same."""
    if recorded:
        request.getfixturevalue("recording")
    proposals = Proposals(monkeypatch)
    target, draft = translated_pair(0.02)
    lengths = ScriptedLengths([[(row + 2 * turn) % 4 if turn % 4 else 0 for row in range(4)] for turn in range(40)])
    inputs = ragged_batch([1, 7, 3, 5], seed=3)
    speculative(target, draft, inputs, lengths, max_new_tokens=14, **TOKENIZERS)
    compared = 0
    for texts, drafts in proposals.made:
        for (prompt, generated), tokens in zip(texts, drafts, strict=True):
            if tokens:
                assert tokens == best_guesses(draft, as_read(prompt, generated), len(tokens))
                compared += 1
    assert compared > 15


def test_a_drafted_token_that_the_draft_lacks_is_read_in_pieces_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else is allowed it is drafted, fed as something else, accepted, and read again as what it is."""
    proposals = Proposals(monkeypatch)
    target, draft = translated_pair(0.02)
    call = {"prefix_allowed_tokens_fn": lambda _, text: SHARED if len(text) % 5 else [LACKED[0]]}
    inputs = ragged_batch([1, 7, 3, 5], seed=3)
    output = speculative(target, draft, inputs, hf_dsde.StaticPolicy(3), max_new_tokens=20, **call, **TOKENIZERS)
    assert (output.sequences[:, 7:] == LACKED[0]).sum() == 4 * 4
    compared = 0
    for texts, drafts in proposals.made:
        for (prompt, generated), tokens in zip(texts, drafts, strict=True):
            if tokens and (7 + len(generated)) % 5:
                assert tokens[:1] == best_guesses(draft, as_read(prompt, generated), 1)
                compared += 1
    assert compared > 15


def test_nothing_but_shared_tokens_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    proposals = Proposals(monkeypatch)
    target, draft = translated_pair(0.02)
    call = {"do_sample": True, "max_new_tokens": 24, "temperature": 2.0}
    torch.manual_seed(0)
    speculative(target, draft, EIGHT, hf_dsde.StaticPolicy(3), **call, **TOKENIZERS)
    drawn = [token for _, drafts in proposals.made for tokens in drafts for token in tokens]
    assert len(drawn) > 100
    assert set(drawn) <= set(SHARED)


def test_a_round_may_add_nothing_that_the_draft_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first, the cache holds the draft's whole text: its last token is fed again."""
    proposals = Proposals(monkeypatch)
    target, draft = translated_pair()
    call: dict[str, Any] = {
        "max_new_tokens": 16,
        "prefix_allowed_tokens_fn": lambda _, text: SHARED[3:] if len(text) % 4 < 2 else [EOS],
    }
    prompt = {name: part[:, -1:] for name, part in only_shared(ragged_batch([1])).items()}
    tokenizers = {**TOKENIZERS, "assistant_tokenizer": without_special_tokens()}
    output = speculative(target, draft, prompt, hf_dsde.StaticPolicy(2), **call, **tokenizers)
    assert_same_text(output, plain(target, prompt, **call))
    compared = 0
    for ((prompt_ids, generated),), (tokens,) in proposals.made:
        if tokens and (1 + len(generated)) % 4 < 2:
            text = as_read(prompt_ids, [token for token in generated if token != EOS])
            assert tokens[:1] == best_guesses(draft, text, 1, special=False)
            compared += 1
    assert compared > 2


def toy_tokenizers() -> dict[str, Any]:
    """Five letters for the target, of which the draft has four, two of its own, and another order."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    made = {}
    for name, letters in (("tokenizer", "vwxyz"), ("assistant_tokenizer", "qzwvry")):
        core = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
        core.decoder = decoders.Fuse()
        made[name] = PreTrainedTokenizerFast(tokenizer_object=core)
    return made


def law_p_value(rows: int = 2048, depth: int = 3, **options: Any) -> float:
    """Sample a batch and test the joint law of its first tokens, prompt by prompt."""
    target, draft = toy_model(5), toy_model(6, seed=2)
    options = {"do_sample": True, "max_new_tokens": 5, "top_k": 0, **options}
    torch.manual_seed(0)
    output = target.generate(
        input_ids=PROMPTS.repeat(rows // 2, 1),
        attention_mask=PROMPT_MASK.repeat(rows // 2, 1),
        assistant_model=draft,
        speculation_policy=hf_dsde.StaticPolicy(3),
        speculation_config=QUIET,
        return_dict_in_generate=True,
        **toy_tokenizers(),
        **options,
    )
    assert 0.1 < output.speculation_statistics.acceptance_rate < 0.95
    digits = output.sequences[:, PROMPTS.shape[1] :][:, :depth]
    outcomes = (digits * 5 ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for prompt in range(2):
        observed = outcomes[prompt::2].bincount(minlength=5**depth).double()
        part, more = pearson(observed, exact_law(target, prompt, depth, options) * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_k": 3, "repetition_penalty": 2.0}], ids=["plain", "processed"]
)
def test_sampled_text_has_the_targets_law(options: dict[str, Any]) -> None:
    assert law_p_value(**options) > 1e-4


@pytest.mark.parametrize("mutant", ["not normalised", "another token"])
def test_a_wrong_law_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TranslatedDrafter._chosen

    def wrong(self: Any, logits: Tensor, *rest: Any) -> Any:
        step, probs = right(self, logits, *rest)
        shared = self._tables.shared.ids
        if mutant == "not normalised":  # what the draft gives the shared tokens, as if the others were among them
            mass = logits.softmax(-1).index_select(-1, shared).sum(-1, keepdim=True)
            return step, probs * mass
        ids = self._tables.target_ids
        step.tokens = torch.arange(5).index_copy(0, ids, ids.roll(1))[step.tokens]
        return step, probs

    monkeypatch.setattr(TranslatedDrafter, "_chosen", wrong)
    assert law_p_value() < 1e-6


def test_a_second_call_records_nothing(recording: list[NotingCapture]) -> None:
    target, draft = translated_pair(0.02)
    counts = []
    for _ in range(2):
        speculative(target, draft, EIGHT, hf_dsde.StaticPolicy(3), max_new_tokens=12, **TOKENIZERS)
        counts.append(sum(capture.recorded for capture in recording))
    assert counts[0] == counts[1] > 0


def test_a_prompt_that_is_nothing_to_the_draft_waits_for_text() -> None:
    target, draft = translated_pair()
    inputs = {name: part.clone() for name, part in ragged_batch([3, 1, 1]).items()}
    inputs["input_ids"][1:, -1] = torch.tensor([BOS, 40])
    tokenizers = {**TOKENIZERS, "assistant_tokenizer": without_special_tokens()}
    notes = Notes()
    call = {"max_new_tokens": 16, "speculation_listeners": [notes]}
    output = speculative(target, draft, inputs, hf_dsde.StaticPolicy(2), **call, **tokenizers)
    assert_same_text(output, plain(target, inputs, max_new_tokens=16))
    assert [record.drafted for record in notes.events[:2]] == [[2, 0, 2], [2, 2, 2]]


def without_special_tokens() -> Any:
    from other_tokenizer import draft_tokens
    from tiny_text import SPECIAL
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [token for token in draft_tokens() if token not in SPECIAL.values()]
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_tokens_that_only_the_target_has_may_be_all_that_is_allowed() -> None:
    target, draft = translated_pair(0.02)
    call: dict[str, Any] = {
        "max_new_tokens": 12,
        "prefix_allowed_tokens_fn": lambda row, text: list(LACKED) if len(text) % 3 else list(SHARED[3:]),
    }
    for sampled in (False, True):
        output = speculative(target, draft, EIGHT, hf_dsde.StaticPolicy(3), do_sample=sampled, **call, **TOKENIZERS)
        if not sampled:
            assert_same_text(output, plain(target, EIGHT, **call))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_drafts_context_counts_its_own_tokens(family: str) -> None:
    """It reads more tokens than the target has written, and learned positions end with its context."""
    target, _ = translated_pair()
    draft = draft_for(tiny_model(family, max_position_embeddings=20)) if family == "llama" else short_gpt2()
    inputs = {name: part.clone() for name, part in ragged_batch([2, 14, 9]).items()}
    inputs["input_ids"][1, -14:] = 35
    output = speculative(target, draft, inputs, hf_dsde.StaticPolicy(4), max_new_tokens=24, **TOKENIZERS)
    assert_same_text(output, plain(target, inputs, max_new_tokens=24))
    assert output.speculation_statistics.drafted > 0


def short_gpt2() -> PreTrainedModel:
    from other_tokenizer import draft_tokens

    return tiny_model("gpt2", max_position_embeddings=20, vocab_size=len(draft_tokens()))


def test_ends_are_drafted_and_end_a_text() -> None:
    target, draft = translated_pair()
    expected = plain(target, EIGHT, max_new_tokens=24, eos_token_id=EOS, pad_token_id=PAD)
    call = {"max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": PAD}
    assert_same_text(speculative(target, draft, EIGHT, "static", **call, **TOKENIZERS), expected)


def test_streams_of_rows_of_another_tokenizer() -> None:
    target, draft = translated_pair(0.02)
    rows = [row[mask.bool()].tolist() for row, mask in zip(*EIGHT.values(), strict=True)]
    generator = hf_dsde.BatchGenerator(
        target,
        TOKENIZERS["tokenizer"],
        assistant_model=draft,
        assistant_tokenizer=TOKENIZERS["assistant_tokenizer"],
        speculation_policy="static",
        batch_size=3,
        max_new_tokens=14,
        do_sample=False,
    )
    results = list(generator.stream(rows, ordered=True))
    for row, result in zip(rows, results, strict=True):
        expected = target.generate(torch.tensor([row]), max_new_tokens=14, do_sample=False)[0, len(row) :]
        assert result.token_ids == expected.tolist()
    assert generator.statistics.acceptance_rate > 0.1
    other = generator.identity["draft"]
    assert other["settings"]["shared_tokens"]
    assert "TranslatedDrafter" in other["drafter"]


def test_tokenizers_that_share_little_are_translated_row_by_row_and_jobs_refuse_them() -> None:
    target, draft = translated_pair()
    foreign = spelling_tokenizer(*(chr(0x400 + n) for n in range(90)))
    tokenizers = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": foreign}
    call = {"max_new_tokens": 6}
    with pytest.warns(hf_dsde.SpeculationWarning, match="6 tokens in common, 6% .*, too few, .* row by row"):
        output = speculative(target, draft, EIGHT, "static", **call, **tokenizers)
    assert_same_text(output, plain(target, EIGHT, **call))
    with pytest.raises(ValueError, match="token ids differ"):
        hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=draft, assistant_tokenizer=foreign)

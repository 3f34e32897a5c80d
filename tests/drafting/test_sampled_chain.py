"""Chains of replayed steps that draw their tokens: the target's law, one text of a seed, and where they are taken."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from drawn_tokens import Draws
from launches import count_launches
from recorded import NotingCapture
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson, toy_model
from scipy import stats
from test_hybrid_calls import Astray
from test_translated import toy_tokenizers
from tiny_calls import QUIET, config_of, endless_model, speculative
from tiny_heads import reference_draft, tiny_head
from tiny_models import AGREEMENT, noisy_copy, ragged_batch, tiny_model
from tiny_policies import ScriptedLengths
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

import hf_dsde
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch, Sampled
from hf_dsde.decoding.processing.scores_alone import RECORDABLE, ScoresAlone, scores_alone
from hf_dsde.drafting import chain
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.drafting.drawn_tokens import DraftNumbers, DraftVocabulary, DrawnTokens
from hf_dsde.drafting.early_exit import EarlyExitDrafter
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.drafting.model import ModelDrafter
from hf_dsde.execution.cuda_graphs import NoWaiting
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.recorded_chain import BegunChain, Chain, DraftedChain
from hf_dsde.execution.token_choice import Chosen, TokenChoice
from hf_dsde.execution.workspaces import MOST_CHOICES
from hf_dsde.policies import Signal

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

RIGHT, WRONG = 1e-4, 1e-6
"""As in `test_sampling_law`: seeds are fixed, so that a test always passes or always fails."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a text is decides which passes are recorded."""
    torch.manual_seed(0)


@dataclass
class Seen:
    """What was run in place of steps with the host in between, and how often that was done all the same."""

    chains: list[int] = field(default_factory=list)
    begun: list[bool] = field(default_factory=list)
    further: list[int] = field(default_factory=list)
    by_step: int = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Chains of recorded steps, some of which begin before their round as on a GPU."""
    noted = Seen()
    run_chain, begin, run = GraphRunner.chain, GraphRunner.begin_chain, BegunChain.run
    step_by_step = ChainDrafter._step_by_step

    def counted_chain(self: GraphRunner, given: Chain) -> DraftedChain | None:
        drafted = run_chain(self, given)
        noted.chains.append(0 if drafted is None else given.steps)
        return drafted

    def counted_begin(self: GraphRunner, given: Chain) -> DraftedChain | None:
        drafted = begin(self, given)
        noted.begun.append(drafted is not None)
        if drafted is not None:
            noted.chains.append(given.steps)
        return drafted

    def counted_run(self: BegunChain, given: Chain, of_rows: Any) -> None:
        before = self.steps
        run(self, given, of_rows)
        if given.goes_on and before:
            noted.further.append(given.steps - before)

    def counted_steps(self: ChainDrafter, *arguments: Any) -> CandidateBatch:
        noted.by_step += 1
        return step_by_step(self, *arguments)

    monkeypatch.setattr(GraphRunner, "chain", counted_chain)
    monkeypatch.setattr(GraphRunner, "begin_chain", counted_begin)
    monkeypatch.setattr(BegunChain, "run", counted_run)
    monkeypatch.setattr(ChainDrafter, "_step_by_step", counted_steps)
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    return noted


# The law of the text.


def layered_toy() -> PreTrainedModel:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return hf_dsde.enable(tiny_model(vocab_size=5, num_hidden_layers=3, initializer_range=0.5, **shape, **ends).float())


@torch.no_grad()
def toy_head(target: PreTrainedModel) -> PreTrainedModel:
    """A head that knows four tokens of five, and thinks of them about what the target does."""
    head = tiny_head(target, layers=(0, 1), draft_vocabulary=4)
    texts = torch.randint(1, 5, (200, 8), generator=torch.Generator().manual_seed(0))
    output = target(texts, output_hidden_states=True)
    states = head.project([output.hidden_states[layer][:, :-1] for layer in head.feature_layers])
    seen = head.norm(head(texts[:, 1:], hidden_states=states).hidden_states).flatten(0, 1)
    wanted = output.logits[:, 1:, head.draft_ids].flatten(0, 1)
    head.lm_head.weight.copy_(torch.linalg.lstsq(seen, wanted - wanted.mean(1, keepdim=True)).solution.T)
    return head


DRAFTS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "head": toy_head,
    "model": lambda target: noisy_copy(target, 0.5),
    "smaller vocabulary": lambda _: toy_model(4, seed=1),
    "larger vocabulary": lambda _: toy_model(7),
    "early exit": lambda target: EarlyExitDrafter(target, [1, 2], own_lengths=False),
    "other tokenizer": lambda _: toy_model(6, seed=2),
    "hybrid": lambda _: [Astray(longest=4), toy_model(5, seed=1)],
}


def law_p_value(output: Tensor, target: PreTrainedModel, options: dict[str, Any]) -> float:
    """The p-value of the joint law of a batch's first tokens, prompt by prompt."""
    depth = 3
    digits = output[:, PROMPTS.shape[1] :][:, :depth]
    outcomes = (digits * 5 ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for prompt in range(len(PROMPTS)):
        observed = outcomes[prompt :: len(PROMPTS)].bincount(minlength=5**depth).double()
        part, more = pearson(observed, exact_law(target, prompt, depth, options) * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    return float(stats.chi2.sf(statistic, freedom))


def sampled(target: PreTrainedModel, draft: Any, options: dict[str, Any], rows: int = 4096, **more: Any) -> Tensor:
    numbers = np.random.default_rng(0)
    output = target.generate(
        input_ids=PROMPTS.repeat(rows // len(PROMPTS), 1),
        attention_mask=PROMPT_MASK.repeat(rows // len(PROMPTS), 1),
        assistant_model=draft,
        speculation_policy=ScriptedLengths(numbers.choice(4, (8, rows), p=(0.05, 0.05, 0.2, 0.7)).tolist()),
        speculation_config=config_of(QUIET, view_bucket=8, max_draft_length=3, runner="graph"),
        return_dict_in_generate=True,
        **options,
        **more,
    )
    assert 0.05 < output.speculation_statistics.acceptance_rate < 0.98
    return output.sequences


def p_value(kind: str, options: dict[str, Any], rows: int = 4096) -> float:
    target = layered_toy() if kind == "early exit" else toy_model(5)
    draft = DRAFTS[kind](target)
    more = toy_tokenizers() if kind == "other tokenizer" else {}
    options = {"do_sample": True, "max_new_tokens": 6, "top_k": 0, **options}
    torch.manual_seed(0)
    return law_p_value(sampled(target, draft, options, rows, **more), target, options)


OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "top-k and top-p": {"top_k": 4, "top_p": 0.9, "temperature": 1.3},
    "flat top-k": {"top_k": 3, "temperature": 1.4},
}
QUICK = {("head", "top-k and top-p")}
CASES = [
    *(("head", name) for name in OPTIONS if name != "flat top-k"),
    *((kind, "flat top-k" if kind == "model" else "temperature 0.7") for kind in DRAFTS if kind != "head"),
]
LAWS = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]


@pytest.mark.usefixtures("recording", "chosen_at_random")
@pytest.mark.parametrize(("kind", "options"), LAWS)
def test_sampled_text_has_the_targets_law(kind: str, options: str, seen: Seen) -> None:
    assert p_value(kind, OPTIONS[options], rows=2048) > RIGHT
    assert seen.by_step == 0
    assert len(seen.chains) > 2
    if kind != "other tokenizer":  # whose first pass waits for the host
        assert sum(seen.begun) > len(seen.further), "some were as long as the last one"


def hand_over_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probabilities of each step but the first are those of the one before."""
    original = chain.tokens_of

    def tokens_of(*arguments: Any) -> tuple[Tensor, Tensor]:
        tokens, probs = original(*arguments)
        return tokens, torch.cat([probs[:, :1], probs[:, :-1]], dim=1)

    monkeypatch.setattr(chain, "tokens_of", tokens_of)


def repeat_numbers_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftNumbers.fill
    monkeypatch.setattr(DraftNumbers, "fill", lambda self, turn, numbers, place: original(self, turn, numbers, 0))


def repeat_numbers_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DraftNumbers.fill
    monkeypatch.setattr(DraftNumbers, "fill", lambda self, turn, numbers, place: original(self, 0, numbers, place))


def record_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay has the numbers that the step was recorded with."""
    original = DraftNumbers.fill

    def fill(self: DraftNumbers, turn: int, numbers: Tensor, place: int) -> None:
        if not place:
            original(self, turn, numbers, place)

    monkeypatch.setattr(DraftNumbers, "fill", fill)


def leave_processing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from processed scores, verified against the raw softmax."""
    original = DrawnTokens.__call__

    def call(self: DrawnTokens, model: PreTrainedModel, logits: Tensor, numbers: Tensor | None) -> Chosen:
        chosen = original(self, model, logits, numbers)
        raw = self.vocabulary.known(logits[:, None]).over_target()[:, 0].softmax(-1)
        return chosen._replace(probs=raw)

    monkeypatch.setattr(DrawnTokens, "__call__", call)


@pytest.mark.slow
@pytest.mark.usefixtures("recording", "seen")
@pytest.mark.parametrize(
    ("mutate", "rows"),
    [
        (hand_over_the_step_before, 3072),
        (repeat_numbers_in_each_step, 1024),
        (repeat_numbers_in_each_round, 2048),
        (record_the_numbers, 1024),
        (leave_processing_out, 1024),
    ],
)
def test_wrong_chains_are_found_out(
    mutate: Callable[[pytest.MonkeyPatch], None], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with as many rows as it takes: by the non-central chi-squared law, whose non-centrality three other seeds
    gave as 66, 165, 94, 283 and 231 for 1024 rows, one seed in 300,000 at most would not show the mutant. The law of
    the right chain is looked at with the same draft and options above.
    """
    mutate(monkeypatch)
    assert p_value("model", OPTIONS["flat top-k"], rows) < WRONG


@pytest.mark.slow
def test_two_temperatures_in_turn_each_have_their_law(recording: list[NotingCapture], seen: Seen) -> None:
    target = toy_model(5)
    head = DRAFTS["head"](target)
    calls = [
        {"do_sample": True, "max_new_tokens": 6, "top_k": 0, "temperature": temperature} for temperature in (0.6, 1.8)
    ]
    texts = []
    for options in calls * 2:
        torch.manual_seed(0)
        texts.append(sampled(target, head, options, rows=2048))
        if len(texts) == 2:
            recorded = sum(capture.recorded for capture in recording)
    for text, options in zip(texts, calls, strict=False):
        assert law_p_value(text, target, options) > RIGHT
    assert all(map(torch.equal, texts[:2], texts[2:]))
    assert sum(capture.recorded for capture in recording) == recorded, "the second time, everything is there"
    assert seen.by_step == 0


@pytest.mark.slow
@pytest.mark.usefixtures("recording")
def test_few_temperatures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = PAIRS["model"](endless_model())
    recorded: list[TokenChoice] = []
    original = GraphRunner._record_chain

    def record_chain(self: GraphRunner, rows: int, choice: TokenChoice, *more: Any) -> Any:
        recorded.append(choice)
        return original(self, rows, choice, *more)

    monkeypatch.setattr(GraphRunner, "_record_chain", record_chain)

    def records(temperature: float) -> bool:
        recorded.clear()
        torch.manual_seed(5)
        call(draft, temperature=temperature)
        return bool(recorded)

    temperatures = [0.5, 0.6, 0.7, 0.8, 0.9]
    assert len(temperatures) == MOST_CHOICES + 1
    assert all(map(records, temperatures))
    assert not any(map(records, temperatures[1:]))
    assert records(temperatures[0])
    assert records(temperatures[1]), "the one used least recently made room"
    assert not records(temperatures[-1])


# What a chain draws from.

PAIRS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "head": lambda target: tiny_head(target, draft_vocabulary=60),
    "whole vocabulary": lambda target: tiny_head(target, kind="qwen3", norm_output=True, fc_norm=True),
    "model": lambda target: noisy_copy(target, AGREEMENT["half"]),
    "larger vocabulary": lambda _: tiny_model(vocab_size=120),
    "smaller vocabulary": lambda _: tiny_model(vocab_size=80),
}
LENGTHS = [1, 9, 4, 17]
SCRIPT = [[3, 0, 5, 1], [1, 4, 0, 2], [2, 2, 2, 2], [5, 5, 1, 5], [2, 4, 4, 3], [0, 0, 0, 0]] * 8


def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], Tensor]]:
    """Gets of each proposal of each row its text, its tokens and what they were drawn from."""
    found: list[tuple[list[int], list[int], Tensor]] = []
    original = ChainDrafter.get_candidates

    def get_candidates(self: ChainDrafter, sequences: Any, *arguments: Any) -> CandidateBatch:
        candidates = original(self, sequences, *arguments)
        assert isinstance(candidates.law, Sampled)
        assert candidates.law.probs.shape == (*candidates.tokens.shape, self.call.vocabulary_size)
        for row, length in enumerate(candidates.counts):
            if length:
                text = sequences.host_text(row)
                found.append((text, candidates.tokens[row, :length].tolist(), candidates.law.probs[row, :length]))
        return candidates

    monkeypatch.setattr(ChainDrafter, "get_candidates", get_candidates)
    return found


@torch.no_grad()
def draft_logits(target: PreTrainedModel, draft: PreTrainedModel, text: list[int], tokens: list[int]) -> Tensor:
    """What the draft says in front of each token, over the target's vocabulary, from the whole text at once."""
    size = target.config.vocab_size
    logits = torch.full((len(tokens), size), -1e4, dtype=torch.float64)
    if hasattr(draft, "draft_ids"):
        ids = torch.arange(size) if draft.draft_ids is None else draft.draft_ids
        return logits.index_copy_(1, ids, reference_draft(target, draft, text, tokens)[1].double())
    known = min(size, draft.config.vocab_size)
    read = torch.tensor([[*text, *tokens]]).clamp_max(draft.config.vocab_size - 1)
    logits[:, :known] = draft(read).logits[0, -len(tokens) - 1 : -1, :known].double()
    return logits


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fused", "recorded"])
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.usefixtures("recording")
def test_what_is_handed_over_is_what_the_draft_says_of_each_token(
    kind: str, fused: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = endless_model()
    draft = PAIRS[kind](target)
    found = drafted(monkeypatch)
    config = config_of(QUIET, runner="graph", fused_layers=fused)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 12, "max_new_tokens": 20}
    for _ in range(2):
        inputs = ragged_batch(LENGTHS)
        speculative(target, draft, inputs, ScriptedLengths(SCRIPT), config, **options)
    assert seen.by_step == 0
    assert any(seen.begun)
    assert len(set(seen.chains)) > 2
    for text, tokens, probs in found[::3]:
        scores = draft_logits(target, draft, text, tokens) / 0.8
        scores[scores < scores.topk(12).values[:, -1:]] = float("-inf")
        torch.testing.assert_close(probs.double(), scores.softmax(-1), rtol=2e-3, atol=1e-5)
        assert bool((probs.gather(1, torch.tensor(tokens)[:, None]) > 0).all())


def failures_of_draws(kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    target = endless_model()
    draft = PAIRS[kind](target)
    torch.manual_seed(3)
    draws = Draws(monkeypatch)
    policy = ScriptedLengths([[4] * 48, [2, 4, 5] * 16] * 20)
    options = {"do_sample": True, "temperature": 1.1, "top_k": 40, "max_new_tokens": 40}
    config = config_of(QUIET, runner="graph")
    speculative(target, draft, ragged_batch([3, 5, 4] * 16), policy, config, **options)
    return draws.failures()


@pytest.mark.parametrize("kind", ["head", "model"])
@pytest.mark.usefixtures("recording")
def test_each_token_is_a_draw_from_what_is_handed_over(kind: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures_of_draws(kind, monkeypatch) == []
    assert seen.by_step == 0
    assert len(seen.chains) > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutate",
    [
        hand_over_the_step_before,
        repeat_numbers_in_each_step,
        repeat_numbers_in_each_round,
        record_the_numbers,
        leave_processing_out,
    ],
)
@pytest.mark.usefixtures("recording", "seen")
def test_wrong_draws_are_found_out(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert failures_of_draws("model", monkeypatch)


@pytest.mark.usefixtures("recording", "seen")
def test_what_is_kept_between_calls_keeps_no_model() -> None:
    target = endless_model()
    draft = PAIRS["head"](target)
    call(draft, temperature=0.7, top_p=0.9)
    kept, gone = weakref.ref(draft.lm_head), weakref.ref(draft)
    del draft
    gc.collect()
    assert gone() is None
    assert kept() is None


# Where chains are taken.


class Asks(ScriptedLengths):
    """Stops inside of rounds, at times."""

    def should_stop(self, step: Any) -> Tensor:
        return step.confidence < 0.01


class WatchesEntropy(ScriptedLengths):
    requires = frozenset({Signal.ENTROPY})


class WatchesDivergence(ScriptedLengths):
    requires = frozenset({Signal.KLD})

    def observe(self, outcome: Any) -> None:
        assert bool(torch.isfinite(outcome.kld).all())


class Odd(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 0.1 * input_ids[:, -1:]


ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "both": {"top_p": 0.9, "top_k": 30},
    "min-p": {"min_p": 0.01},
    "epsilon": {"epsilon_cutoff": 1e-3},
    "renormalised": {"temperature": 0.8, "renormalize_logits": True},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "typical": {"typical_p": 0.9},
    "repetition penalty": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 3},
    "least length": {"min_new_tokens": 4, "eos_token_id": 2},
    "suppressed": {"suppress_tokens": [5, 7]},
    "a user's": {"logits_processor": LogitsProcessorList([Odd()])},
}


def call(draft: PreTrainedModel, policy: Any = None, config: Any = None, **options: Any) -> list[list[int]]:
    config = config or config_of(QUIET, runner="graph")
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 16, **options}
    policy = policy or ScriptedLengths(SCRIPT)
    return speculative(endless_model(), draft, ragged_batch(LENGTHS), policy, config, **options).sequences.tolist()


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("options", ALONE.values(), ids=ALONE)
def test_chains_are_taken_where_scores_alone_decide(options: dict[str, Any], seen: Seen) -> None:
    call(PAIRS["head"](endless_model()), **options)
    assert seen.by_step == 0
    assert sum(seen.chains) > 4


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("options", OTHERWISE.values(), ids=OTHERWISE)
def test_steps_are_taken_where_a_processor_is_of_another_kind(options: dict[str, Any], seen: Seen) -> None:
    call(PAIRS["head"](endless_model()), **options)
    assert seen.by_step > 2
    assert not seen.chains


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("policy", "chained"), [(Asks, False), (WatchesEntropy, False), (WatchesDivergence, True)])
def test_steps_are_taken_where_a_policy_wants_to_see_each_token(policy: Any, chained: bool, seen: Seen) -> None:
    call(PAIRS["head"](endless_model()), policy(SCRIPT))
    assert (seen.by_step == 0) == chained
    assert bool(seen.chains) == chained


def test_nothing_changes_where_nothing_is_recorded(seen: Seen) -> None:
    call(PAIRS["head"](endless_model()), config=QUIET)
    assert seen.by_step > 2
    assert not any(seen.chains)


@pytest.mark.slow
@pytest.mark.usefixtures("recording")
def test_a_step_that_draws_launches_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers and a copy of its probabilities, and a replay, which is not counted."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    target = endless_model()
    medians = []
    for kind, drafter in (("head", HeadDrafter), ("model", ModelDrafter)):
        draft = PAIRS[kind](target)
        with monkeypatch.context() as patch:
            rounds = count_launches(patch, drafter)
            for steps in (2, 6):
                rounds.clear()
                call(draft, ScriptedLengths([[steps] * 4]), max_new_tokens=40, temperature=0.7)
                medians.append(sorted(launches.total() for launches in rounds)[len(rounds) // 2])
        assert medians[-1] - medians[-2] <= 2 * 4


# Seeds.


@pytest.mark.parametrize("fused", [pytest.param(True, marks=pytest.mark.slow), False], ids=["fused", "recorded"])
@pytest.mark.parametrize("kind", ["head", "model", pytest.param("smaller vocabulary", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("recording")
def test_a_seed_gives_one_text_whatever_was_recorded_before(
    kind: str, fused: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call records, and the last one begins no chain early; rows leave on the way."""
    draft = PAIRS[kind](endless_model())
    config = config_of(QUIET, runner="graph", fused_layers=fused)
    options: dict[str, Any] = {"temperature": 1.2, "eos_token_id": [4, 11, 40], "max_new_tokens": 30, "config": config}
    texts: dict[int, list[Any]] = {seed: [] for seed in range(5, 10)}
    for turn in range(3):
        if turn == 2:
            assert sum(seen.begun) > 4 + len(seen.further), "some were as long as the last one, ..."
            assert min(seen.further) > 0, "... and some longer"
            monkeypatch.setattr(GraphRunner, "begin_chain", lambda self, chain: None)
        for seed, found in texts.items():
            torch.manual_seed(seed)
            found.append(call(draft, **options))
    for found in texts.values():
        assert found[1:] == found[:1] * 2
        ends = [row.index(0, 20) if 0 in row[20:] else len(row) for row in found[0]]
        assert len(set(ends)) > 1, "some rows end before others"
    assert call(draft, **options) != texts[5][0], "without the seed"


@pytest.mark.usefixtures("recording", "seen")
def test_recording_draws_nothing() -> None:
    """What a call draws after another one does not depend on what the other one had to record."""
    draft = PAIRS["head"](endless_model())
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        call(draft)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# Jobs.

ROWS = [{"input_ids": list(range(3, 5 + 2 * row))} for row in range(9)]
MODES: list[Callable[[], Any]] = [contextlib.nullcontext, torch.inference_mode]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("modes", [MODES[:1], MODES[1:], MODES], ids=["plain", "inference", "in turn"])
def test_jobs_draw_by_chains_whatever_mode_a_text_is_taken_in(modes: Sequence[Callable[[], Any]], seen: Seen) -> None:
    """Rows begin other texts on the way, with processors of their own."""
    target = endless_model()
    jobs = hf_dsde.BatchGenerator(
        target,
        tiny_tokenizer(),
        assistant_model=PAIRS["model"](target),
        speculation_policy=hf_dsde.StaticPolicy(3),
        batch_size=3,
        max_new_tokens=12,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        top_k=0,
    )
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        results: list[Any] = []
        stream = jobs.stream(ROWS)
        for turn in range(len(ROWS)):
            with modes[turn % len(modes)]():
                results.append(next(stream))
        texts.append({result.index: result.token_ids for result in results})
    assert texts[0] == texts[1]
    assert {len(text) for text in texts[0].values()} == {12}
    assert seen.by_step == 0
    assert any(seen.begun)
    assert sum(seen.chains) > 20


# Parts.


def test_numbers_depend_on_seed_round_and_place_alone() -> None:
    def numbers(made: DraftNumbers, turn: int, place: int) -> Tensor:
        found = torch.empty(3, 7)
        made.fill(turn, found, place)
        return found

    torch.manual_seed(1)
    first, second = DraftNumbers(torch.device("cpu")), DraftNumbers(torch.device("cpu"))
    torch.manual_seed(1)
    again = DraftNumbers(torch.device("cpu"))
    places = [(turn, place) for turn in range(3) for place in (0, 1, 63)]
    found = {(turn, place): numbers(first, turn, place) for turn, place in places}
    for turn, place in reversed(places):
        assert torch.equal(numbers(again, turn, place), found[turn, place])
        assert not torch.equal(numbers(second, turn, place), found[turn, place])
    assert len({tuple(each.flatten().tolist()) for each in found.values()}) == len(places)
    assert all(bool((each > 0).all()) for each in found.values())


def choice_of(*processors: LogitsProcessor, size: int = 30) -> DrawnTokens:
    process = scores_alone([list(processors)])
    assert process is not None
    return DrawnTokens(process, DraftVocabulary(size, size - 1, size))


PROCESSORS: list[LogitsProcessor] = [
    logits_process.EpsilonLogitsWarper(0.01),
    logits_process.LogitNormalization(),
    logits_process.MinPLogitsWarper(0.1),
    logits_process.MinPLogitsWarper(0.1, min_tokens_to_keep=3),
    logits_process.TemperatureLogitsWarper(0.7),
    logits_process.TopKLogitsWarper(5),
    logits_process.TopPLogitsWarper(0.8),
]


def test_each_class_that_is_recorded_is_looked_at_here() -> None:
    assert {type(processor) for processor in PROCESSORS} == RECORDABLE


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda each: type(each).__name__)
def test_a_choice_waits_for_nothing_and_draws_from_what_the_processor_gives(processor: LogitsProcessor) -> None:
    logits, numbers = 3 * torch.randn(4, 30), torch.empty(4, 30).exponential_()
    with NoWaiting():
        chosen = choice_of(processor)(None, logits, numbers)  # type: ignore[arg-type]
    expected = processor(torch.empty(4, 0, dtype=torch.long), logits).softmax(-1)
    assert chosen.probs is not None
    torch.testing.assert_close(chosen.probs, expected)
    assert torch.equal(chosen.tokens, (chosen.probs / numbers).argmax(-1))
    assert torch.equal(chosen.fed, chosen.tokens)


def test_choices_are_equal_where_they_do_the_same() -> None:
    warm, top = logits_process.TemperatureLogitsWarper, logits_process.TopKLogitsWarper
    choices: list[TokenChoice] = [
        choice_of(),
        choice_of(warm(0.7)),
        choice_of(warm(0.8)),
        choice_of(warm(0.7), top(5)),
        choice_of(top(5), warm(0.7)),
        choice_of(top(6), warm(0.7)),
        choice_of(size=31),
    ]
    assert len(set(choices)) == len(choices)
    assert choices[1] == choice_of(warm(0.7))


def test_rows_that_are_processed_otherwise_have_no_function_in_common() -> None:
    warm = logits_process.TemperatureLogitsWarper
    assert isinstance(scores_alone([[warm(0.7)], [warm(0.7)]]), ScoresAlone)
    assert scores_alone([[warm(0.7)], [warm(0.8)]]) is None
    assert scores_alone([[warm(0.7)], []]) is None

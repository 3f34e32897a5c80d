"""Calls of `generate` and jobs in which a head drafts: exact text, exact law, and refusals of heads that do not fit."""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson, toy_model
from scipy import stats
from tiny_calls import QUIET, compared, config_of, end_tokens, endless_model, plain, speculative
from tiny_heads import fitted_head, tiny_head
from tiny_models import EOS, VOCABULARY, WINDOW, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_text import tiny_tokenizer
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from waits import noted_looks

import hf_dsde
from hf_dsde.batch.admission import CacheBudget
from hf_dsde.batch.engine import BatchEngine
from hf_dsde.batch.preparation import Preparation
from hf_dsde.batch.refill_loop import FinishedText
from hf_dsde.batch.requests import Request
from hf_dsde.decoding import run_ahead
from hf_dsde.drafting import head as heads
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.heads.head import DraftHead
from hf_dsde.integration.generation import Speculation
from hf_dsde.policies import RoundOutcome, Signal
from hf_dsde.signals import DRAFT_PROBABILITY_FLOOR

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

TARGETS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "mixtral", "gpt_oss"]


@functools.cache
def pair(family: str = "llama", **options: Any) -> tuple[PreTrainedModel, DraftHead]:
    target = endless_model(family)
    return target, tiny_head(target, **options)


@functools.cache
def agreeing_pair() -> tuple[PreTrainedModel, DraftHead]:
    target = endless_model()
    return target, fitted_head(target)


@pytest.mark.parametrize(("family", "overlapping"), [(name, n % 2 == 0) for n, name in enumerate(TARGETS)])
def test_every_target(family: str, overlapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    target, head = pair(family, draft_vocabulary=70)
    compared(target, head, ragged_batch([1, 6, 11]), RandomLengths(5, stop_probability=0.1), max_new_tokens=20)


POLICIES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "dsde")) for name in hf_dsde.available_policies()]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str) -> None:
    target, head = agreeing_pair()
    output = compared(target, head, ragged_batch([1, 8, 3]), policy, max_new_tokens=30)
    assert output.speculation_statistics.accepted > 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
def test_every_batch_size(rows: int) -> None:
    target, head = pair()
    inputs = ragged_batch(random_lengths(rows, seed=rows), seed=rows)
    ends = end_tokens(target, inputs, (0, 7), (rows - 1, 11))
    policy = RandomLengths(5, seed=rows, stop_probability=0.2)
    compared(target, head, inputs, policy, max_new_tokens=16, eos_token_id=ends)


@pytest.mark.parametrize(("runner", "batches"), [("eager", range(1, 10)), ("graph", (1, 3, 9))])
def test_attention_sinks_windows_and_experts(
    runner: str, batches: Sequence[int], recording: list[NotingCapture]
) -> None:
    target, head = pair("gpt_oss", draft_vocabulary=70)
    config = config_of(QUIET, runner=runner)
    for rows in batches:
        inputs = ragged_batch(random_lengths(rows, longest=2 * WINDOW, seed=rows), seed=rows)
        output = compared(target, head, inputs, RandomLengths(3, seed=rows), config, max_new_tokens=6)
        assert output.speculation_statistics.drafted > 0
    assert any(capture.recorded for capture in recording) == (runner == "graph")


def test_what_is_accepted_is_what_was_guessed_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts of one token, every guess is worth a token or nothing."""
    target, head = agreeing_pair()
    inputs = ragged_batch([1, 8, 3, 2])
    right = []
    original = HeadDrafter.get_candidates

    def get_candidates(self: HeadDrafter, sequences: Any, *others: Any) -> Any:
        candidates = original(self, sequences, *others)
        columns = [sequences.prompt_width + count for count in sequences.generated_counts]
        drafted = zip(columns, candidates.lengths.tolist(), candidates.tokens[:, 0].tolist(), strict=True)
        right.extend(expected[row, column] == token for row, (column, n, token) in enumerate(drafted) if n)
        return candidates

    expected = plain(target, inputs, max_new_tokens=30)
    monkeypatch.setattr(HeadDrafter, "get_candidates", get_candidates)
    counts = compared(target, head, inputs, hf_dsde.StaticPolicy(1), max_new_tokens=30).speculation_statistics
    assert counts.accepted == sum(map(int, right)) > 10


@pytest.mark.parametrize("options", [{}, {"fused_layers": False}], ids=["fused", "recorded"])
def test_recorded_calls_follow_each_other(recording: list[NotingCapture], options: dict[str, Any]) -> None:
    target = hf_dsde.enable(tiny_model())
    head = tiny_head(target, draft_vocabulary=50)
    inputs = ragged_batch([1, 6, 11])
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            compared(target, head, inputs, RandomLengths(4), config_of(QUIET, **options), max_new_tokens=12)
    assert len(recording) == 2, "what the first call has recorded is used again"


def test_no_head_drafts_for_the_first_token_of_a_text() -> None:
    target, head = pair()
    output = compared(target, head, ragged_batch([1, 1, 1]), hf_dsde.StaticPolicy(3), max_new_tokens=9)
    assert [counts.drafted for counts in output.speculation_statistics.rounds][:2] == [0, 9]


def test_drafts_end_where_the_heads_context_does() -> None:
    target = endless_model()
    head = tiny_head(target, config={"max_position_embeddings": 16})
    output = compared(target, head, ragged_batch([1, 14, 30]), hf_dsde.StaticPolicy(4), max_new_tokens=40)
    assert output.speculation_statistics.drafted > 0
    assert output.speculation_statistics.rounds[-3].drafted == 0


def test_rows_leave_and_stop_strings_end_texts() -> None:
    target, head = pair()
    tokenizer = tiny_tokenizer()
    inputs = ragged_batch([5, 1, 8, 2, 3])
    text = tokenizer.batch_decode(plain(target, inputs, max_new_tokens=30)[:, -30:])
    stops = [text[0][12:15], text[2][30:33]]
    arguments = {"max_new_tokens": 30, "stop_strings": stops, "tokenizer": tokenizer}
    compared(target, head, inputs, RandomLengths(5), **arguments)


def test_plain_streaks_and_rows_that_sit_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "SMALLEST_RING", 8)
    target, head = agreeing_pair()
    script = [[2, 0, 0], *[[0, 0, 0]] * 30, [0, 3, 0], *[[0, 0, 3]] * 12] * 3
    config = config_of(QUIET, max_draft_length=3)
    compared(target, head, ragged_batch([1, 6, 3]), ScriptedLengths(script), config, max_new_tokens=120)


# Jobs.


def requests() -> list[Request]:
    numbers = random.Random(0)
    lengths = [1, 9, 2, 30, 1, 5, 17, 3, 40, 2, 8, 1]
    limits = [7, 1, 19, 3, 12, 24, 1, 9, 16, 2, 30, 11]
    prompts = [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    return [Request(index, prompt, limit) for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]


@pytest.mark.parametrize(("policy", "runner"), [("static", "eager"), ("dsde", "graph")])
@pytest.mark.usefixtures("recording")
def test_a_refilled_batch(policy: str, runner: str) -> None:
    target, head = pair(draft_vocabulary=70)
    preparation = Preparation(target, head, tiny_tokenizer(), True, {"do_sample": False})
    budget = CacheBudget((target, head), (None, None), granularity=1)
    speculation = Speculation.of(policy, config_of(QUIET, runner=runner))
    engine = BatchEngine(target, head, speculation, preparation, 3, budget)
    texts = {text.request.index: text.tokens for text in engine.texts(requests()) if isinstance(text, FinishedText)}
    for request in requests():
        alone = target.generate(torch.tensor([request.prompt]), max_new_tokens=request.max_new_tokens, do_sample=False)
        assert texts[request.index] == alone[0, len(request.prompt) :].tolist()


def test_a_generator_takes_a_head() -> None:
    target = tiny_model()
    head = tiny_head(target)
    generator = hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=head, batch_size=2, max_new_tokens=9)
    texts = ["abcdef", "a", "fedcba", "cc"]
    found = [result.token_ids for result in generator.stream(texts, ordered=True)]
    for text, tokens in zip(texts, found, strict=True):
        prompt = tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
        assert target.generate(prompt, max_new_tokens=9, do_sample=False)[0, prompt.shape[1] :].tolist() == tokens
    assert generator.memory_plan().devices[0].draft_bytes > 0
    assert (
        generator.fingerprint
        != hf_dsde.BatchGenerator(
            target, tiny_tokenizer(), assistant_model=tiny_head(target, seed=1), batch_size=2, max_new_tokens=9
        ).fingerprint
    )


# Sampling.


@pytest.mark.parametrize(
    ("draft_vocabulary", "options"),
    [
        (None, {"temperature": 0.7}),
        (3, {"temperature": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": [[[1, 3], 1.5], [[2], -0.5]]}),
        (3, {"top_k": 3, "repetition_penalty": 2.0, "suppress_tokens": [1]}),
    ],
    ids=["whole vocabulary", "history", "suppressed"],
)
def test_sampled_text_has_the_targets_law(draft_vocabulary: int | None, options: dict[str, Any]) -> None:
    target = toy_model(5)
    head = tiny_head(target, layers=(0, 1), draft_vocabulary=draft_vocabulary)
    options = {"do_sample": True, "max_new_tokens": 4, "top_k": 0, **options}
    torch.manual_seed(0)
    repeats, depth = 1024, 3
    output = target.generate(
        input_ids=PROMPTS.repeat(repeats, 1),
        attention_mask=PROMPT_MASK.repeat(repeats, 1),
        assistant_model=head,
        speculation_policy=RandomLengths(2, stop_probability=0.2),
        speculation_config=config_of(view_bucket=8, max_draft_length=2),
        return_dict_in_generate=True,
        **options,
    )
    assert 0.05 < output.speculation_statistics.acceptance_rate < 0.97
    digits = output.sequences[:, PROMPTS.shape[1] :][:, :depth]
    outcomes = (digits * 5 ** torch.arange(depth - 1, -1, -1)).sum(dim=1)
    statistic, freedom = 0.0, 0
    for prompt in range(2):
        law = exact_law(target, prompt, depth, options)
        observed = outcomes[prompt::2].bincount(minlength=5**depth).double()
        part, more = pearson(observed, law * observed.sum())
        statistic, freedom = statistic + part, freedom + more
    assert stats.chi2.sf(statistic, freedom) > 1e-4


class SeesDivergence(RandomLengths):
    """Keeps the divergences that it is told."""

    requires = frozenset({Signal.KLD, Signal.ENTROPY})

    def observe(self, outcome: RoundOutcome) -> None:
        assert outcome.kld is not None
        self.seen = [*getattr(self, "seen", []), *outcome.kld.flatten().tolist()]


def test_tokens_that_a_head_cannot_guess_leave_divergences_finite() -> None:
    target, head = pair(draft_vocabulary=4)
    policy = SeesDivergence(4)
    compared(target, head, ragged_batch([2, 7, 3]), policy, max_new_tokens=16)
    assert 5 < max(policy.seen) < -math.log(DRAFT_PROBABILITY_FLOOR)


def test_a_round_looks_at_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "SMALLEST_RING", 8)  # what it would lose is stored several times
    target, head = pair(draft_vocabulary=70)
    config = config_of(QUIET, max_draft_length=3)
    script = ScriptedLengths([[3, 2, 0], *[[0, 0, 0]] * 8])
    with noted_looks(monkeypatch) as looks:
        output = speculative(target, head, ragged_batch([1, 7, 3]), script, config, max_new_tokens=30)
    noted = dict(looks)
    assert noted.pop("utils/transfers.py::wait") == len(output.speculation_statistics.rounds)
    assert set(noted) <= {"decoding/sequences.py::__init__", "decoding/lengths.py::first"}, noted


# What does not fit, and what a call leaves.


def wrong_heads() -> dict[str, tuple[DraftHead, str]]:
    target = endless_model()
    return {
        "hidden size": (tiny_head(endless_model(hidden_size=48)), "size 48, and the target's have 32"),
        "layers": (tiny_head(target, layers=(0, 3)), "after layer 3, and the target has 2 layers"),
        "vocabulary": (tiny_head(endless_model(vocab_size=64)), "vocabulary of 64 tokens, and the target's has 96"),
    }


@pytest.mark.parametrize("what", ["hidden size", "layers", "vocabulary"])
def test_heads_of_other_targets_are_refused_by_name(what: str) -> None:
    head, words = wrong_heads()[what]
    with pytest.raises(ValueError, match=words):
        speculative(endless_model(), head, ragged_batch([3]), "static", max_new_tokens=4)
    with pytest.raises(ValueError, match=words):
        hf_dsde.BatchGenerator(endless_model(), tiny_tokenizer(), assistant_model=head)


def test_targets_without_hidden_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = hf_dsde.enable(tiny_model())
    forward = type(target).forward

    @functools.wraps(forward)
    def silent(self: Any, *arguments: Any, **options: Any) -> Any:
        return CausalLMOutputWithPast(logits=forward(self, *arguments, **options).logits)

    monkeypatch.setattr(type(target), "forward", silent)
    with pytest.raises(ValueError, match="gives no hidden states"):
        speculative(target, tiny_head(target), ragged_batch([3]), "static", max_new_tokens=4)


def held() -> tuple[int, int]:
    """Bytes of the tensors that there are, and how many objects the garbage collector knows."""
    gc.collect()
    # `isinstance` would ask each object for its class, and some of torch warn then. Subclasses may have no memory.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    del tensors
    return sum(sizes.values()), len(gc.get_objects())


@pytest.mark.parametrize("kind", ["generate", pytest.param("refilled", marks=pytest.mark.slow)])
def test_calls_leave_nothing(kind: str) -> None:
    """`benchmarks/head_memory.py` makes hundreds."""
    target, head = pair(draft_vocabulary=70)
    generator = hf_dsde.BatchGenerator(
        target, tiny_tokenizer(), assistant_model=head, speculation_policy="static", batch_size=2, max_new_tokens=3
    )

    def call() -> None:
        if kind == "generate":
            speculative(target, head, ragged_batch([3, 1]), "static", max_new_tokens=4, eos_token_id=EOS)
        else:
            assert len(list(generator.stream(["abc", "a", "fedcba"]))) == 3

    for _ in range(3):
        call()
    size, objects = held()
    for _ in range(10):
        call()
    size_after, objects_after = held()
    assert size_after == size
    assert objects_after - objects < 10, "an object of each call is still there"

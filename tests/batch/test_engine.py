"""Every text of a refilled batch is the one that `generate` gives for its prompt alone."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import config_of
from tiny_models import AGREEMENT, EOS, FAMILIES, VOCABULARY, noisy_copy, tiny_model
from tiny_text import tiny_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList, WatermarkingConfig

import hf_dsde
from hf_dsde import SpeculationConfig
from hf_dsde.batch.admission import CacheBudget, Refilling
from hf_dsde.batch.engine import BatchEngine
from hf_dsde.batch.preparation import Preparation
from hf_dsde.batch.refill_loop import FinishedText
from hf_dsde.batch.requests import RejectedRow, Request
from hf_dsde.batch.results import END_TOKEN, LENGTH, STOP
from hf_dsde.costs import BatchCosts
from hf_dsde.drafting import model as drafting_model
from hf_dsde.drafting.lookup.prompt_lookup import PromptLookupDrafter
from hf_dsde.integration import loop_builder
from hf_dsde.integration.generation import Speculation
from hf_dsde.utils import tuning

TOKENIZER = tiny_tokenizer()


def requests_of(lengths: Sequence[int], limits: Sequence[int], seed: int = 0) -> list[Request]:
    numbers = random.Random(seed)
    return [
        Request(index, [numbers.randrange(3, VOCABULARY) for _ in range(length)], limit)
        for index, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


MIXED = requests_of([1, 9, 2, 30, 1, 5, 17, 3, 70, 2, 8, 4, 1], [7, 1, 19, 3, 12, 24, 1, 9, 5, 16, 2, 30, 11])
"""Prompts and answers of very different lengths, more than twice as many as the tests have rows."""


class FavoursByLength(LogitsProcessor):
    """A processor of a user's own, which looks at what it is shown."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = (input_ids[:, -1] * 7 + input_ids.shape[1]) % scores.shape[1]
        return scores.scatter_add(1, token[:, None], torch.full((len(scores), 1), 3.0, dtype=scores.dtype))


class Pair:
    """A target and a draft; what the target gives without any draft is computed once."""

    def __init__(self, family: str, agreement: str) -> None:
        self.target = tiny_model(family)
        self.target.generation_config.pad_token_id = 0
        self.draft = noisy_copy(self.target, AGREEMENT[agreement])
        self._known: dict[str, list[int]] = {}

    @staticmethod
    @functools.cache
    def of(family: str = "llama", agreement: str = "half") -> Pair:
        return Pair(family, agreement)

    def alone(self, request: Request, **arguments: Any) -> list[int]:
        """What stock `generate` gives for a prompt alone."""
        key = f"{request} {arguments}"
        if key not in self._known:
            self._known[key] = self._generate(request, **arguments)
        return self._known[key]

    def _generate(self, request: Request, **arguments: Any) -> list[int]:
        ids = torch.tensor([request.prompt])
        if request.stop_strings:
            arguments |= {"stop_strings": list(request.stop_strings), "tokenizer": TOKENIZER}
        text = self.target.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            **{"do_sample": False, **arguments},
        )
        return text[0, ids.shape[1] :].tolist()

    def engine(
        self,
        policy: Any = "static",
        rows: int = 4,
        budget: int | None = None,
        refill: bool = True,
        config: SpeculationConfig | None = None,
        **arguments: Any,
    ) -> BatchEngine:
        preparation = Preparation(self.target, self.draft, TOKENIZER, True, {"do_sample": False, **arguments})
        limits = CacheBudget((self.target, self.draft), (budget, budget), granularity=1)
        return BatchEngine(
            self.target, self.draft, Speculation.of(policy, config), preparation, rows, limits, refill=refill
        )


def texts_of(engine: BatchEngine, requests: Sequence[Request | RejectedRow]) -> dict[int, FinishedText]:
    finished = list(engine.texts(requests))
    assert all(isinstance(text, FinishedText) for text in finished), finished
    by_index = {text.request.index: text for text in finished}
    assert len(by_index) == len(finished), "a text came twice"
    return by_index


def check(pair: Pair, engine: BatchEngine, requests: Sequence[Request], **arguments: Any) -> dict[int, FinishedText]:
    texts = texts_of(engine, requests)
    assert sorted(texts) == [request.index for request in requests]
    for request in requests:
        assert texts[request.index].tokens == pair.alone(request, **arguments), request
    return texts


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str) -> None:
    pair = Pair.of(family)
    check(pair, pair.engine("dsde", rows=3), MIXED)


POLICIES = [pytest.param(name, marks=[pytest.mark.slow] * (name != "dsde")) for name in hf_dsde.available_policies()]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str) -> None:
    pair = Pair.of()
    check(pair, pair.engine(policy), MIXED, eos_token_id=[EOS, 40])


@pytest.mark.parametrize(("rows", "agreement"), [(1, "half"), (2, "never"), (2, "full"), (16, "half")])
def test_any_number_of_rows(rows: int, agreement: str) -> None:
    pair = Pair.of(agreement=agreement)
    check(pair, pair.engine("static", rows=rows), MIXED)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_recorded_passes(recording: list[NotingCapture], family: str) -> None:
    pair = Pair.of(family)
    config = SpeculationConfig("static", runner="graph")
    texts = check(pair, pair.engine(config, rows=3), MIXED[:7])
    assert recording
    assert all(capture.recorded for capture in recording)
    again = texts_of(pair.engine(config, rows=3), MIXED[:7])
    assert {index: text.tokens for index, text in again.items()} == {i: text.tokens for i, text in texts.items()}


def test_recorded_passes_store_long_prompts_in_several(
    recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, stored_sizes=(4, 8)))
    pair = Pair.of()
    check(pair, pair.engine(SpeculationConfig("static", runner="graph"), rows=2), MIXED[:5])


def test_prompts_are_stored_in_chunks() -> None:
    pair = Pair.of()
    check(pair, pair.engine("static", rows=3, config=config_of(prefill_chunk=4, view_bucket=8)), MIXED)


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2, "temperature": 1.0},
        {"min_new_tokens": 6, "eos_token_id": [EOS, 40, 50, 60]},
        {"forced_eos_token_id": EOS, "bad_words_ids": [[20], [21, 22]]},
        {
            "encoder_repetition_penalty": 1.6,
            "sequence_bias": [[[7], -9.0], *([[token, 50], 4.0] for token in range(3, 96))],
            "suppress_tokens": [8, 9, 10],
            "begin_suppress_tokens": list(range(3, 80)),
        },
        {
            "encoder_no_repeat_ngram_size": 1,
            "exponential_decay_length_penalty": (2, 1.2),
            "forced_bos_token_id": 1,
            "eos_token_id": [EOS, 40, 50],
            "renormalize_logits": True,
        },
        {
            "prefix_allowed_tokens_fn": lambda row, text: [
                t for t in range(3, 96) if (t + int(text[-1]) + len(text)) % 3
            ]
        },
        {"watermarking_config": WatermarkingConfig(bias=3.0), "no_repeat_ngram_size": 1},
        {"logits_processor": LogitsProcessorList([FavoursByLength()]), "min_new_tokens": 4, "repetition_penalty": 1.2},
        {"do_sample": True, "top_k": 1, "top_p": 0.9, "temperature": 0.7, "repetition_penalty": 1.3},
    ],
)
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
def test_processors_that_know_the_text_see_each_row_alone(arguments: dict[str, Any]) -> None:
    pair = Pair.of()
    check(pair, pair.engine("dsde", **arguments), MIXED, **arguments)


def test_prompts_are_prepared_apart_only_where_that_makes_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = Preparation._ask

    def counted(self: Preparation, prompt: Any, max_new_tokens: int) -> Any:
        asked.append(max_new_tokens)
        return original(self, prompt, max_new_tokens)

    monkeypatch.setattr(Preparation, "_ask", counted)
    pair = Pair.of()
    for arguments, times in (
        ({"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}, 1),
        ({"logits_processor": LogitsProcessorList([FavoursByLength()])}, 1),
        ({"min_new_tokens": 1}, 1 + len(MIXED[:5])),
    ):
        asked.clear()
        check(pair, pair.engine("static", rows=2, **arguments), MIXED[:5], **arguments)
        assert len(asked) == times


def test_end_tokens_stop_strings_and_limits_end_rows_and_say_so() -> None:
    pair = Pair.of()
    plain = [pair.alone(request, eos_token_id=None) for request in MIXED]
    stops = {5: TOKENIZER.decode(plain[5][4:6]), 11: TOKENIZER.decode(plain[11][9:10])}
    requests = [replace(request, stop_strings=(stops[i],) if i in stops else ()) for i, request in enumerate(MIXED)]
    end = plain[2][3]
    texts = check(pair, pair.engine("static", eos_token_id=end), requests, eos_token_id=end)
    reasons = {index: text.finish_reason for index, text in texts.items()}
    assert reasons[2] == END_TOKEN
    assert STOP in {reasons[5], reasons[11]}
    assert reasons[1] == LENGTH
    for index, reason in reasons.items():
        tokens = texts[index].tokens
        if reason == LENGTH:
            assert len(tokens) == requests[index].max_new_tokens
        if reason == END_TOKEN:
            assert tokens[-1] == end


def test_criteria_of_the_users_are_shown_each_row_alone() -> None:
    pair = Pair.of()
    seen = []

    def sums_to_a_multiple_of_seven(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        seen.append(tuple(input_ids.shape))
        return input_ids.sum(-1) % 7 == 0

    criteria = StoppingCriteriaList([sums_to_a_multiple_of_seven])
    check(pair, pair.engine("static", stopping_criteria=criteria), MIXED, stopping_criteria=criteria)
    assert {rows for rows, _ in seen} == {1}


def test_without_refill_batches_follow_each_other() -> None:
    pair = Pair.of()
    engine = pair.engine("static", refill=False)
    check(pair, engine, MIXED)
    assert engine.statistics.batch_sizes == [4, 4, 4, 1]


@pytest.mark.parametrize("refill", [True, False])
def test_idle_rows_are_those_of_a_simulation(refill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts a row emits one token per round, so that rounds can be counted by hand."""
    monkeypatch.setattr(Refilling, "is_due", lambda self, free, ended: free > 0)
    pair = Pair.of()
    rows, limits = 3, [request.max_new_tokens for request in MIXED]
    engine = pair.engine(hf_dsde.StaticPolicy(0), rows=rows, refill=refill, eos_token_id=None)
    texts_of(engine, MIXED)
    left: list[int] = []
    waiting, rounds, busy = list(limits), 0, 0
    total_rows = 0
    while waiting or any(left):
        if refill or not any(left):
            left = [n for n in left if n]
            while waiting and len(left) < rows:
                left.append(waiting.pop(0))
        rounds += 1
        busy += sum(n > 0 for n in left)
        total_rows += rows if refill else len(left)
        left = [max(n - 1, 0) for n in left]
    assert engine.statistics.rounds == rounds
    assert engine.statistics.row_rounds == busy == sum(limits)
    assert engine.statistics.idle_row_rounds == total_rows - busy


class Waiting(PromptLookupDrafter):
    """Notes how many texts wait for the rows, in each round that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def allot(self, wanted: list[int], most: list[int], costs: BatchCosts | None) -> list[int]:
        self.noted.append(self.call.sequences.texts_left)
        return super().allot(wanted, most, costs)


@pytest.mark.parametrize(
    ("texts", "refill", "at_hand", "noted"),
    [
        (4, True, True, [2, 1, 0]),
        (9, True, True, [2, 1, 0]),  # no more than a batch are counted
        (5, False, True, [0]),  # nobody takes another's place
        (5, True, False, [math.inf, 0]),  # whoever asks would have to wait
    ],
)
def test_drafters_are_told_how_many_texts_wait(texts: int, refill: bool, at_hand: bool, noted: list[float]) -> None:
    """From the first round on, and not only once a row has ended."""
    pair = Pair.of()
    engine = pair.engine(rows=2, refill=refill)
    engine = replace(engine, draft=(drafter := Waiting()), at_hand=at_hand)
    check(pair, engine, requests_of([5] * texts, list(range(8, 8 + 2 * texts, 2))))
    assert list(dict.fromkeys(drafter.noted)) == noted


def test_statistics_add_up() -> None:
    pair = Pair.of()
    engine = pair.engine("static")
    texts = texts_of(engine, MIXED)
    job, rows = engine.statistics, [text.statistics for text in texts.values()]
    assert job.texts == len(MIXED)
    assert job.new_tokens == sum(len(text.tokens) for text in texts.values()) == sum(row.new_tokens for row in rows)
    assert job.prompt_tokens == sum(len(request.prompt) for request in MIXED)
    assert (job.drafted, job.accepted) == (sum(r.drafted for r in rows), sum(r.accepted for r in rows))
    assert sum(row.rounds for row in rows) == job.row_rounds
    # Each round of a row emits what was accepted and one token more, unless the text ends before that one.
    for row in rows:
        assert row.rounds - 1 <= row.new_tokens - row.accepted <= row.rounds


class Caches:
    """Watches the caches that an engine makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        make = loop_builder.create_runner

        def create_runner(*arguments: Any, **options: Any) -> Any:
            runner = make(*arguments, **options)
            self.made.append((runner.model, runner.rows, runner.cache))
            return runner

        for module in (loop_builder, drafting_model):
            monkeypatch.setattr(module, "create_runner", create_runner)

    def bytes(self) -> list[int]:
        """Bytes of each pair of caches, by their tensors."""
        sizes = [
            sum(t.numel() * t.element_size() for layer in cache.ragged_layers for t in (layer.keys, layer.values))
            for _, _, cache in self.made
        ]
        return [draft + target for draft, target in zip(sizes[::2], sizes[1::2], strict=True)]


def test_caches_stay_within_the_budget_and_long_rows_wait_for_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair.of()
    caches = Caches(monkeypatch)
    config = config_of(policy="static", view_bucket=1, max_draft_length=6)
    per_slot = CacheBudget((pair.target, pair.draft), (None, None)).slot_bytes(0)
    budget = per_slot * 4 * (30 + 30 + 6)
    engine = pair.engine(config, rows=4, budget=budget)
    check(pair, engine, MIXED)
    assert max(engine.statistics.batch_sizes) == 4
    assert engine.statistics.batch_sizes[-1] < 4, "the prompt of 70 tokens does not fit beside three others"
    assert max(caches.bytes()) <= budget


def test_a_row_that_fits_no_budget_is_an_error_and_its_neighbours_are_not() -> None:
    pair = Pair.of()
    config = config_of(policy="static", view_bucket=1, max_draft_length=6)
    per_slot = CacheBudget((pair.target, pair.draft), (None, None)).slot_bytes(0)
    engine = pair.engine(config, rows=2, budget=per_slot * 60)
    results = list(engine.texts(MIXED))
    rejected = [result for result in results if isinstance(result, RejectedRow)]
    assert [row.index for row in rejected] == [8]
    assert "70 tokens" in rejected[0].error
    texts = {text.request.index: text.tokens for text in results if isinstance(text, FinishedText)}
    assert texts == {r.index: pair.alone(r) for r in MIXED if r.index != 8}
    assert (engine.statistics.texts, engine.statistics.failed) == (len(MIXED) - 1, 1)


def test_rejected_rows_come_out_and_take_no_place() -> None:
    pair = Pair.of()
    rows: list[Request | RejectedRow] = [RejectedRow(20, "bad"), *MIXED[:6], RejectedRow(21, "bad"), *MIXED[6:]]
    results = list(pair.engine("static").texts(rows))
    assert {row.index for row in results if isinstance(row, RejectedRow)} == {20, 21}
    assert len(results) == len(rows)
    assert list(pair.engine("static").texts([RejectedRow(0, "bad")])) == [RejectedRow(0, "bad")]
    assert list(pair.engine("static").texts([])) == []


def test_requests_are_taken_as_rows_come_free_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refilling, "is_due", lambda self, free, ended: free > 0)
    pair = Pair.of()
    taken = []

    def source() -> Iterator[Request]:
        for request in MIXED:
            taken.append(request.index)
            yield request

    texts = pair.engine(hf_dsde.StaticPolicy(0), rows=4).texts(source())
    next(texts)
    assert len(taken) == 5, "one row of four has finished"
    texts.close()


def test_between_two_texts_the_models_are_as_they_were() -> None:
    pair = Pair.of()
    before = dict(vars(pair.target.config))
    texts = pair.engine("static").texts(MIXED)
    for _ in texts:
        assert vars(pair.target.config) == before
        assert torch.is_grad_enabled()
        pair.alone(MIXED[0])
    assert vars(pair.target.config) == before


def test_sampled_texts_follow_the_seed_and_end_where_they_should() -> None:
    pair = Pair.of()

    def sampled(seed: int) -> dict[int, list[int]]:
        torch.manual_seed(seed)
        engine = pair.engine("static", do_sample=True, temperature=1.0, top_k=0)
        return {index: text.tokens for index, text in texts_of(engine, MIXED).items()}

    first = sampled(1)
    assert first == sampled(1)
    assert first != sampled(2)
    for request in MIXED:
        tokens = first[request.index]
        assert len(tokens) == request.max_new_tokens or tokens[-1] == EOS


@pytest.mark.parametrize(
    "arguments",
    [{"num_beams": 2}, {"max_time": 3.0}, {"num_return_sequences": 2}, {"max_length": 9}, {"num_assistant_tokens": 3}],
)
def test_what_has_no_meaning_is_refused(arguments: dict[str, Any]) -> None:
    pair = Pair.of()
    with pytest.raises(ValueError, match=next(iter(arguments))):
        pair.engine("static", **arguments)

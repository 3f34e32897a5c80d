"""Calls and jobs in which a target drafts with its own first layers: exact text, exact law, and DEL's choices."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from recorded import NotingCapture
from sampled_law import PROMPT_MASK, PROMPTS, exact_law, pearson
from scipy import stats
from tiny_calls import QUIET, compared, config_of, end_tokens, plain, speculative
from tiny_exits import LAYERS, continued, cut_off, deep_model, logits_of, settled_model
from tiny_models import VOCABULARY, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from tiny_text import tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from waits import noted_looks

import hf_dsde
from hf_dsde import compat
from hf_dsde.batch.admission import CacheBudget
from hf_dsde.batch.engine import BatchEngine
from hf_dsde.batch.preparation import Preparation
from hf_dsde.batch.refill_loop import FinishedText
from hf_dsde.batch.requests import Request
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.loop import SpeculativeLoop
from hf_dsde.drafting import early_exit
from hf_dsde.drafting.early_exit import EarlyExitDrafter
from hf_dsde.drafting.exits import ExitStatistics
from hf_dsde.execution.kv_cache import RaggedCache
from hf_dsde.integration.drafters import job_draft
from hf_dsde.integration.generation import Speculation

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
RUNNERS: dict[str, dict[str, Any]] = {
    "eager": {"runner": "eager"},
    "recorded": {"runner": "graph", "fused_layers": False},
    "fused": {"runner": "graph"},
}


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round's first step begins before this one's end is known, as on a GPU."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)


@pytest.fixture
def any_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which exit drafts, how far, and when it stops is a matter of chance: it may change no text."""
    numbers = random.Random(0)
    monkeypatch.setattr(EarlyExitDrafter, "_best_exit", lambda self: numbers.randrange(len(self.exit_layers)))
    monkeypatch.setattr(ExitStatistics, "lengths", lambda _, __, most: [numbers.randint(0, n) for n in most])
    monkeypatch.setattr(ExitStatistics, "threshold", lambda *_: numbers.choice([0.0, 0.2, 0.5]))


# Exact text.


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mistral", "gpt_oss"])
@pytest.mark.usefixtures("any_exit", "overlapping")
def test_every_target(family: str) -> None:
    target = deep_model(family)
    drafter = EarlyExitDrafter(target, [1, 2, 3])
    output = compared(target, drafter, ragged_batch([1, 6, 11]), RandomLengths(5), max_new_tokens=12)
    assert output.speculation_statistics.drafted > 0


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
@pytest.mark.usefixtures("any_exit")
def test_every_batch_size(rows: int) -> None:
    target = settled_model()
    inputs = ragged_batch(random_lengths(rows, seed=rows), seed=rows)
    ends = end_tokens(target, inputs, (0, 7), (rows - 1, 11))
    drafter = EarlyExitDrafter(target, [1, 3], own_lengths=rows % 2 == 0)
    policy = RandomLengths(5, seed=rows, stop_probability=0.2)
    compared(target, drafter, inputs, policy, max_new_tokens=16, eos_token_id=ends)


@pytest.mark.parametrize("name", ["recorded", "fused"])
@pytest.mark.usefixtures("any_exit", "overlapping")
def test_recorded_passes(name: str, recording: list[NotingCapture]) -> None:
    """Two calls; the second finds what the first has recorded, and rows leave the passes."""
    target = hf_dsde.enable(noisy_copy(settled_model(), 0.0))
    inputs = ragged_batch([1, 6, 11, 4])
    ends = end_tokens(target, inputs, (0, 5), (2, 7))
    for policy in (RandomLengths(4), hf_dsde.StaticPolicy(3)):
        drafter = EarlyExitDrafter(target, [2, 3])
        config = config_of(QUIET, **RUNNERS[name])
        output = compared(target, drafter, inputs, policy, config, max_new_tokens=10, eos_token_id=ends)
        assert output.speculation_statistics.accepted > 0
    assert len(recording) == 1, "one cache, and one workspace that both calls use"


@pytest.mark.parametrize("policy", ["dsde", "svip", "marginal_goodput", "auto"])
def test_every_policy(policy: str) -> None:
    output = compared(settled_model(), "early_exit", ragged_batch([1, 8, 3]), policy, max_new_tokens=14)
    assert output.speculation_statistics.accepted > 0


@pytest.mark.usefixtures("any_exit")
def test_rows_leave_stop_strings_end_texts_and_rows_sit_out() -> None:
    target, tokenizer = settled_model(), tiny_tokenizer()
    inputs = ragged_batch([5, 1, 8, 2])
    text = tokenizer.batch_decode(plain(target, inputs, max_new_tokens=30)[:, -24:])
    arguments = {"max_new_tokens": 24, "stop_strings": [text[0][12:15], text[2][20:23]], "tokenizer": tokenizer}
    script = ScriptedLengths([[2, 0, 0, 0], *[[0, 0, 0, 0]] * 3, [0, 3, 0, 1]] * 9)
    compared(target, EarlyExitDrafter(target, [2, 3]), inputs, script, **arguments)


def text_slots(loop: SpeculativeLoop) -> Iterator[tuple[list[int], list[tuple[Tensor, Tensor]]]]:
    """The texts of all rows but their last tokens, and what the target's cache holds of them."""
    for row, length in enumerate(loop._sequences.length_counts):
        kept = [
            (layer.keys[row, :, : length - 1], layer.values[row, :, : length - 1])
            for layer in loop._target.cache.layers
        ]
        yield loop._sequences.host_text(row)[: length - 1], kept


@pytest.mark.usefixtures("any_exit", "overlapping")
def test_after_every_round_the_cache_is_what_plain_decoding_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    target, original = deep_model("gemma3"), SpeculativeLoop._round
    held: list[Any] = []

    def watched(loop: SpeculativeLoop, plan: Any) -> Any:
        following = original(loop, plan)
        held.extend((text, [(k.clone(), v.clone()) for k, v in kept]) for text, kept in text_slots(loop))
        return following

    monkeypatch.setattr(SpeculativeLoop, "_round", watched)
    drafter = EarlyExitDrafter(target, [1, 3])
    config = config_of(QUIET, drop_finished_rows=False)
    speculative(target, drafter, ragged_batch([2, 6, 4]), RandomLengths(4), config, max_new_tokens=12)
    assert len(held) > 12
    for text, layers in held:
        cache = DynamicCache()
        with torch.no_grad():
            target(input_ids=torch.tensor([text]), use_cache=True, **{compat.cache_argument(target): cache})
        for (keys, values), layer in zip(layers, cache.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys[0], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(values, layer.values[0], rtol=1e-9, atol=1e-9)


# What is drafted, and what is learnt of it.


def noted_proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int], list[int]]]:
    """Exit layer, text and draft of every row of every proposal."""
    seen: list[tuple[int, list[int], list[int]]] = []
    original = EarlyExitDrafter.get_candidates

    def get_candidates(self: EarlyExitDrafter, sequences: Any, *others: Any) -> Any:
        candidates = original(self, sequences, *others)
        for row, (count, tokens) in enumerate(zip(candidates.counts, candidates.tokens.tolist(), strict=True)):
            seen.append((self.exit_layer, sequences.host_text(row), tokens[:count]))
        return candidates

    monkeypatch.setattr(EarlyExitDrafter, "get_candidates", get_candidates)
    return seen


@pytest.mark.parametrize(("name", "overlaps"), [("eager", False), ("eager", True), ("recorded", True), ("fused", True)])
@pytest.mark.usefixtures("any_exit", "recording")
def test_a_draft_is_what_the_first_layers_would_write(
    name: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was begun before another exit was chosen goes on with the layers that it began with."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlaps)
    target, seen, widths, original = deep_model(), noted_proposals(monkeypatch), set(), EarlyExitDrafter._text_block
    monkeypatch.setattr(EarlyExitDrafter, "_text_block", lambda self, n: widths.add(n) or original(self, n))
    config = config_of(QUIET, **RUNNERS[name])
    compared(
        target, EarlyExitDrafter(target, [1, 2, 3]), ragged_batch([1, 6, 3]), RandomLengths(4), config, max_new_tokens=9
    )
    assert {exit_layer for exit_layer, _, _ in seen} == {1, 2, 3}
    assert widths == {1}, "there is never anything to catch up"
    for exit_layer, text, tokens in seen:
        assert tokens == continued(cut_off(target, exit_layer), text, len(tokens))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.usefixtures("any_exit")
def test_shadow_tokens_are_those_of_the_first_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a call has learnt is what models of so many layers say about its text."""
    learnt: list[tuple[np.ndarray, np.ndarray, Sequence[Sequence[int]]]] = []
    monkeypatch.setattr(early_exit, "QUIET_ROUNDS", 1)
    monkeypatch.setattr(ExitStatistics, "learn", lambda _, *round_: learnt.append(round_))
    monkeypatch.setattr(EarlyExitDrafter, "read_states", lambda *_: pytest.fail("states of prompts were kept"))
    target, exits, inputs = deep_model(family), (2, 3), ragged_batch([1, 6, 3])
    output = compared(target, EarlyExitDrafter(target, exits), inputs, RandomLengths(3), max_new_tokens=9)
    for row, (text, mask) in enumerate(zip(output.sequences, inputs["attention_mask"], strict=True)):
        begin, prompt = mask.shape[0] - int(mask.sum()), int(mask.sum())
        written = [token for _, _, texts in learnt for token in texts[row]]
        assert written == text[begin + prompt :].tolist()
        for place, exit_layer in enumerate(exits):
            expected = logits_of(cut_off(target, exit_layer), text[begin:].tolist())[prompt - 1 : -1].double()
            tokens = [int(t) for shadows, _, texts in learnt for t in shadows[place, row, : len(texts[row])]]
            sure = [float(c) for _, confidence, texts in learnt for c in confidence[place, row, : len(texts[row])]]
            assert tokens == expected.argmax(dim=1).tolist()
            assert sure == pytest.approx(expected.softmax(dim=1).max(dim=1).values.tolist(), rel=1e-3)


# DEL's choices.


def test_the_earliest_layer_that_knows_drafts_far() -> None:
    target = settled_model(after=2)
    drafter = EarlyExitDrafter(target, range(1, LAYERS))
    output = compared(target, drafter, ragged_batch([4, 9, 2]), hf_dsde.StaticPolicy(6), max_new_tokens=40)
    counts = output.speculation_statistics
    assert drafter.exit_layer == 2
    assert counts.acceptance_rate > 0.8
    assert max(each.drafted for each in counts.rounds) >= 9
    assert len(counts.rounds) < 18


def test_untrained_layers_soon_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, looks, original = deep_model(), [], ExitStatistics.learn
    monkeypatch.setattr(ExitStatistics, "learn", lambda *given: looks.append(original(*given)))
    output = compared(target, "early_exit", ragged_batch([4, 9, 2]), hf_dsde.StaticPolicy(6), max_new_tokens=40)
    rounds, looked_at = output.speculation_statistics.rounds, len(looks)
    assert rounds[0].drafted > 0
    assert sum(each.drafted for each in rounds[5:]) < 0.1 * 3 * len(rounds)
    assert looked_at < len(rounds) / 3, "of many rounds without drafts, few are looked at"
    by_policy = EarlyExitDrafter(target, own_lengths=False)
    always = compared(target, by_policy, ragged_batch([4, 9, 2]), hf_dsde.StaticPolicy(6), max_new_tokens=10)
    assert always.speculation_statistics.rounds[1].drafted == 18


def test_of_large_batches_some_rounds_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_exit, "POSITIONS_PER_ROUND", 4)
    looks, original = [], ExitStatistics.learn
    monkeypatch.setattr(ExitStatistics, "learn", lambda *given: looks.append(original(*given)))
    drafter = EarlyExitDrafter(settled_model(), [1, 2], own_lengths=False)
    output = speculative(settled_model(), drafter, ragged_batch([3, 1, 2]), hf_dsde.StaticPolicy(3), max_new_tokens=30)
    rounds = len(output.speculation_statistics.rounds)  # of 12 positions each, while they are long
    assert rounds > 6
    assert len(looks) in (-(-rounds // 3), -(-rounds // 3) + 1)


def test_unsure_tokens_end_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token below the threshold is the last one that is drafted, and it is verified."""
    target, seen = settled_model(rest=0.3), noted_proposals(monkeypatch)
    monkeypatch.setattr(ExitStatistics, "threshold", lambda *_: 0.1)
    monkeypatch.setattr(ExitStatistics, "lengths", lambda _, __, most: most)
    compared(target, EarlyExitDrafter(target, 2), ragged_batch([4, 9]), hf_dsde.StaticPolicy(5), max_new_tokens=20)
    lengths = set()
    for _, text, tokens in seen:
        sure = [
            float(logits_of(cut_off(target, 2), text + tokens[:n])[-1].softmax(dim=0).max()) for n in range(len(tokens))
        ]
        assert all(each >= 0.1 for each in sure[:-1])
        assert len(tokens) in (0, 5) or sure[-1] < 0.1 or len(text) + len(tokens) >= 23
        lengths.add(len(tokens))
    assert len(lengths) > 2


# Jobs and hybrids.


def requests() -> list[Request]:
    numbers = random.Random(0)
    lengths, limits = [1, 9, 2, 20, 1, 5, 3], [7, 1, 9, 3, 6, 12, 5]
    prompts = [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    return [Request(index, prompt, limit) for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]


@pytest.mark.parametrize(("runner", "hybrid"), [("eager", False), ("graph", False), ("eager", True)])
@pytest.mark.usefixtures("recording", "any_exit")
def test_a_refilled_batch(runner: str, hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, begun = settled_model(), []
    monkeypatch.setattr(ExitStatistics, "begin", lambda _, rows: begun.extend(rows))
    draft: Any = EarlyExitDrafter(target, [1, 2])
    if hybrid:
        draft = job_draft(["suffix", draft], target)
    preparation = Preparation(target, draft, tiny_tokenizer(), True, {"do_sample": False})
    budget = CacheBudget((target,), (None,), granularity=1)
    speculation = Speculation.of("static", config_of(QUIET, runner=runner))
    engine = BatchEngine(target, draft, speculation, preparation, 3, budget)
    texts = {text.request.index: text.tokens for text in engine.texts(requests()) if isinstance(text, FinishedText)}
    for request in requests():
        alone = target.generate(torch.tensor([request.prompt]), max_new_tokens=request.max_new_tokens, do_sample=False)
        assert texts[request.index] == alone[0, len(request.prompt) :].tolist()
    assert len(begun) == len(requests()) - 3, "what is known of a row is forgotten with its text"


def test_a_generator_takes_the_name_and_makes_no_second_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, original = [], RaggedCache.__init__
    monkeypatch.setattr(RaggedCache, "__init__", lambda self, *given: caches.append(original(self, *given)))
    target, settings = tiny_model(num_hidden_layers=4), {"batch_size": 2, "max_new_tokens": 7}
    generator = hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model="early_exit", **settings)
    texts = ["abcdef", "cc"]
    found = [result.token_ids for result in generator.stream(texts, ordered=True)]
    assert len(caches) == 1
    for text, tokens in zip(texts, found, strict=True):
        prompt = tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
        assert target.generate(prompt, max_new_tokens=7, do_sample=False)[0, prompt.shape[1] :].tolist() == tokens
    assert generator.memory_plan().devices[0].draft_bytes == 0
    other = EarlyExitDrafter(target, 1)
    others = hf_dsde.BatchGenerator(target, tiny_tokenizer(), assistant_model=other, **settings)
    assert generator.fingerprint != others.fingerprint


@pytest.mark.usefixtures("any_exit", "overlapping")
def test_texts_and_the_first_layers_draft_together() -> None:
    target = settled_model()
    inputs = ragged_batch([6, 12, 9])
    inputs["input_ids"][1, -6:] = inputs["input_ids"][1, -12:-6]
    compared(target, ["suffix", EarlyExitDrafter(target, [1, 2])], inputs, RandomLengths(4), max_new_tokens=24)


def test_beside_texts_the_first_layers_draft_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExitStatistics, "lengths", lambda _, __, most: [0] * len(most))
    target, seen = deep_model(), noted_proposals(monkeypatch)
    compared(target, ["suffix", "early_exit"], ragged_batch([6, 12]), hf_dsde.StaticPolicy(4), max_new_tokens=8)
    assert not seen


# Sampling.


@pytest.mark.parametrize("own_lengths", [True, False])
def test_sampled_text_has_the_targets_law(own_lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stops by confidence, which look at what a token was drawn from and never take it back."""
    monkeypatch.setattr(ExitStatistics, "threshold", lambda *_: 0.5)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    target = hf_dsde.enable(
        tiny_model(vocab_size=5, num_hidden_layers=3, initializer_range=0.5, **shape, **ends).float()
    )
    options = {"do_sample": True, "max_new_tokens": 4, "top_k": 0, "temperature": 0.8}
    torch.manual_seed(0)
    repeats, depth = 1024, 3
    output = target.generate(
        input_ids=PROMPTS.repeat(repeats, 1),
        attention_mask=PROMPT_MASK.repeat(repeats, 1),
        assistant_model=EarlyExitDrafter(target, [1, 2], own_lengths=own_lengths),
        speculation_policy=hf_dsde.StaticPolicy(2) if own_lengths else RandomLengths(2, stop_probability=0.2),
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
        part, more = pearson(outcomes[prompt::2].bincount(minlength=5**depth).double(), law * repeats)
        statistic, freedom = statistic + part, freedom + more
    assert stats.chi2.sf(statistic, freedom) > 1e-4


# What it costs, what does not fit, and what a call leaves.


def test_a_round_looks_at_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = settled_model()
    drafter = EarlyExitDrafter(target, [1, 2])
    with noted_looks(monkeypatch) as looks:
        output = speculative(target, drafter, ragged_batch([1, 7, 3]), "static", max_new_tokens=20)
    noted = dict(looks)
    rounds = len(output.speculation_statistics.rounds)
    assert noted.pop("utils/transfers.py::wait") == rounds
    assert set(noted) <= {"decoding/sequences.py::__init__", "decoding/lengths.py::first"}, noted


def test_a_drafter_that_is_kept_holds_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches, original = [], RaggedCache.__init__

    def init(self: RaggedCache, *arguments: Any) -> None:
        original(self, *arguments)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(RaggedCache, "__init__", init)
    target = deep_model()
    drafter = EarlyExitDrafter(target, [1, 2])
    speculative(target, drafter, ragged_batch([3]), "static", max_new_tokens=6)
    gc.collect()
    assert [cache() for cache in caches] == [None]


def other_target() -> PreTrainedModel:
    return hf_dsde.enable(noisy_copy(deep_model(), 0.1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EarlyExitDrafter(deep_model(), LAYERS), "can end after its layers 1 to 3"),
        (lambda: EarlyExitDrafter(deep_model(), 0), "exit_layers=0"),
        (lambda: EarlyExitDrafter(deep_model(), ()), r"exit_layers=\(\)"),
        (lambda: EarlyExitDrafter(deep_model(), 2, decay=1.5), "decay"),
        (lambda: EarlyExitDrafter(tiny_model("gpt2")), "another layout than Llama's"),
        (
            lambda: speculative(
                hf_dsde.enable(tiny_model("gpt2")), "early_exit", ragged_batch([3]), "static", max_new_tokens=2
            ),
            "layout",
        ),
        (
            lambda: speculative(
                other_target(), EarlyExitDrafter(deep_model()), ragged_batch([3]), "static", max_new_tokens=2
            ),
            "made for",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_exits_are_layers_and_have_defaults() -> None:
    with pytest.raises(TypeError, match=r"exit_layers=1\.5"):
        EarlyExitDrafter(deep_model(), 1.5)  # type: ignore[arg-type] # on purpose
    assert EarlyExitDrafter(deep_model()).exit_layers == (1, 2)
    assert EarlyExitDrafter(deep_model(), [3, 1, 3]).exit_layers == (1, 3)
    many = EarlyExitDrafter(tiny_model(num_hidden_layers=36, hidden_size=8))
    assert many.exit_layers == (2, 4, 6, 9, 11, 13, 15, 18)
    assert EarlyExitDrafter(deep_model(), 2, own_lengths=False).hidden_layers == (), "there is nothing to watch"

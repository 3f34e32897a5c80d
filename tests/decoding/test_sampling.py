"""Logits processors over ragged blocks: every one that `generate` builds, against a call per step of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_processors import plain_processors
from tiny_models import BOS, EOS, PAD, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.generation import logits_process

import hf_dsde
from hf_dsde.decoding.sampling import BlockProcessor, choose, processors_on
from hf_dsde.decoding.sequences import SequenceBatch

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

VOCABULARY = 96
TARGET = hf_dsde.enable(tiny_model("llama"))
DRAFT = noisy_copy(TARGET, 0.05)


class FavourByRow(LogitsProcessor):
    """Uses the row index, as a processor with one setting per prompt does."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(len(scores))
        raised = scores.clone()
        raised[rows, 3 + rows] += 2.0
        return raised


class FavourByLength(LogitsProcessor):
    """Uses the width of what it is shown, the last token and the count of real tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = (input_ids[:, -1] * 7 + (input_ids != PAD).sum(dim=1) + input_ids.shape[1]) % scores.shape[1]
        return scores.scatter_add(1, token[:, None], torch.full((len(scores), 1), 3.0))


class HalveInPlace(LogitsProcessor):
    """Writes into the scores it is given, as careless processors do."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, : scores.shape[1] // 2] *= 0.5
        return scores


class Refuses(LogitsProcessor):
    """Cannot be called at all."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise AssertionError("nobody reads what this would give")


def allowed_tokens(row: int, text: Tensor) -> list[int]:
    """A constraint by row and by last token."""
    return [token for token in range(3, VOCABULARY) if (token + row + int(text[-1])) % 3] + [EOS]


MANY_ENDS = list(range(2, 96, 2))
"""So many end-of-sequence tokens that rows end early, and at different steps."""

GREEDY_OPTIONS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "min length": {"min_length": 17, "eos_token_id": MANY_ENDS},
    "min new tokens": {"min_new_tokens": 5, "eos_token_id": MANY_ENDS},
    "bad words": {"bad_words_ids": [[5], [9, 11], [17, 4, 22], *([token, token + 1] for token in range(20, 90))]},
    "sequence bias": {"sequence_bias": [[[7], -10.0], *([[token, 50], 4.0] for token in range(3, 96))]},
    "suppressed tokens": {"suppress_tokens": list(range(10, 40))},
    "tokens suppressed at the start": {"begin_suppress_tokens": list(range(3, 90))},
    "forced end": {"forced_eos_token_id": EOS},
    "forced beginning": {"forced_bos_token_id": BOS},
    "exponential decay": {"exponential_decay_length_penalty": (4, 1.3)},
    "allowed tokens": {"prefix_allowed_tokens_fn": allowed_tokens},
    "encoder repetition penalty": {"encoder_repetition_penalty": 2.0},
    "no repeated n-grams of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)},
    "watermark by the last token": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "invalid values removed": {"remove_invalid_values": True},
    "renormalised": {"renormalize_logits": True},
    "by row": {"logits_processor": LogitsProcessorList([FavourByRow()])},
    "by length": {"logits_processor": LogitsProcessorList([FavourByLength()])},
    "in place": {"logits_processor": LogitsProcessorList([HalveInPlace()])},
    "a mixture": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [7, 8],
        "min_new_tokens": 3,
        "eos_token_id": [EOS, 5, 9, 14, 33, 51, 77],
        "logits_processor": LogitsProcessorList([FavourByLength(), FavourByRow()]),
        "renormalize_logits": True,
    },
}
SAMPLING_OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "top-h": {"top_h": 0.4},
    "typical": {"typical_p": 0.6},
    "epsilon cutoff": {"epsilon_cutoff": 0.01},
    "eta cutoff": {"eta_cutoff": 0.01},
    "a sampled mixture": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
}
every_option = pytest.mark.parametrize(
    "options",
    [*GREEDY_OPTIONS.values(), *({"do_sample": True, **options} for options in SAMPLING_OPTIONS.values())],
    ids=[*GREEDY_OPTIONS, *SAMPLING_OPTIONS],
)
ROWS, NEW_TOKENS, WIDTH = 5, 12, 4


class RaggedState:
    """Rows at different lengths with draft tokens after them, and the longer texts that they are the beginnings of."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = ragged_batch(random_lengths(ROWS, longest=6, seed=seed), seed=seed)
        after = torch.randint(3, VOCABULARY, (ROWS, NEW_TOKENS + WIDTH), generator=generator)
        self.full = torch.cat([self.inputs["input_ids"], after], dim=1)
        self.generated = torch.randint(0, NEW_TOKENS, (ROWS,), generator=generator).tolist()
        self.generated[seed % ROWS] = 0
        self.sequences = SequenceBatch(**self.inputs, max_new_tokens=NEW_TOKENS, scratch=WIDTH + 1, pad_token=PAD)
        self.sequences.append(after[:, :NEW_TOKENS], torch.tensor(self.generated))
        self.sequences.synchronise(self.generated, after[:, :NEW_TOKENS])
        self.sequences.write_drafts(
            torch.stack([row[count : count + WIDTH] for row, count in zip(after, self.generated, strict=True)])
        )
        self.counts = torch.randint(0, WIDTH + 1, (ROWS,), generator=generator).tolist()
        self.logits = 2 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=generator)
        self.filler = torch.randn(ROWS, VOCABULARY, generator=generator)

    def plain_step(self, processors: LogitsProcessorList, row: int, column: int) -> Tensor:
        """What a step of plain batched `generate` makes of a row's scores: all rows are at that length."""
        length = self.inputs["input_ids"].shape[1] + self.generated[row] + column
        scores = self.filler.clone()
        scores[row] = self.logits[row, column]
        return processors(self.full[:, :length], scores)[row]


def processors_of(state: RaggedState, options: dict[str, Any]) -> LogitsProcessorList:
    return plain_processors(TARGET, **state.inputs, max_new_tokens=NEW_TOKENS, **options)


@every_option
@pytest.mark.parametrize("seed", [0, 1])
def test_a_block_is_processed_as_single_steps_would_be(options: dict[str, Any], seed: int) -> None:
    state = RaggedState(seed)
    processors = processors_of(state, options)
    assert processors
    before = state.logits.clone()
    scores = BlockProcessor(processors)(state.logits, state.sequences, state.counts)
    assert torch.equal(state.logits, before)
    for row, count in enumerate(state.counts):
        for column in range(count):
            torch.testing.assert_close(scores[row, column], state.plain_step(processors, row, column))


@every_option
def test_a_later_column_can_be_processed_alone(options: dict[str, Any]) -> None:
    """As the drafter does, one token after the other."""
    state = RaggedState(3)
    processors = processors_of(state, options)
    for offset in range(WIDTH):
        counts = [int(offset < count) for count in state.counts]
        logits = state.logits[:, offset : offset + 1]
        scores = BlockProcessor(processors)(logits, state.sequences, counts, offset)
        for row in (row for row, count in enumerate(counts) if count):
            torch.testing.assert_close(scores[row, 0], state.plain_step(processors, row, offset))


@every_option
def test_processors_do_not_remember_their_last_call(options: dict[str, Any]) -> None:
    state = RaggedState(4)
    process = BlockProcessor(processors_of(state, options))
    everything = [WIDTH] * ROWS
    first = process(state.logits, state.sequences, everything)
    process(state.logits.flip(0), state.sequences, everything)
    assert torch.equal(process(state.logits, state.sequences, everything), first)


def test_rows_that_are_done_are_left_out() -> None:
    """A finished row has no column, and a processor that would choke on scores of nobody is not asked about them."""
    state = RaggedState(0)
    process = BlockProcessor([Refuses()])
    assert process.needs_counts
    assert torch.equal(process(state.logits, state.sequences, [0] * ROWS), state.logits)


def test_without_processors_scores_are_the_logits() -> None:
    state = RaggedState(0)
    process = BlockProcessor([])
    assert not process.needs_history
    assert process(state.logits, state.sequences, []) is state.logits


def test_subclasses_of_stateless_processors_are_shown_the_text() -> None:
    class ByLength(logits_process.TemperatureLogitsWarper):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores / input_ids.shape[1]

    processor = ByLength(0.5)
    assert not BlockProcessor([logits_process.TemperatureLogitsWarper(0.5)]).needs_history
    assert BlockProcessor([processor]).needs_history
    state = RaggedState(1)
    scores = BlockProcessor([processor])(state.logits, state.sequences, state.counts)
    for row, count in enumerate(state.counts):
        for column in range(count):
            expected = state.plain_step(LogitsProcessorList([processor]), row, column)
            torch.testing.assert_close(scores[row, column], expected)


def both(inputs: dict[str, Tensor], policy: hf_dsde.StoppingPolicy, **options: Any) -> Tensor:
    """Return the text of plain decoding, once it is that of a speculative call as well."""
    plain = TARGET.generate(**inputs, **options)
    speculative = TARGET.generate(**inputs, assistant_model=DRAFT, speculation_policy=policy, **options)
    assert torch.equal(speculative, plain)
    return plain


MAKES_NO_DIFFERENCE = {"invalid values removed", "renormalised", "forced beginning"}


@pytest.mark.parametrize("name", GREEDY_OPTIONS)
def test_greedy_text_is_that_of_plain_generate(name: str) -> None:
    options = GREEDY_OPTIONS[name]
    seed = len(name)
    inputs = ragged_batch(random_lengths(5, seed=seed), seed=seed)
    plain = both(inputs, RandomLengths(5, seed=seed, stop_probability=0.2), max_new_tokens=18, **options)
    if name not in MAKES_NO_DIFFERENCE:
        ends = {key: value for key, value in options.items() if key == "eos_token_id"}
        bare = TARGET.generate(**inputs, max_new_tokens=18, **ends)
        assert plain.shape != bare.shape or not torch.equal(plain, bare), "the option makes no difference here"


def test_a_forced_beginning_follows_prompts_of_one_token() -> None:
    inputs, options = ragged_batch([1, 1, 1]), {"max_new_tokens": 12, "forced_bos_token_id": BOS}
    assert both(inputs, RandomLengths(4), **options)[:, 1].tolist() == [BOS] * 3


@pytest.mark.parametrize(
    "options", ["repetition penalty", "allowed tokens", "by row", "no repeated n-grams of the prompt"]
)
def test_settings_per_row_follow_several_sequences_per_prompt(options: str) -> None:
    inputs = ragged_batch([3, 7], seed=0)
    arguments = {"max_new_tokens": 12, "num_return_sequences": 2, "do_sample": True, "top_k": 1}
    both(inputs, RandomLengths(5), **arguments, **GREEDY_OPTIONS[options])


def test_a_constraint_is_asked_about_texts_only_that_exist() -> None:
    """A trie of allowed answers knows no other prefix, and `generate` raises when nothing is allowed."""
    inputs = ragged_batch([2, 5, 3, 4], seed=0)
    width = inputs["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(0)
    answers = [torch.randint(3, VOCABULARY, (16,), generator=generator).tolist() for _ in range(6)]

    def allowed(row: int, text: Tensor) -> list[int]:
        begun = text[width:].tolist()
        return sorted({answer[len(begun)] for answer in answers if answer[: len(begun)] == begun})

    both(inputs, RandomLengths(4, seed=1), max_new_tokens=12, prefix_allowed_tokens_fn=allowed)


def test_processors_move_without_touching_the_originals() -> None:
    class Holder(LogitsProcessor):
        def __init__(self) -> None:
            self.bias = torch.ones(3)
            self.groups = [(torch.zeros(2), "a"), (torch.zeros(2), "b")]
            self.by_name = {"c": torch.zeros(2)}
            self.penalty = 2.0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + self.bias

    original = Holder()
    (moved,) = processors_on(LogitsProcessorList([original]), torch.device("meta"))
    assert isinstance(moved, Holder)
    assert moved.bias.device.type == "meta"
    assert [(tensor.device.type, name) for tensor, name in moved.groups] == [("meta", "a"), ("meta", "b")]
    assert moved.by_name["c"].device.type == "meta"
    assert moved.penalty == 2.0
    for tensor in (original.bias, original.groups[0][0], original.by_name["c"]):
        assert tensor.device.type == "cpu"


def test_greedy_choice_works_on_blocks() -> None:
    scores = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    tokens, probs = choose(scores, do_sample=False)
    assert torch.equal(tokens, scores.argmax(dim=-1))
    assert probs is None


def test_sampled_choice_reports_what_it_was_drawn_from() -> None:
    scores = torch.tensor([[0.0, float("-inf"), 1.0]]).expand(2000, -1)
    torch.manual_seed(0)
    tokens, probs = choose(scores, do_sample=True)
    assert probs is not None
    torch.testing.assert_close(probs, scores.softmax(dim=-1))
    assert set(tokens.tolist()) == {0, 2}
    assert float((tokens == 2).double().mean()) == pytest.approx(float(probs[0, 2]), abs=0.05)


def test_sampled_choice_draws_as_plain_generate_does() -> None:
    """With the same seed, one step of plain sampling takes the same tokens."""
    scores = torch.randn(64, 11, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(5)
    plain = torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]
    torch.manual_seed(5)
    tokens, _ = choose(scores, do_sample=True)
    assert torch.equal(tokens, plain)

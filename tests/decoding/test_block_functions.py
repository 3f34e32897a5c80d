"""Functions over whole blocks against transformers' own processors, called text by text, in float64.

A small vocabulary makes n-grams repeat and biased sequences match; rounded scores make ties.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorded import WAITS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

from hf_dsde.batch.row_processors import RowProcessors
from hf_dsde.decoding.processing.block_function import BlockFunction
from hf_dsde.decoding.sampling import BlockProcessor, StagedProcessor
from hf_dsde.decoding.sequences import SequenceBatch

VOCABULARY, PAD, ENDS = 11, 0, [2, 5]
ROWS, LIMIT, WIDTH = 6, 9, 4
INFINITE = float("inf")
IGNORES_BY_ROW = "Tensor" in str(inspect.signature(lp.RepetitionPenaltyLogitsProcessor).parameters)

Make = Callable[[Tensor, Tensor], LogitsProcessor]
"""Makes the processor of a call from its prompts, `[rows, width]`, and where they are real."""


def bias_of(*pairs: tuple[list[int], float]) -> list[Any]:
    return [[sequence, bias] for sequence, bias in pairs]


def padding_of(mask: Tensor) -> Tensor:
    return (mask != 0).int().argmax(dim=1)


BY_TEXT: dict[str, Make] = {
    "repetition penalty": lambda ids, mask: lp.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition penalty below 1": lambda ids, mask: lp.RepetitionPenaltyLogitsProcessor(0.7),
    "repetition penalty but for the beginning": lambda ids, mask: lp.RepetitionPenaltyLogitsProcessor(1.3, 2),
    "no repeated tokens": lambda ids, mask: lp.NoRepeatNGramLogitsProcessor(1),
    "no repeated pairs": lambda ids, mask: lp.NoRepeatNGramLogitsProcessor(2),
    "no repeated triples": lambda ids, mask: lp.NoRepeatNGramLogitsProcessor(3),
    "no long n-grams": lambda ids, mask: lp.NoRepeatNGramLogitsProcessor(12),
    "sequence bias": lambda ids, mask: lp.SequenceBiasLogitsProcessor(
        bias_of(
            ([1], -2.0), ([3], 0.5), ([4, 3], 1.0), ([6, 3], 1.0), ([3, 3], -0.5), ([7, 8, 9], 4.0), ([3, 4, 3], 3.0)
        )
    ),
    "biased tokens": lambda ids, mask: lp.SequenceBiasLogitsProcessor(bias_of(([4], -3.0), ([9], INFINITE))),
    "bad words": lambda ids, mask: lp.NoBadWordsLogitsProcessor(
        [[2], [6], [3, 4], [7, 4], *([t, 5] for t in range(3, 9))], ENDS
    ),
    "prompt penalty": lambda ids, mask: lp.EncoderRepetitionPenaltyLogitsProcessor(2.0, ids),
    "prompt reward": lambda ids, mask: lp.EncoderRepetitionPenaltyLogitsProcessor(0.5, ids),
    "no tokens of the prompt": lambda ids, mask: lp.EncoderNoRepeatNGramLogitsProcessor(1, ids),
    "no pairs of the prompt": lambda ids, mask: lp.EncoderNoRepeatNGramLogitsProcessor(2, ids),
    "no triples of the prompt": lambda ids, mask: lp.EncoderNoRepeatNGramLogitsProcessor(3, ids),
}
if IGNORES_BY_ROW:
    BY_TEXT["repetition penalty without padding"] = lambda ids, mask: lp.RepetitionPenaltyLogitsProcessor(
        1.3, padding_of(mask)
    )
BY_LENGTH: dict[str, Make] = {
    "min length": lambda ids, mask: lp.MinLengthLogitsProcessor(8, ENDS),
    "min new tokens": lambda ids, mask: lp.MinNewTokensLengthLogitsProcessor(ids.shape[1], 4, [*ENDS, 40]),
    "forced beginning": lambda ids, mask: lp.ForcedBOSTokenLogitsProcessor(1),
    "forced end": lambda ids, mask: lp.ForcedEOSTokenLogitsProcessor(ids.shape[1] + 6, ENDS),
    "exponential decay": lambda ids, mask: lp.ExponentialDecayLengthPenalty((2, 1.4), ENDS, ids.shape[1]),
    "suppressed at the start": lambda ids, mask: lp.SuppressTokensAtBeginLogitsProcessor([3, 4, 30], ids.shape[1]),
}
BY_SCORES: dict[str, Make] = {
    "temperature": lambda ids, mask: lp.TemperatureLogitsWarper(0.6),
    "top-k": lambda ids, mask: lp.TopKLogitsWarper(4),
    "all of top-k": lambda ids, mask: lp.TopKLogitsWarper(40),
    "top-p": lambda ids, mask: lp.TopPLogitsWarper(0.6),
    "top-h": lambda ids, mask: lp.TopHLogitsWarper(0.5),
    "min-p": lambda ids, mask: lp.MinPLogitsWarper(0.3),
    "min-p of several": lambda ids, mask: lp.MinPLogitsWarper(0.9, min_tokens_to_keep=3),
    "typical": lambda ids, mask: lp.TypicalLogitsWarper(0.5),
    "epsilon": lambda ids, mask: lp.EpsilonLogitsWarper(0.1),
    "eta": lambda ids, mask: lp.EtaLogitsWarper(0.2),
    "suppressed": lambda ids, mask: lp.SuppressTokensLogitsProcessor([4, 5, 99]),
    "no invalid values": lambda ids, mask: lp.InfNanRemoveLogitsProcessor(),
    "normalised": lambda ids, mask: lp.LogitNormalization(),
}
EVERYTHING = {**BY_TEXT, **BY_LENGTH, **BY_SCORES}
CHAINS: dict[str, list[str]] = {
    "the nucleus of the best": ["top-k", "top-p"],
    "the nucleus of more than there are": ["all of top-k", "top-p", "min-p"],
    "an order of generate": ["sequence bias", "repetition penalty", "no repeated triples", "min new tokens", "top-k"],
    "for sampling": ["repetition penalty", "min length", "temperature", "top-k", "top-p", "min-p", "normalised"],
    "without a prompt's n-grams": ["prompt penalty", "no pairs of the prompt", "forced end", "no invalid values"],
    "at both ends": ["suppressed at the start", "exponential decay", "forced end", "typical"],
}
every_chain = pytest.mark.parametrize(
    "names", [*([name] for name in EVERYTHING), *CHAINS.values()], ids=[*EVERYTHING, *CHAINS]
)
every_seed = pytest.mark.parametrize("seed", range(4))


class Texts:
    """Rows of different lengths with draft tokens after them, and what each column has in front of it."""

    def __init__(self, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=numbers)

        self.width = int(draw(1, 8, 1))
        self.prompt_lengths = draw(1, self.width + 1, ROWS)
        self.prompt_lengths[seed % ROWS] = self.width
        self.mask = (torch.arange(self.width) >= self.width - self.prompt_lengths[:, None]).long()
        self.ids = torch.where(self.mask.bool(), draw(1, VOCABULARY, ROWS, self.width), PAD)
        self.generated = draw(0, LIMIT + 1, ROWS)
        self.generated[0] = 0
        after = draw(1, VOCABULARY, ROWS, LIMIT + WIDTH)
        self.full = torch.cat([self.ids, after], dim=1)
        self.sequences = SequenceBatch(self.ids, self.mask, max_new_tokens=LIMIT, scratch=WIDTH + 1, pad_token=PAD)
        self.sequences.append(after[:, :LIMIT], self.generated)
        self.sequences.synchronise(self.generated.tolist(), after[:, :LIMIT])
        drafts = [row[count : count + WIDTH] for row, count in zip(after, self.generated.tolist(), strict=True)]
        self.sequences.write_drafts(torch.stack(drafts))
        scores = 3 * torch.randn(ROWS, WIDTH, VOCABULARY, generator=numbers, dtype=torch.float64)
        scores[1:3] = scores[1:3].round()  # ties
        excluded = torch.rand(scores.shape, generator=numbers) < 0.15
        excluded[:, :, 1] = False
        self.scores = scores.masked_fill(excluded, -INFINITE)
        self.filler = torch.randn(ROWS, VOCABULARY, generator=numbers, dtype=torch.float64)

    def length(self, row: int, column: int) -> int:
        return self.width + int(self.generated[row]) + column

    def row_alone(self, row: int) -> tuple[Tensor, Tensor]:
        """A row's prompt, without padding, and its mask."""
        prompt = self.ids[row : row + 1, self.width - int(self.prompt_lengths[row]) :]
        return prompt, torch.ones_like(prompt)

    def in_the_batch(self, chain: LogitsProcessorList, row: int, column: int) -> Tensor:
        """What a step of batched `generate` makes of a row's scores: all rows are at that length."""
        scores = self.filler.clone()
        scores[row] = self.scores[row, column]
        return chain(self.full[:, : self.length(row, column)], scores)[row]

    def alone(self, chain: LogitsProcessorList, row: int, column: int) -> Tensor:
        """What a step of `generate` for a row's prompt makes of its scores."""
        begin = self.width - int(self.prompt_lengths[row])
        text = self.full[row : row + 1, begin : self.length(row, column)]
        return chain(text, self.scores[row : row + 1, column])[0]


def chain_of(names: Sequence[str], ids: Tensor, mask: Tensor) -> LogitsProcessorList:
    return LogitsProcessorList(EVERYTHING[name](ids, mask) for name in names)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Among equal scores of which some are kept, others may be kept."""
    torch.testing.assert_close(got.sort().values, expected.sort().values, equal_nan=True)
    if not torch.isclose(got, expected, equal_nan=True).all():
        differ = ~torch.isclose(got, expected, equal_nan=True)
        kept = torch.maximum(got, expected)[differ]
        assert len(kept.unique()) < len(kept), "what differs is not a tie"


def stages_of(process: StagedProcessor) -> list[object]:
    return [stage for stage, _ in process._stages]


@every_chain
@every_seed
def test_a_block_of_a_batch(names: list[str], seed: int) -> None:
    texts = Texts(seed)
    chain = chain_of(names, texts.ids, texts.mask)
    process = BlockProcessor(chain)
    assert all(isinstance(stage, BlockFunction) for stage in stages_of(process))
    assert not process.needs_counts
    before = texts.scores.clone()
    scores = process(texts.scores, texts.sequences, [])
    assert torch.equal(texts.scores, before)
    for row in range(ROWS):
        for column in range(WIDTH):
            assert_same(scores[row, column], texts.in_the_batch(chain, row, column))
    for column in range(WIDTH):
        alone = process(texts.scores[:, column : column + 1], texts.sequences, [], offset=column)
        assert_same(alone[:, 0], scores[:, column])


@every_chain
@every_seed
def test_a_block_of_rows_that_are_texts_of_their_own(names: list[str], seed: int) -> None:
    texts = Texts(seed)
    chains = [chain_of(names, *texts.row_alone(row)) for row in range(ROWS)]
    process = RowProcessors(chains)
    assert not process.needs_counts
    scores = process(texts.scores, texts.sequences, [])
    for row in range(ROWS):
        for column in range(WIDTH):
            assert_same(scores[row, column], texts.alone(chains[row], row, column))


@every_chain
def test_rows_that_begin_another_text(names: list[str]) -> None:
    before, texts = Texts(2), Texts(3)
    process = RowProcessors([chain_of(names, *before.row_alone(row)) for row in range(ROWS)])
    process(before.scores, before.sequences, [])
    chains = [chain_of(names, *texts.row_alone(row)) for row in range(ROWS)]
    for row in range(ROWS):
        process.begin(row, chains[row])
    scores = process(texts.scores, texts.sequences, [])
    for row in range(ROWS):
        for column in range(WIDTH):
            assert_same(scores[row, column], texts.alone(chains[row], row, column))


@pytest.mark.parametrize("name", ["prompt penalty", "no pairs of the prompt"])
def test_several_rows_for_a_prompt(name: str) -> None:
    texts = Texts(1)
    chain = chain_of([name], texts.ids[::2], texts.mask[::2])
    scores = BlockProcessor(chain)(texts.scores, texts.sequences, [])
    for row in range(ROWS):
        for column in range(WIDTH):
            assert_same(scores[row, column], texts.in_the_batch(chain, row, column))


@pytest.mark.parametrize("alone", [False, True], ids=["batch", "rows alone"])
def test_tokens_that_follow_a_column_are_not_in_front_of_it(alone: bool) -> None:
    """A text of one token, and a draft that makes it the beginning of what is matched."""
    ids = torch.tensor([[7], [7]])
    sequences = SequenceBatch(ids, torch.ones_like(ids), max_new_tokens=4, scratch=4, pad_token=PAD)
    sequences.write_drafts(torch.tensor([[8, 9], [8, 8]]))
    scores = torch.zeros(2, 3, VOCABULARY)
    for processor in (
        lp.SequenceBiasLogitsProcessor(bias_of(([7, 8, 4], 2.0))),
        lp.EncoderNoRepeatNGramLogitsProcessor(3, torch.tensor([[7, 8, 4], [7, 8, 4]])),
    ):
        chain = LogitsProcessorList([processor])
        process = RowProcessors([chain]) if alone else BlockProcessor(chain)
        got = process(scores, sequences, [])
        assert torch.equal(got[:, 0], scores[:, 0])
        assert torch.equal(got[:, 1], chain(torch.tensor([[7, 8], [7, 8]]), scores[:, 1]))


def test_ids_without_a_score_are_no_reason_to_fail() -> None:
    """An embedding may have more rows than the head has scores."""
    texts = Texts(0)
    tokens = texts.sequences.tokens
    tokens[tokens == 4] = VOCABULARY + 3
    tokens[tokens == 6] = VOCABULARY + 5
    for processor in (lp.RepetitionPenaltyLogitsProcessor(1.3), lp.NoRepeatNGramLogitsProcessor(2)):
        scores = BlockProcessor([processor])(texts.scores, texts.sequences, [])
        seen = tokens[1, : texts.length(1, 0)][None]
        if IGNORES_BY_ROW:
            assert_same(scores[1, 0], processor(seen, texts.scores[1:2, 0])[0])


def test_values_that_are_no_numbers_are_removed() -> None:
    texts = Texts(0)
    texts.scores[0, 0, :3] = torch.tensor([float("nan"), INFINITE, -INFINITE])
    chain = chain_of(["no invalid values"], texts.ids, texts.mask)
    scores = BlockProcessor(chain)(texts.scores, texts.sequences, [])
    assert scores.isfinite().all()
    assert_same(scores[0, 0], texts.in_the_batch(chain, 0, 0))


class _Launches(TorchDispatchMode):
    """Counts operations that are more than another view, and refuses those that the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITS, f"the host would wait for {func}"
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            indices = [index for index in args[1] if index is not None]
            assert not any(index.dtype == torch.bool for index in indices), f"the host would wait for {func}"
        if not (func.is_view or func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten._unsafe_view)):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    with _Launches() as mode:
        yield mode.names


def test_a_wait_is_noticed() -> None:
    """Else the next test would show nothing."""
    scores = torch.randn(3, 4)
    for wait in (lambda: bool(scores.any()), lambda: scores[scores > 0], lambda: scores.sum().item(), scores.nonzero):
        with pytest.raises(AssertionError, match="would wait"), launches():
            wait()


MOST_LAUNCHES = 20
"""Of a processor, views and what is made for a call's first block left out."""
GROUPS_OF_BIASES = 2
"""The biased sequences here have prefixes of so many lengths, each of which is matched apart."""


@every_chain
@pytest.mark.parametrize("alone", [False, True], ids=["batch", "rows alone"])
def test_a_round_launches_little_and_waits_for_nothing(names: list[str], alone: bool) -> None:
    texts = Texts(0)
    if alone:
        process: StagedProcessor = RowProcessors([chain_of(names, *texts.row_alone(row)) for row in range(ROWS)])
    else:
        process = BlockProcessor(chain_of(names, texts.ids, texts.mask))
    process(texts.scores, texts.sequences, [])
    with launches() as names_of_operations:
        process(texts.scores, texts.sequences, [])
    assert len(names_of_operations) <= MOST_LAUNCHES * (
        len(names) + (GROUPS_OF_BIASES - 1) * ("sequence bias" in names)
    ), names_of_operations

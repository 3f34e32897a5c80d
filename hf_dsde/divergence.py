"""Says of two outputs that differ whether the target itself could not decide, or whether something is wrong.

Greedy text is exact only as far as the arithmetic is. In bfloat16 kernels of different shapes round
differently, and where the two best logits lie within that rounding, either token is the target's own choice.
A divergence anywhere else is a fault. What follows a row's first divergence is a different text and is not
compared.

Why the default tolerance is 2 ulps: each run rounds each logit to the model's dtype once, by up to half an
ulp, so two runs that agree before that rounding can order two tokens differently only if these lie within one
ulp, and the forward pass made here, which rounds once more, then shows them at most two apart. Divergences
measured in bfloat16 between batch sizes lay at 0 or 1 ulp, with a random model of 4 layers as with
SmolLM2-135M-Instruct (30 layers, CPU). Larger models, whose hidden states differ more from kernel to kernel,
may need a few ulps more, but every ulp excuses more faults: in greedy text of SmolLM2-135M-Instruct (8
prompts, 48 tokens each) the two best logits lie within 1 ulp at 7 % of the positions, within 2 at 13 %, 4 at
22 % and 8 at 34 %; the median gap is 14. A fault that strikes at random positions therefore looks like a
near-tie about once in eight rows: judge many rows, not one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from rich.console import RenderableType

DEFAULT_TOLERANCE_ULPS = 2.0

LogitsProcessing = Callable[[Tensor, Tensor], Tensor]
"""What `LogitsProcessorList` is: token ids `[1, length]` and logits `[1, vocabulary]` to scores of the same shape."""


class Verdict(Enum):
    """What became of a row."""

    EQUAL = "equal"
    """The generated tokens are the same."""
    NEAR_TIE = "near tie"
    """At the first difference both tokens are within the tolerance of the target's best logit."""
    DIFFERENT = "different"
    """At the first difference the target prefers one token, or another one, by more than rounding explains."""


@dataclass(frozen=True)
class RowComparison:
    """One row of `compare_outputs`. Everything after `verdict` is None for equal rows.

    Attributes:
        row: Index of the row.
        verdict: Equal, near tie or different.
        position: First generated position that differs, from 0 at the first generated token.
        expected_token: Token of the expected output there; None where its text had ended without an end
            token.
        actual_token: The same for the actual output.
        expected_rank: How many tokens the target scores higher than the expected one.
        actual_rank: The same for the actual one.
        gap: Distance from the target's best logit to the lower logit of the two tokens. With the two tokens
            on the first two places it is the top-2 gap. None when one of the texts had ended.
        ulp: One unit in the last place of the model's dtype at those logits.
    """

    row: int
    verdict: Verdict
    position: int | None = None
    expected_token: int | None = None
    actual_token: int | None = None
    expected_rank: int | None = None
    actual_rank: int | None = None
    gap: float | None = None
    ulp: float | None = None

    @property
    def gap_ulps(self) -> float | None:
        """The gap in units of the model's precision; None when there is no gap to measure."""
        return None if self.gap is None or self.ulp is None else self.gap / self.ulp

    def __str__(self) -> str:
        if self.verdict is Verdict.EQUAL:
            return f"row {self.row}: equal"
        tokens = f"expected {_token(self.expected_token)}, got {_token(self.actual_token)}"
        start = f"row {self.row}: {self.verdict.value} at generated position {self.position}, {tokens}"
        if self.gap_ulps is None:
            return f"{start}; one text had ended there without an end token"
        return (
            f"{start}; ranks {self.expected_rank} and {self.actual_rank}, gap {self.gap:.4g} = {self.gap_ulps:.3g} ulps"
        )


@dataclass(frozen=True)
class BatchComparison:
    """All rows of `compare_outputs`, with the precision they were judged by."""

    rows: tuple[RowComparison, ...]
    dtype: torch.dtype
    tolerance_ulps: float

    def count(self, verdict: Verdict) -> int:
        """How many rows got this verdict."""
        return sum(row.verdict is verdict for row in self.rows)

    @property
    def is_exact(self) -> bool:
        """Whether every row is equal."""
        return self.count(Verdict.EQUAL) == len(self.rows)

    @property
    def is_explained(self) -> bool:
        """Whether every row is equal or diverges at a near-tie: nothing is wrong with the decoding."""
        return self.count(Verdict.DIFFERENT) == 0

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(verdict)} {verdict.value}" for verdict in Verdict)
        precision = f"{str(self.dtype).removeprefix('torch.')}, tolerance {self.tolerance_ulps:g} ulps"
        diverged = [f"\n  {row}" for row in self.rows if row.verdict is not Verdict.EQUAL]
        return f"{len(self.rows)} rows: {counts} ({precision})" + "".join(diverged)

    def __rich__(self) -> RenderableType:
        return _table(self)


@torch.no_grad()  # weights of some quantisers cannot be read in inference mode
def compare_outputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    expected: Tensor,
    actual: Tensor,
    *,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    tolerance_ulps: float = DEFAULT_TOLERANCE_ULPS,
    logits_processor: LogitsProcessing | None = None,
) -> BatchComparison:
    """Compare two greedy outputs of the same prompts, and judge each row's first difference by the target's logits.

    The model is run once per differing row, on that row's prompt without padding and the generated tokens
    that both outputs share, in the model's own dtype.

    Args:
        model: The target, in evaluation mode.
        input_ids: The prompts as they were given to `generate`, shape `[rows, prompt]`, int64.
        attention_mask: 0 where `input_ids` is padding, shape `[rows, prompt]`; None when nothing is.
        expected: What `generate` returned without speculation, shape `[rows, prompt + any]`, int64.
        actual: What it returned with speculation, shape `[rows, prompt + any]`, int64; may have another
            length.
        eos_token_id: End tokens; None takes those of `model.generation_config`.
        pad_token_id: Padding of finished rows; None takes that of `model.generation_config`, else an end
            token, as `generate` does.
        tolerance_ulps: How far from the target's best logit, in ulps of the model's dtype, both tokens may
            lie to count as tied. See the module's docstring for the choice.
        logits_processor: What changed the logits before the greedy choice (a repetition penalty, say). It
            sees the left-padded prompt followed by the generated tokens, as in plain batched `generate`.

    Raises:
        ValueError: If shapes do not fit, an output does not begin with its prompt, or the model is training.
    """
    _check(model, input_ids, attention_mask, expected, actual, tolerance_ulps)
    ends = _end_tokens(model, eos_token_id)
    pad = _pad_token(model, pad_token_id, ends)
    prompt_width = input_ids.shape[1]
    width = max(expected.shape[1], actual.shape[1]) - prompt_width
    dtype = model.dtype
    rows = []
    for row in range(input_ids.shape[0]):
        wanted = _text(expected[row, prompt_width:].tolist(), width, ends, pad)
        got = _text(actual[row, prompt_width:].tolist(), width, ends, pad)
        position = next((i for i, pair in enumerate(zip(wanted, got, strict=True)) if pair[0] != pair[1]), None)
        if position is None:
            rows.append(RowComparison(row, Verdict.EQUAL))
            continue
        pair = wanted[position], got[position]
        if pair[0] is None or pair[1] is None:
            rows.append(RowComparison(row, Verdict.DIFFERENT, position, *pair))
            continue
        shared = expected[row, : prompt_width + position]
        mask = None if attention_mask is None else attention_mask[row]
        logits = _next_logits(model, shared, mask)
        dtype = _coarser(model.dtype, logits.dtype)
        scores = logits if logits_processor is None else _processed(logits_processor, shared, logits)
        rows.append(_judge(row, position, (pair[0], pair[1]), scores.double(), dtype, tolerance_ulps))
    return BatchComparison(tuple(rows), dtype, tolerance_ulps)


def ulp(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a floating `dtype` at `value`: the distance to the next number away from zero.

    >>> ulp(3.9, torch.bfloat16)
    0.015625
    """
    info = torch.finfo(dtype)
    magnitude = max(abs(value), info.tiny)
    return float(info.eps) * math.ldexp(1.0, math.frexp(magnitude)[1] - 1)


def _judge(
    row: int,
    position: int,
    pair: tuple[int, int],
    scores: Tensor,
    dtype: torch.dtype,
    tolerance_ulps: float,
) -> RowComparison:
    """Judge one divergence by the target's scores, shape `[vocabulary]`, float64."""
    best = float(scores.max())
    first, second = (float(scores[token]) for token in pair)
    # Rounding inside the model scales with all logits of the position, not with the best one alone: where
    # that one happens to lie near zero, its own ulp would be absurdly small.
    spread = float(scores[scores.isfinite()].square().mean().sqrt())
    unit = ulp(max(abs(best), spread), dtype)
    gap = best - min(first, second)
    verdict = Verdict.NEAR_TIE if gap <= tolerance_ulps * unit else Verdict.DIFFERENT
    ranks = int((scores > first).sum()), int((scores > second).sum())
    return RowComparison(row, verdict, position, *pair, *ranks, gap, unit)


def _next_logits(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Raw logits of the token after `tokens`, shape `[vocabulary]`, teacher-forced without any padding.

    Dropping the padding makes positions right for every kind of position embedding without passing any.
    """
    if mask is not None:
        generated = torch.ones(len(tokens) - len(mask), dtype=torch.bool, device=mask.device)
        tokens = tokens[torch.cat([mask.bool(), generated]).to(tokens.device)]
    inputs = tokens[None].to(model.device)
    outputs = model(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False)
    return outputs.logits[0, -1].to(tokens.device)


def _processed(processor: LogitsProcessing, tokens: Tensor, logits: Tensor) -> Tensor:
    scores = processor(tokens[None], logits.float()[None])
    return scores[0]


def _text(tokens: list[int], width: int, ends: frozenset[int], pad: int | None) -> list[int | None]:
    """Generated tokens up to and including the first end token, filled up with None to `width`."""
    if pad is not None:
        # A narrower output is what `generate` would have padded in a wider batch.
        tokens = tokens + [pad] * (width - len(tokens))
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    text = tokens[:length]
    while text and text[-1] == pad and pad not in ends:
        text.pop()
    return [*text, *[None] * (width - len(text))]


def _end_tokens(model: PreTrainedModel, given: int | Iterable[int] | None) -> frozenset[int]:
    if given is None and model.generation_config is not None:
        given = model.generation_config.eos_token_id
    if given is None:
        return frozenset()
    return frozenset([given] if isinstance(given, int) else (int(token) for token in given))


def _pad_token(model: PreTrainedModel, given: int | None, ends: frozenset[int]) -> int | None:
    if given is None and model.generation_config is not None:
        given = model.generation_config.pad_token_id
    return next(iter(ends), None) if given is None else int(given)


def _coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The dtype that rounds more: some models return float32 logits that were computed in bfloat16, or reverse."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


def _token(token: int | None) -> str:
    return "the end of the text" if token is None else f"token {token}"


def _check(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    expected: Tensor,
    actual: Tensor,
    tolerance_ulps: float,
) -> None:
    if model.training:
        raise ValueError("`model` is in training mode, where dropout changes its logits; call `model.eval()` first.")
    if not tolerance_ulps >= 0:
        raise ValueError(f"`tolerance_ulps` is {tolerance_ulps}; need a number of at least 0, usually 1 to 4.")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has shape {list(attention_mask.shape)}; need that of `input_ids`, "
            f"{list(input_ids.shape)}. Pass the mask of the prompts only."
        )
    rows, prompt_width = input_ids.shape
    for name, output in (("expected", expected), ("actual", actual)):
        if output.ndim != 2 or output.shape[0] != rows or output.shape[1] < prompt_width:
            raise ValueError(
                f"`{name}` has shape {list(output.shape)}; need [{rows}, at least {prompt_width}]: what `generate` "
                f"returns for these prompts, prompts included."
            )
        if not torch.equal(output[:, :prompt_width].to(input_ids.device), input_ids):
            raise ValueError(
                f"`{name}` does not begin with `input_ids`; pass what `generate` returned, prompts included, and the "
                f"very prompts it was given."
            )


def _table(comparison: BatchComparison) -> RenderableType:
    """A comparison for a rich console: the counts, and one line for each row that is not equal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from hf_dsde.measurement.views import UNKNOWN, number

    styles = {Verdict.EQUAL: "green", Verdict.NEAR_TIE: "yellow", Verdict.DIFFERENT: "bold red"}
    counts = ", ".join(f"{comparison.count(verdict)} {verdict.value}" for verdict in Verdict)
    dtype = str(comparison.dtype).removeprefix("torch.")
    headline = Text(f"{len(comparison.rows)} rows: {counts} ({dtype}, tolerance {comparison.tolerance_ulps:g} ulps)")
    diverged = [row for row in comparison.rows if row.verdict is not Verdict.EQUAL]
    if not diverged:
        return headline
    table = Table("row", "verdict", "position", "expected", "actual", "ranks", "gap", "ulps")
    for row in diverged:
        ranks = UNKNOWN if row.expected_rank is None else f"{row.expected_rank}, {row.actual_rank}"
        table.add_row(
            str(row.row),
            Text(row.verdict.value, style=styles[row.verdict]),
            str(row.position),
            "ended" if row.expected_token is None else str(row.expected_token),
            "ended" if row.actual_token is None else str(row.actual_token),
            ranks,
            number(row.gap, ".4g"),
            number(row.gap_ulps, ".3g"),
        )
    return Group(headline, table)

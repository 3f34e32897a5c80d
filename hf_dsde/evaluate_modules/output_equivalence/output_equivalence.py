"""The comparison `output_equivalence`: whether two decodings gave the same tokens, and if not, from where on.

Near-ties are judged as in `hf_dsde.divergence`, by margins that the caller has measured; this file runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from statistics import mean, median
from typing import Any

import datasets
import evaluate
import torch

from hf_dsde.divergence import DEFAULT_TOLERANCE_ULPS, Verdict, ulp
from hf_dsde.utils.checks import check_number

_DESCRIPTION = """
Whether two ways of decoding gave the same outputs: the share of equal sequences, the position at which the others part,
and, where margins are known, whether the target itself could not decide there.
"""

_INPUTS = """
Args:
    predictions1: Generated tokens of each sequence, prompt and padding left out: lists of token ids, or texts.
    predictions2: The same sequences, decoded the other way.
    gap_ulps: For each sequence, the distance from the target's best logit to the lower logit of the two tokens at the
        first difference, in ulps of the model's dtype, as `RowComparison.gap_ulps` of `compare_outputs` has it. None
        for equal sequences, and where one of the two had ended.
    top_logits: Instead of `gap_ulps`, for each sequence those two logits; None as above.

Args of `compute` only:
    dtype: With `top_logits`, the dtype that the model computes in, as "bfloat16" or `torch.bfloat16`.
    tolerance_ulps: How many ulps count as a near-tie; 2 as in `compare_outputs`.

Returns:
    exact_match: Share of sequences that are equal; nan without sequences.
    first_divergence: For each sequence the first position that differs, from 0; None for equal ones. Positions are
        tokens, or characters of texts.
    mean_first_divergence, median_first_divergence: Over the sequences that differ; nan if there are none.
    near_tie_share: Share of the differing sequences that part at a near-tie; nan if none differ. Only with margins.
    verdicts: For each sequence "equal", "near tie" or "different". Only with margins.
    rows, differing_rows: the counts that they come from.

Example:
    >>> import evaluate
    >>> from hf_dsde.evaluate_modules import module_path
    >>> equivalence = evaluate.load(module_path("output_equivalence"))
    >>> result = equivalence.compute(
    ...     predictions1=[[5, 6, 7], [5, 6, 7]], predictions2=[[5, 6, 7], [5, 9, 7]], gap_ulps=[None, 1.0]
    ... )
    >>> result["exact_match"], result["first_divergence"], result["near_tie_share"]
    (0.5, [None, 1], 1.0)
"""

_Tokens = list[int] | str


class OutputEquivalence(evaluate.Comparison):  # type: ignore[misc]  # `evaluate` is not annotated
    """Exact matches, first divergences and near-ties of two lists of outputs."""

    def _info(self) -> evaluate.ComparisonInfo:
        margins = {"gap_ulps": datasets.Value("float64"), "top_logits": datasets.List(datasets.Value("float64"))}
        kinds = (datasets.List(datasets.Value("int64")), datasets.Value("string"))
        return evaluate.ComparisonInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[datasets.Features({"predictions1": k, "predictions2": k} | margins) for k in kinds],
        )

    def add_batch(
        self,
        *,
        predictions1: Iterable[Any],
        predictions2: Iterable[Any],
        gap_ulps: Iterable[float | None] | None = None,
        top_logits: Iterable[Sequence[float] | None] | None = None,
    ) -> None:
        """Add some sequences.

        Raises:
            TypeError: If a sequence is neither a text nor token ids.
            ValueError: If the arguments differ in length, or mix texts and token ids; nothing is added.
        """
        first, second = _sequences("predictions1", predictions1), _sequences("predictions2", predictions2)
        batch = {
            "predictions1": first,
            "predictions2": second,
            "gap_ulps": _margins(gap_ulps, len(first)),
            "top_logits": [None if pair is None else _floats(pair) for pair in _margins(top_logits, len(first))],
        }
        wrong = {name: len(column) for name, column in batch.items() if len(column) != len(first)}
        if wrong:
            raise ValueError(
                f"`predictions1` has {len(first)} sequences, but there are {wrong}; need one entry per sequence."
            )
        self._check_kind([*first, *second])
        super().add_batch(**batch)

    def add(
        self,
        *,
        predictions1: Any,
        predictions2: Any,
        gap_ulps: float | None = None,
        top_logits: Sequence[float] | None = None,
    ) -> None:
        """Add one sequence; see `add_batch`."""
        self.add_batch(
            predictions1=[predictions1], predictions2=[predictions2], gap_ulps=[gap_ulps], top_logits=[top_logits]
        )

    def _check_kind(self, sequences: Sequence[_Tokens]) -> None:
        texts = sum(isinstance(sequence, str) for sequence in sequences)
        stored = self.selected_feature_format
        allowed = (0, len(sequences)) if stored is None else (len(sequences) if stored == self.features[1] else 0,)
        if texts not in allowed:
            raise ValueError(
                f"`predictions1` and `predictions2` have {texts} texts and {len(sequences) - texts} lists of token "
                f"ids; need one kind, that of the first batch. Decode all of them, or none."
            )

    def _infer_feature_from_batch(self, batch: dict[str, list[Any]]) -> datasets.Features:
        # Not by trial, as the base class does: an empty batch has no first sequence to try.
        sequences = batch["predictions1"]
        return self.features[1 if sequences and isinstance(sequences[0], str) else 0]

    def _compute(
        self,
        predictions1: Sequence[_Tokens],
        predictions2: Sequence[_Tokens],
        gap_ulps: Sequence[float | None],
        top_logits: Sequence[Sequence[float] | None],
        dtype: str | torch.dtype | None = None,
        tolerance_ulps: float = DEFAULT_TOLERANCE_ULPS,
    ) -> dict[str, Any]:
        positions = [_first_difference(*pair) for pair in zip(predictions1, predictions2, strict=True)]
        differing = [position for position in positions if position is not None]
        rows = len(positions)
        result: dict[str, Any] = {
            "exact_match": (rows - len(differing)) / rows if rows else math.nan,
            "first_divergence": positions,
            "mean_first_divergence": float(mean(differing)) if differing else math.nan,
            "median_first_divergence": float(median(differing)) if differing else math.nan,
            "rows": rows,
            "differing_rows": len(differing),
        }
        gaps = [_gap(row, *margin, dtype) for row, margin in enumerate(zip(gap_ulps, top_logits, strict=True))]
        if all(gap is None for gap in gaps):
            return result
        check_number("tolerance_ulps", tolerance_ulps, 0)
        lengths = [min(len(first), len(second)) for first, second in zip(predictions1, predictions2, strict=True)]
        verdicts = [
            _verdict(row, *known, tolerance_ulps)
            for row, known in enumerate(zip(positions, lengths, gaps, strict=True))
        ]
        near_ties = verdicts.count(Verdict.NEAR_TIE)
        return result | {
            "near_tie_share": near_ties / len(differing) if differing else math.nan,
            "verdicts": [verdict.value for verdict in verdicts],
        }


def _sequences(name: str, sequences: Iterable[Any]) -> list[_Tokens]:
    if isinstance(sequences, str):
        raise TypeError(f"`{name}` is one text; need a list of them, one per sequence.")
    return [_tokens(f"{name}[{row}]", sequence) for row, sequence in enumerate(sequences)]


def _tokens(name: str, sequence: Any) -> _Tokens:
    if isinstance(sequence, str):
        return sequence
    # Tensors and arrays have it; their elements would compare as tensors.
    tokens = list(sequence.tolist() if hasattr(sequence, "tolist") else sequence)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in tokens):
        raise TypeError(f"`{name}` is {sequence!r}; need a text or a list of token ids, which are integers.")
    return [int(token) for token in tokens]


def _margins(margins: Iterable[Any] | None, rows: int) -> list[Any]:
    return [None] * rows if margins is None else list(margins)


def _floats(pair: Sequence[float]) -> list[float]:
    if len(pair) != 2:
        raise ValueError(f"`top_logits` has {list(pair)} for a sequence; need two logits, or None.")
    return [float(logit) for logit in pair]


def _first_difference(first: _Tokens, second: _Tokens) -> int | None:
    if first == second:
        return None
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)


def _gap(
    row: int, gap_ulps: float | None, logits: Sequence[float] | None, dtype: str | torch.dtype | None
) -> float | None:
    """The margin of a row in ulps, however it was given; None where it was not."""
    if gap_ulps is not None and logits is not None:
        raise ValueError(f"`gap_ulps` and `top_logits` are both given for row {row}; pass one of them.")
    if logits is None:
        return None if gap_ulps is None else _margin(f"gap_ulps[{row}]", gap_ulps)
    # A token that was ruled out has a logit of minus infinity, and an infinite gap.
    best, lower = max(logits), min(logits)
    unit = ulp(check_number(f"the best of top_logits[{row}]", best, -math.inf), _floating(dtype))
    return _margin(f"the gap of top_logits[{row}]", best - lower) / unit


def _margin(name: str, value: float) -> float:
    return value if value == math.inf else check_number(name, value, 0)


def _floating(dtype: str | torch.dtype | None) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"`dtype` is {dtype!r}, but a floating dtype is needed with `top_logits`, as 'bfloat16': the one that the "
            f"model computes in, since a near-tie is measured in its ulps."
        )
    return found


def _verdict(row: int, position: int | None, shorter: int, gap: float | None, tolerance_ulps: float) -> Verdict:
    if position is None:
        return Verdict.EQUAL
    # One sequence ended where the other went on: no two tokens to weigh, as in `compare_outputs`.
    if position == shorter:
        return Verdict.DIFFERENT
    if gap is None:
        raise ValueError(
            f"Row {row} differs at position {position} and has no margin, while other rows have one; pass `gap_ulps` "
            f"or `top_logits` for every row that differs, or for none."
        )
    return Verdict.NEAR_TIE if gap <= tolerance_ulps else Verdict.DIFFERENT

"""What `generate` returns, in the shape of plain `generate`."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dsde.measurement.statistics import SpeculationStatistics


@dataclass
class SpeculativeGenerateOutput(GenerateDecoderOnlyOutput):
    """A `GenerateDecoderOnlyOutput` with one more field. The ragged cache is not returned.

    Attributes:
        sequences: Prompts and generated tokens, `[rows, width]`, int64.
        scores: Processed scores of each step, `[rows, vocabulary]`, float32 each; None unless asked for.
        logits: Unprocessed logits of each step, likewise.
        speculation_statistics: Counts of the call and the ratios derived from them.
    """

    speculation_statistics: SpeculationStatistics | None = None

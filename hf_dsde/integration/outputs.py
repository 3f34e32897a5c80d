"""What `generate` returns, in the shape of plain `generate`."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

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


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """A `GenerateEncoderDecoderOutput` with one more attribute. The ragged cache is not returned.

    Attributes:
        sequences: Decoder prompts and generated tokens, `[rows, width]`, int64.
        scores: Processed scores of each step, `[rows, vocabulary]`, float32 each; None unless asked for.
        logits: Unprocessed logits of each step, likewise.
    """

    @property
    def speculation_statistics(self) -> SpeculationStatistics | None:
        """Counts of the call and the ratios derived from them.

        This is no entry of the output: Whisper's `generate` divides all entries among rows, and makes an output of its
        own of what comes of that. There it is None, and `speculation_listeners` hear of the rounds.
        """
        statistics: SpeculationStatistics | None = vars(self).get("_statistics")
        return statistics

    def with_statistics(self, statistics: SpeculationStatistics) -> SpeculativeEncoderDecoderOutput:
        """Return the output itself, with statistics."""
        vars(self)["_statistics"] = statistics
        return self


SpeculativeOutput = SpeculativeGenerateOutput | SpeculativeEncoderDecoderOutput
"""What a speculative call returns where plain `generate` returns an output and not only tokens."""

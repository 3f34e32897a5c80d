"""When a sequence ends, decided per accepted token as plain `generate` would decide it.

End-of-sequence tokens and length limits are cut out of a block on the device. Stop strings look at each row by itself:
they are judged on the host, for all tokens of a round together (`stop_strings`). All other criteria, a user's own, are
functions of the batch at one step, so each step is put to them once every unfinished row has reached it: exactly the
calls plain `generate` makes, also for criteria that look across rows or answer with a single bool. Rows that ran ahead
in the meantime are cut back to where they should have ended, which costs nothing: the batch goes on for its slowest row
anyway. These criteria are shown the device's text, and waiting for their answers is the user's choice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stop_strings import without_stop_strings

StepScores = Callable[[int], "tuple[Tensor, ...] | None"]
"""Returns the scores of the first n steps as `generate` would have collected them, None when it collects none."""


class Stopping:
    """Knows which rows have ended, and where.

    Args:
        criteria: As `generate` prepared them.
        sequences: The batch they are about.

    Attributes:
        ends: Generated tokens of each row when it ended, None while it has not.
        frontier: Steps that have been decided for every row; text up to there is final.
        eos_tokens: All end-of-sequence tokens, `[n]`, int64; empty when there are none.
    """

    def __init__(self, criteria: StoppingCriteriaList, sequences: SequenceBatch) -> None:
        self._sequences = sequences
        eos = [c.eos_token_id.to(sequences.device) for c in criteria if type(c) is EosTokenCriteria]
        self.eos_tokens: Tensor = torch.cat(eos) if eos else torch.empty(0, device=sequences.device).long()
        self._numbers = torch.arange(1, sequences.tokens.shape[1] + 1, device=sequences.device)
        self._time_limits = [c for c in criteria if type(c) is MaxTimeCriteria]
        others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)]
        strings, self._stepwise = without_stop_strings(others)
        self._strings = [strings] * sequences.rows
        self._judged = [0] * sequences.rows
        self._ends_early = bool(strings or self._time_limits)
        # Plain `generate` pads ended rows only when it knows an end-of-sequence token, and lets them go on otherwise.
        self.pads_ended_rows = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.ends: list[int | None] = [None] * sequences.rows
        self.frontier = 0

    def cut(self, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Cut a block of new tokens at the first end-of-sequence token and at the length limit.

        Args:
            tokens: `[rows, width]`, int64.
            counts: Tokens of each row, `[rows]`, int64, 0 for rows that have finished.

        Returns:
            Tokens that each row keeps, `[rows]`, int64, and which rows that ends, `[rows]`, bool. Rows without tokens
            do not end.
        """
        most = self._sequences.remaining
        if len(self.eos_tokens):
            width = tokens.shape[1]
            is_eos = (tokens[:, :, None] == self.eos_tokens).any(dim=2)
            first = torch.where(is_eos, self._numbers[:width], width + 1).amin(dim=1)
            most = torch.minimum(most, first)
        kept = torch.minimum(counts, most)
        return kept, (counts > 0) & (kept == most)

    def advance(self, ended: list[bool], scores: StepScores) -> None:
        """Take note of a round, after its tokens were appended and the host's copy of the lengths was renewed.

        Args:
            ended: Rows that `cut` ended in this round.
            scores: Access to the scores that criteria may ask for.
        """
        generated = self._sequences.generated_counts
        stops = self._stop_string_ends()
        for row, ends_here in enumerate(ended):
            if self.ends[row] is None:
                self.ends[row] = stops.get(row, generated[row] if ends_here else None)
        if any(bool(limit(self._sequences.host_tokens, None).any()) for limit in self._time_limits):
            self._end_now()
        # Ending a row can make further steps decidable: those that the others had reached already.
        step = self.frontier
        while self._stepwise and step < self._reached() and not self._is_over(step):
            step += 1
            self._decide(step, scores(step))
        self.frontier = self._reached()

    def finished(self) -> list[bool]:
        """Say which rows need no further token.

        An ended row goes on when plain `generate` would let it: without an end-of-sequence token it gets real tokens
        up to the batch's longest row.
        """
        if self.pads_ended_rows:
            return [end is not None for end in self.ends]
        width = self.width()
        enough = self._sequences.max_new_tokens if width is None else width
        return [count >= enough for count in self._sequences.generated_counts]

    def width(self) -> int | None:
        """Return the number of steps of the whole batch, None while a row has not ended."""
        ends = [end for end in self.ends if end is not None]
        return max(ends) if len(ends) == len(self.ends) else None

    def final_length(self, row: int) -> int | None:
        """Return how many generated tokens of a row the output shows, None while that is open.

        Where ended rows are not padded, all rows are as long as the longest: it stays open until all have ended.
        """
        return self.ends[row] if self.pads_ended_rows else self.width()

    def final_lengths(self) -> list[int]:
        """Return how many generated tokens of each row the output shows. Call it when all rows have finished."""
        lengths = self.ends if self.pads_ended_rows else [self.width()] * len(self.ends)
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            msg = "final lengths were asked for while a row is still being generated"
            raise RuntimeError(msg)
        return known

    def confirmed(self, row: int) -> int:
        """Return how many generated tokens of a row are certain to be in the output."""
        count = self._sequences.generated_counts[row]
        # Where ended rows are not padded, the last row that stops cuts all others, and so does time that runs out.
        may_be_cut = self._stepwise or (self._ends_early and not self.pads_ended_rows)
        certain = min(count, self.frontier) if may_be_cut else count
        limit = self.final_length(row)
        return certain if limit is None else min(certain, limit)

    def _stop_string_ends(self) -> dict[int, int]:
        """Return the step at which a stop string ends each row that had not ended, if one does by now."""
        sequences, begin = self._sequences, self._sequences.prompt_width
        tokens = sequences.host_tokens.numpy()
        ends: dict[int, int] = {}
        for row, strings in enumerate(self._strings):
            new, self._judged[row] = self._judged[row], sequences.generated_counts[row]
            if strings and self.ends[row] is None:
                start = max(begin + new - max(one.reach for one in strings), self._shown_from(row))
                text = tokens[row, start : begin + self._judged[row]].tolist()
                found = [one.first_end(text, begin + new - start) for one in strings]
                step = min((place for place in found if place is not None), default=None)
                if step is not None:
                    ends[row] = start + step - begin + 1
        return ends

    def _shown_from(self, row: int) -> int:  # noqa: ARG002 - a batch is shown as a whole
        """Return the first column of a row that criteria are shown: padding in front is part of the batch."""
        return 0

    def _reached(self) -> int:
        """Return the last step that can be decided: the shortest unfinished row, or the end when none is left."""
        generated = self._sequences.generated_counts
        if self.pads_ended_rows:
            running = [count for count, end in zip(generated, self.ends, strict=True) if end is None]
            return min(running) if running else max(end for end in self.ends if end is not None)
        return min(generated)

    def _is_over(self, step: int) -> bool:
        """Say whether every row has ended at `step` or before, so that plain `generate` would make no further one."""
        width = self.width()
        return width is not None and width <= step

    def _end_now(self) -> None:
        """End every row where it stands, as time is up; at a common step when ended rows are not padded."""
        generated = self._sequences.generated_counts
        counts = generated if self.pads_ended_rows else [min(generated)] * len(generated)
        self.ends = [count if end is None else min(end, count) for end, count in zip(self.ends, counts, strict=True)]

    def _decide(self, step: int, scores: tuple[Tensor, ...] | None) -> None:
        """Put one step of the whole batch to the stepwise criteria."""
        shown = [min(end, step) if self.pads_ended_rows and end is not None else step for end in self.ends]
        done = self._stepwise(self._sequences.text(shown, step), scores).tolist()
        for row, stops in enumerate(done):
            end = self.ends[row]
            if stops and (end is None or end > step):
                self.ends[row] = step


def length_limit(criteria: StoppingCriteriaList, max_length: int) -> int:
    """Return the total length, prompt included, at which every row ends at the latest."""
    limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    # A limit of the user's replaces the default one, so a default that is not among the criteria limits nothing.
    return min(limits, default=max_length)

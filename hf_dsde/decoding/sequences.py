"""The sequences of a batch: their tokens, how long each is, and where a token lives.

One buffer holds every row in the layout that plain batched `generate` would show: the left-padded prompt, then the
generated tokens. A token's *position* counts from the row's first real token, its *column* from the buffer's left edge:
`column = padding + position`. Draft tokens are written after the known text, so that a prefix that includes them is a
slice; what is rejected stays there, unreachable, until it is overwritten.

A row's text may be exchanged for another (`replace_rows`): its prompt then ends where all prompts end.

The host has a copy of the text in the same layout (`host_tokens`), which grows by what each round brings to the host
anyway. Whoever looks at tokens on the host looks there, and nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hf_dsde.execution.prompt_inputs import PromptInputs
from hf_dsde.execution.spans import Span, flat_places
from hf_dsde.utils.transfers import upload


class Texts(Protocol):
    """The rows' texts as a draft reads them: those of the batch, or the same in other tokens."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row, `[rows]`, int64."""

    @property
    def length_counts(self) -> list[int]:
        """The same on the host."""

    def tail(self, width: int) -> tuple[Tensor, Tensor]:
        """Return each row's last tokens and their positions, as `SequenceBatch.tail` does."""

    def tokens_at(self, spans: Sequence[Span]) -> Tensor:
        """Return the tokens of some spans, as `SequenceBatch.tokens_at` does."""


class SequenceBatch:
    """Tokens and lengths of a batch of left-padded sequences.

    Args:
        input_ids: Prompts, `[rows, prompt_width]`, int64.
        attention_mask: 0 on the padding in front, 1 on tokens, `[rows, prompt_width]`.
        max_new_tokens: The most tokens any row may emit.
        scratch: Room for draft tokens after the last possible token.
        pad_token: Token that fills rows that ended early; None stands for 0.
        inputs: The prompts with what they bring along beside their tokens; None where that is nothing.

    Attributes:
        generated: Tokens that each row emitted so far, `[rows]`, int64, on the device.
        lengths: Tokens of each row, prompt included and padding not, likewise.
        generated_counts: The same on the host, as of the last `synchronise`.
        host_tokens: The text on the host, `[rows, columns]`, int64, in the columns of the device's. Known up to
            `prompt_width + generated_counts[row]`; anything after that.
        texts_left: Texts that wait for the places of those that end, as of the last time that some took them, up to as
            many as there are rows; infinity where one would have to wait to know.
        limits: Tokens that each row may emit, `[rows]`, int64; `max_new_tokens` unless `replace_rows` said otherwise.

    Raises:
        ValueError: If a prompt is empty or its padding is not all in front.
    """

    texts_left: float = 0

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        max_new_tokens: int,
        scratch: int,
        pad_token: int | None,
        inputs: PromptInputs | None = None,
    ) -> None:
        # Both at once: the host waits for the device once.
        mask = attention_mask.to(device=input_ids.device, dtype=torch.bool)
        prompts, mask = torch.stack([input_ids, mask.to(input_ids.dtype)]).cpu()
        mask = mask.bool()
        _check_padding(mask)
        self.rows, self.prompt_width = input_ids.shape
        self.max_new_tokens = max_new_tokens
        self._scratch = scratch
        self.inputs = inputs
        self.device = input_ids.device
        self.pad_token = 0 if pad_token is None else pad_token
        self.prompt_lengths: list[int] = mask.sum(dim=1).tolist()
        self._prompts = upload(self.prompt_lengths, self.device)
        self.padding = self.prompt_width - self._prompts
        self.generated = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.lengths = self._prompts
        self.generated_counts = [0] * self.rows
        self.limits = torch.full_like(self.generated, max_new_tokens)
        self.tokens = input_ids.new_full((self.rows, self.prompt_width + max_new_tokens + scratch), self.pad_token)
        self.tokens[:, : self.prompt_width] = input_ids
        self._columns = torch.arange(self.tokens.shape[1], device=self.device)
        self.host_tokens = prompts.new_full(self.tokens.shape, self.pad_token)
        self.host_tokens[:, : self.prompt_width] = prompts
        self._host_view = self.host_tokens.numpy()  # the same memory

    @property
    def length_counts(self) -> list[int]:
        """Host copy of `lengths`, as of the last `synchronise`."""
        return [prompt + new for prompt, new in zip(self.prompt_lengths, self.generated_counts, strict=True)]

    def host_text(self, row: int, *, first: int = 0) -> list[int]:
        """Prompt and generated tokens of a row, as of the last `synchronise`.

        Args:
            row: Which.
            first: Position of the first token to return.
        """
        begin = self.prompt_width - self.prompt_lengths[row] + first
        end = self.prompt_width + self.generated_counts[row]
        # Asked of every row in every round; a view of numpy's is made in a fraction of the time.
        tokens: list[int] = self._host_view[row, begin:end].tolist()
        return tokens

    def host_tail(self) -> tuple[Tensor, Tensor]:
        """What `tail(1)` returns, on the host, as of the last `synchronise`."""
        last = np.array(self.generated_counts) + self.prompt_width - 1
        tokens, positions = self._host_view[np.arange(self.rows), last], np.array(self.length_counts) - 1
        return torch.from_numpy(tokens)[:, None], torch.from_numpy(positions)[:, None]

    def row_tokens(self, row: int) -> Tensor:
        """The same on the device, `[1, length]`, int64."""
        end = self.prompt_width + self.generated_counts[row]
        return self.tokens[row : row + 1, self.prompt_width - self.prompt_lengths[row] : end]

    @property
    def remaining(self) -> Tensor:
        """Tokens each row may still emit, `[rows]`, int64."""
        return self.limits - self.generated

    def synchronise(self, generated_counts: list[int], tokens: Tensor) -> None:
        """Take over on the host what was appended since the last time, which the loop fetched.

        Args:
            generated_counts: The values of `generated`.
            tokens: What `append` was given, `[rows, width]`, int64, on the host.
        """
        # Once a round, while the device waits for the host: numpy takes a fraction of torch's time for so few numbers.
        firsts = np.array(self.generated_counts)[:, None] + self.prompt_width
        self._host_view[np.arange(self.rows)[:, None], firsts + np.arange(tokens.shape[1])] = tokens.numpy()
        self.generated_counts = generated_counts

    def replace_rows(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Let rows begin another text.

        Args:
            rows: Which, each once.
            prompts: Their prompts, at least one token each.
            limits: Tokens that each of them may emit.
        """
        self._widen(max(map(len, prompts)), max(limits))
        index = upload(rows, self.device)
        padded = [[self.pad_token] * (self.prompt_width - len(prompt)) + list(prompt) for prompt in prompts]
        flat = upload([token for prompt in padded for token in prompt], self.device)
        self.tokens[:, : self.prompt_width].index_copy_(0, index, flat.view(len(rows), -1))
        self.host_tokens[list(rows), : self.prompt_width] = torch.tensor(padded)
        lengths = list(map(len, prompts))
        self._prompts = self._prompts.index_copy(0, index, upload(lengths, self.device))
        self.padding = self.prompt_width - self._prompts
        self.generated = self.generated.index_fill(0, index, 0)
        self.lengths = self._prompts + self.generated
        self.limits = self.limits.index_copy(0, index, upload(list(limits), self.device))
        for row, length in zip(rows, lengths, strict=True):
            self.prompt_lengths[row], self.generated_counts[row] = length, 0

    def _widen(self, prompt_width: int, max_new_tokens: int) -> None:
        """Make room for longer prompts in front, and for more new tokens after."""
        in_front = max(prompt_width - self.prompt_width, 0)
        behind = max(max_new_tokens - self.max_new_tokens, 0)
        if not in_front and not behind:
            return
        self.tokens = torch.nn.functional.pad(self.tokens, (in_front, behind), value=self.pad_token)
        self.host_tokens = torch.nn.functional.pad(self.host_tokens, (in_front, behind), value=self.pad_token)
        self._host_view = self.host_tokens.numpy()
        self._columns = torch.arange(self.tokens.shape[1], device=self.device)
        self.padding = self.padding + in_front
        self.prompt_width += in_front
        self.max_new_tokens += behind

    def tail(self, width: int) -> tuple[Tensor, Tensor]:
        """Return each row's last `width` tokens, right-aligned, and their positions.

        Returns:
            Tokens and positions, both `[rows, width]`, int64. Where a row is shorter than `width`, positions are below
            0 and tokens are anything.
        """
        first = self.prompt_width - width
        last = self._columns[first : self.prompt_width]  # of a row that has generated nothing
        if first < 0:
            last = torch.arange(first, self.prompt_width, device=self.device)
        columns = self.generated[:, None] + last
        positions = columns - self.padding[:, None]
        return self.tokens.gather(1, columns if first >= 0 else columns.clamp_min(0)), positions

    def tokens_at(self, spans: Sequence[Span]) -> Tensor:
        """Return the tokens of some spans, one span after another, `[total_count(spans)]`, int64."""
        rows, positions = upload(torch.stack(flat_places(spans)), self.device)
        return self.tokens[rows, self.padding[rows] + positions]

    def write_drafts(self, tokens: Tensor, offset: int = 0) -> None:
        """Write draft tokens `[rows, width]` after the known text, `offset` columns after its end."""
        first = self.prompt_width + offset
        columns = self._columns[first : first + tokens.shape[1]]  # of a row that has generated nothing
        self.tokens.scatter_(1, self.generated[:, None] + columns, tokens)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Make the first `counts` of `tokens` part of the text.

        Args:
            tokens: `[rows, width]`, int64; anything beyond a row's count.
            counts: `[rows]`, int64.
        """
        self.write_drafts(tokens)
        self.generated = self.generated + counts
        self.lengths = self._prompts + self.generated

    def prefix(self, length: int, holds: Tensor) -> Tensor:
        """Return what a logits processor is shown when it decides on generated token number `length`.

        Args:
            length: Generated tokens in the prefix, draft tokens included.
            holds: Rows that have that many, drafts included, `[rows]`, bool. The others, whose result nobody reads, are
                shown their own text with more padding in front: a valid prefix, of the right width.

        Returns:
            `[rows, prompt_width + length]`, int64.
        """
        width = self.prompt_width + length
        missing = torch.where(holds, 0, (length - self.generated).clamp_min(0))
        columns = torch.arange(width, device=self.device) - missing[:, None]
        prefix = self.tokens.gather(1, columns.clamp_min(0))
        return prefix.masked_fill(columns < 0, self.pad_token)

    def text(self, lengths: list[int], width: int) -> Tensor:
        """Return prompts and generated tokens as `generate` does.

        Args:
            lengths: Generated tokens to show of each row; padding follows them.
            width: Columns to show after the prompt.

        Returns:
            `[rows, prompt_width + width]`, int64.
        """
        shown = self.tokens[:, : self.prompt_width + width].clone()
        ends = torch.tensor(lengths, device=self.device)[:, None]
        behind = torch.arange(-self.prompt_width, width, device=self.device) >= ends
        return shown.masked_fill_(behind, self.pad_token)


def _check_padding(mask: Tensor) -> None:
    """Refuse prompts that are empty or padded anywhere but in front."""
    if not bool(mask[:, -1].all()):
        rows = (~mask[:, -1]).nonzero()[:, 0].tolist()
        msg = (
            f"attention_mask: rows {rows} end in padding (or are empty); prompts must be padded in front. Set "
            "tokenizer.padding_side = 'left' and tokenise again."
        )
        raise ValueError(msg)
    holes = (mask[:, :-1] & ~mask[:, 1:]).any(dim=1)
    if bool(holes.any()):
        msg = (
            f"attention_mask: rows {holes.nonzero()[:, 0].tolist()} hide tokens in the middle of the prompt; only "
            "padding in front is supported. Remove the hidden tokens from input_ids."
        )
        raise ValueError(msg)

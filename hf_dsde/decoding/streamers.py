"""Streaming a batch: every row grows at its own pace, so tokens come with the row they belong to.

`generate` puts the prompts, the loop puts each row's new tokens and says when a row has ended, and `end`
closes all. The stock loops, which put one token per row and step, work as well, so one streamer serves both.
"""

from __future__ import annotations

import queue
import sys
import time
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LONGEST_WORD = 32
"""Characters after which text is shown although no word has ended, as in Thai or in a long number."""


class BatchStreamer(BaseStreamer, ABC):
    """Receives the tokens of a batch, row by row.

    In a call come, in this order: `begin` with the prompts, any number of `put_tokens` and for each row one
    `end_row` in whatever order rows advance, then `end`. Rows that were not ended by then are ended by `end`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the batch, as after a call that raised before `end`."""
        self._started = False

    def put(self, value: Tensor) -> None:
        """Take what `generate` itself hands over; the decoding loop of this package uses `put_tokens` instead.

        Args:
            value: First the prompts, shape `[rows, prompt]`, int64. Later, from stock loops only, the next
                tokens, shape `[rows]`, or `[1, n]` in a batch of one.
        """
        if value.ndim == 2 and (value.shape[0] > 1 or not self._started):
            self.reset()
            self._started = True
            self.begin(value.long())
            return
        if not self._started:
            raise ValueError(
                f"`value` has shape {list(value.shape)} before any prompt was put; need the prompts, "
                f"[rows, prompt]. Pass the streamer to `generate`, which puts them."
            )
        tokens = value.long() if value.ndim == 2 else value.long()[:, None]
        self.put_step(tokens)

    def put_step(self, tokens: Tensor) -> None:
        """Take the same number of new tokens for every row, shape `[rows, n]`, int64: what stock loops produce."""
        for row, row_tokens in enumerate(tokens):
            self.put_tokens(row, row_tokens)

    @abstractmethod
    def begin(self, prompt_ids: Tensor) -> None:
        """Take the prompts of a new batch, shape `[rows, prompt]`, int64, padding included."""

    @abstractmethod
    def put_tokens(self, row: int, tokens: Tensor) -> None:
        """Take the next tokens of one row, shape `[n]`, int64, on any device."""

    @abstractmethod
    def end_row(self, row: int) -> None:
        """Learn that a row has got its last token."""

    def end(self) -> None:
        """Learn that the whole batch has ended; the streamer is then ready for another one."""
        self.reset()


class BatchTextStreamer(BatchStreamer):
    """Decodes each row as its tokens come and hands on text as soon as words are complete.

    The texts of a row, put together, are what decoding all its tokens at once gives, as long as the
    tokenizer's decoding of a text does not depend on what follows it (true of byte-level and sentencepiece
    tokenizers without `clean_up_tokenization_spaces`). Characters of several bytes are never torn.

    By default rows are shown live in a terminal, and printed line by line, with the row's number, elsewhere.
    Override `on_text` to do something else with them.

    Args:
        tokenizer: Decodes the tokens.
        skip_prompt: Whether to leave out the prompts.
        decode_kwargs: Passed to `tokenizer.decode`, for example `skip_special_tokens=True`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool = True, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.decode_kwargs = decode_kwargs
        self._display: _LiveDisplay | _LineDisplay | None = None
        super().__init__()

    def reset(self) -> None:
        """Forget the batch, as after a call that raised before `end`; gives the terminal back."""
        super().reset()
        self._rows: list[_RowText] = []
        self._close_display()

    def on_text(self, row: int, text: str, end: bool) -> None:
        """Receive text that will not change any more.

        Args:
            row: Index of the row.
            text: The text that follows what was handed over before; may be empty when `end`.
            end: Whether this was the row's last text.
        """
        if self._display is None:
            self._display = _LiveDisplay(len(self._rows)) if sys.stdout.isatty() else _LineDisplay(len(self._rows))
        self._display.show(row, text, end)

    def begin(self, prompt_ids: Tensor) -> None:
        """Take the prompts of a new batch, shape `[rows, prompt]`, int64, padding included."""
        self._rows = [_RowText(self.tokenizer, self.decode_kwargs) for _ in range(prompt_ids.shape[0])]
        if self.skip_prompt:
            return
        padding = self.tokenizer.pad_token_id
        for row, tokens in enumerate(prompt_ids.tolist()):
            start = next((i for i, token in enumerate(tokens) if token != padding), len(tokens))
            self._hand_over(row, self._rows[row].add(tokens[start:]))

    def put_step(self, tokens: Tensor) -> None:
        """Take the same number of new tokens for every row, shape `[rows, n]`; rows end with the tokenizer's EOS."""
        for row, row_tokens in enumerate(tokens.tolist()):
            if self._rows[row].ended:
                continue
            self.put_tokens(row, torch.tensor(row_tokens))
            if self.tokenizer.eos_token_id in row_tokens:
                self.end_row(row)

    def put_tokens(self, row: int, tokens: Tensor) -> None:
        """Take the next tokens of one row, shape `[n]`, int64, on any device."""
        state = self._row(row)
        if state.ended:
            raise ValueError(f"`row` {row} has ended already; need a row that `end_row` was not called for.")
        self._hand_over(row, state.add(tokens.tolist()))

    def end_row(self, row: int) -> None:
        """Hand over what is left of a row's text. A second call for the same row does nothing."""
        state = self._row(row)
        if not state.ended:
            self.on_text(row, state.finish(), True)

    def end(self) -> None:
        """End every row that still runs, and the batch."""
        for row in range(len(self._rows)):
            self.end_row(row)
        super().end()

    def _hand_over(self, row: int, text: str) -> None:
        if text:
            self.on_text(row, text, False)

    def _row(self, row: int) -> _RowText:
        if not 0 <= row < len(self._rows):
            raise ValueError(
                f"`row` is {row}, but the batch has {len(self._rows)} rows; put the prompts, [rows, prompt], first."
            )
        return self._rows[row]

    def _close_display(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


class BatchIteratorStreamer(BatchTextStreamer):
    """Lets another thread iterate over `(row, text)` while `generate` runs, as servers and notebooks need it.

        streamer = BatchIteratorStreamer(tokenizer)
        Thread(target=model.generate, kwargs={**inputs, "streamer": streamer}).start()
        for row, text in streamer:
            ...

    Iteration stops when the batch has ended, or decoding it failed. Where `generate` refuses a call before it starts,
    nothing tells the streamer: give a `timeout`, or call `end` from the thread that caught the error.

    Args:
        tokenizer: Decodes the tokens.
        skip_prompt: Whether to leave out the prompts.
        timeout: Seconds to wait for the next text before `TimeoutError`; None waits for ever.
        decode_kwargs: Passed to `tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_prompt: bool = True,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        self.timeout = timeout
        self._queue: queue.Queue[tuple[int, str] | None] = queue.Queue()
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)

    def on_text(self, row: int, text: str, end: bool) -> None:  # noqa: ARG002 - the end of a row queues nothing
        """Queue the text; rows that end without further text queue nothing."""
        if text:
            self._queue.put((row, text))

    def end(self) -> None:
        """End every row that still runs, and the iteration."""
        super().end()
        self._queue.put(None)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield `(row, text)` until the batch has ended. Raises `TimeoutError` when nothing comes in time."""
        while True:
            try:
                item = self._queue.get(timeout=self.timeout)
            except queue.Empty:
                raise TimeoutError(
                    f"No text within `timeout` = {self.timeout} seconds; pass a longer one if generation is slow, "
                    f"and look whether `generate` raised in its thread."
                ) from None
            if item is None:
                return
            yield item


class _RowText:
    """Turns the tokens of one row into text that will not change any more.

    Only a window of recent tokens is decoded, so that a long row does not cost the square of its length. The
    window always keeps some tokens already shown, because tokenizers treat the first token of a text
    differently.
    """

    _LONGEST_WINDOW = 96
    _KEPT_TOKENS = 16

    def __init__(self, tokenizer: PreTrainedTokenizerBase, decode_kwargs: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._decode_kwargs = decode_kwargs
        self._window: list[int] = []
        self._shown = 0
        self.ended = False

    def add(self, tokens: list[int]) -> str:
        """Append tokens; returns the text that became final."""
        self._window.extend(tokens)
        text = self._decode(self._window)
        final = max(_final_length(text), self._shown)
        new = text[self._shown : final]
        self._shown = final
        if len(self._window) > self._LONGEST_WINDOW and not text.endswith("\ufffd"):
            self._shorten_window(text)
        return new

    def finish(self) -> str:
        """The text that was still held back."""
        self.ended = True
        return self._decode(self._window)[self._shown :]

    def _shorten_window(self, text: str) -> None:
        recent = self._window[-self._KEPT_TOKENS :]
        tail = self._decode(recent)
        shown = self._shown - (len(text) - len(tail))
        # No suffix where the cut tears a character, nothing shown where words are long: the next call cuts
        # elsewhere.
        if shown > 0 and text.endswith(tail):
            self._window, self._shown = recent, shown

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, **self._decode_kwargs))


def _final_length(text: str) -> int:
    """How many leading characters of a text no further token can change or continue.

    That is up to the last white space, or up to the end after a character of a script that is written without
    spaces, or inside something longer than words are. Replacement characters at the end are the first bytes
    of a character whose other bytes are to come.
    """
    complete = len(text.rstrip("\ufffd"))
    for length in range(complete, max(0, complete - _LONGEST_WORD), -1):
        character = text[length - 1]
        if character.isspace() or unicodedata.east_asian_width(character) in "WF":
            return length
    return complete if complete > _LONGEST_WORD else 0


class _LineDisplay:
    """Prints whole lines with their row's number, which stays readable in a file; a single row is printed as is."""

    def __init__(self, rows: int) -> None:
        self._pending = [""] * rows

    def show(self, row: int, text: str, end: bool) -> None:
        if len(self._pending) == 1:
            self._write(text + ("\n" if end else ""))
            return
        *lines, rest = (self._pending[row] + text).split("\n")
        if end:
            lines, rest = ([*lines, rest] if rest else lines), ""
        self._pending[row] = rest
        self._write("".join(f"[{row}] {line}\n" for line in lines))

    def close(self) -> None:
        self._pending = []

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class _LiveDisplay:
    """A table that is redrawn in place: one line of the terminal per row while there are many, more when few."""

    _SECONDS_BETWEEN_DRAWINGS = 0.1

    def __init__(self, rows: int, console: Console | None = None) -> None:
        from rich.live import Live

        self._texts = [""] * rows
        self._ended = [False] * rows
        self._drawn_at = 0.0
        # Without a refreshing thread nothing keeps running if `generate` raises before the end.
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()
        self._live.console.show_cursor(True)

    def show(self, row: int, text: str, end: bool) -> None:
        # A model may write escape sequences, which would move the cursor under the table.
        self._texts[row] += "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._ended[row] |= end
        now = time.monotonic()
        if now - self._drawn_at >= self._SECONDS_BETWEEN_DRAWINGS:
            self._drawn_at = now
            self._live.update(self._table(whole=False), refresh=True)

    def close(self) -> None:
        self._live.update(self._table(whole=True), refresh=True)
        self._live.stop()

    def _table(self, whole: bool) -> Table:
        """All rows; while they grow only the end of each, so that the table fits the terminal."""
        from rich.table import Table
        from rich.text import Text

        width, height = self._live.console.size
        room = max(1, (height - 2) // len(self._texts)) * max(20, width - 8)
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for row, text in enumerate(self._texts):
            shown = text if whole else text.replace("\n", " ")[-room:]
            table.add_row(Text(str(row), style="dim" if self._ended[row] else "bold"), Text(shown))
        return table

"""Hands tokens to a streamer as soon as it is certain that they belong to the output.

They are taken from the host's copy of the text, so that nobody waits for the device.
"""

from __future__ import annotations

from transformers.generation.streamers import BaseStreamer

from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.stopping import Stopping
from hf_dsde.decoding.streamers import BatchStreamer


class TokenFeed:
    """Feeds one streamer, or none.

    Args:
        streamer: A `BatchStreamer`, or any streamer of transformers for a batch of one. None for no streaming.
        rows: Number of sequences.

    Raises:
        ValueError: If a streamer for single sequences is given for a larger batch.
    """

    def __init__(self, streamer: BaseStreamer | None, rows: int) -> None:
        if streamer is not None and rows > 1 and not isinstance(streamer, BatchStreamer):
            msg = (
                f"streamer: {type(streamer).__name__} takes one sequence, but the batch has {rows}; pass a "
                "hf_dsde.BatchStreamer, such as hf_dsde.BatchTextStreamer(tokenizer)."
            )
            raise ValueError(msg)
        self._streamer = streamer
        self._sent = [0] * rows
        self._open = [True] * rows

    def feed(self, sequences: SequenceBatch, stopping: Stopping) -> None:
        """Send what became certain since the last call, and close rows that have finished."""
        if self._streamer is None:
            return
        for row, is_open in enumerate(self._open):
            certain = stopping.confirmed(row)
            self._send(sequences, row, certain)
            if is_open and stopping.final_length(row) == certain:
                self._close(row)

    def end(self) -> None:
        """Close what is still open; nothing follows."""
        if self._streamer is None:
            return
        for row, is_open in enumerate(self._open):
            if is_open:
                self._close(row)
        self._streamer.end()

    def abort(self) -> None:
        """Let go of whoever waits for text that will not come, since decoding failed.

        Streamers of transformers are left alone, as plain `generate` leaves them.
        """
        if isinstance(self._streamer, BatchStreamer):
            self._streamer.end()

    def _send(self, sequences: SequenceBatch, row: int, certain: int) -> None:
        start = sequences.prompt_width + self._sent[row]
        # A streamer may do with its tokens what it likes.
        tokens = sequences.host_tokens[row, start : sequences.prompt_width + certain].clone()
        self._sent[row] = max(certain, self._sent[row])
        if len(tokens) == 0 or self._streamer is None:
            return
        if isinstance(self._streamer, BatchStreamer):
            self._streamer.put_tokens(row, tokens)
            return
        for token in tokens.split(1):  # plain `generate` hands over one token at a time
            self._streamer.put(token)

    def _close(self, row: int) -> None:
        self._open[row] = False
        if isinstance(self._streamer, BatchStreamer):
            self._streamer.end_row(row)

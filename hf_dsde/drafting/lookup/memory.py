"""Drafters that know other texts beside the row's own: a corpus, and the answers that they have helped to make."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_dsde.decoding.drafter import DraftCall, StagedStep
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.lookup.continuation import Continuation
from hf_dsde.drafting.lookup.corpus import Corpus, corpus_texts, save_texts
from hf_dsde.drafting.lookup.index import TextIndex
from hf_dsde.drafting.lookup.text_drafter import TextDrafter
from hf_dsde.utils.checks import check_flag, check_integer

MEMORY_TOKENS = 1_000_000
PROMPT_TAIL = 8
"""Tokens of its prompt that an answer is remembered with: they show how answers begin."""


TAKEN_IN = 256
"""Tokens of answers that are over which are taken in at a time, and what is left of the last answer: at most a
millisecond's work."""


class MemoryDrafter(TextDrafter[TextIndex]):
    """Keeps an index of each row's text, and one that all rows share. See `SuffixDrafter` for the arguments."""

    def __init__(
        self,
        corpus: Corpus | None,
        tokenizer: PreTrainedTokenizerBase | None,
        share_answers: bool,
        memory_tokens: int,
    ) -> None:
        super().__init__()
        self._share_answers = check_flag("share_answers", share_answers)
        self._memory = TextIndex(check_integer("memory_tokens", memory_tokens, 1))
        digest = hashlib.sha256()
        tokens = 0
        for text in corpus_texts(corpus, tokenizer):
            tokens += len(text)
            if tokens > memory_tokens:
                msg = (
                    f"corpus: it has more than memory_tokens={memory_tokens:,} tokens, of which the first would be "
                    "forgotten at once. Raise memory_tokens (1,000,000 take about 100 MB), or pass fewer texts."
                )
                raise ValueError(msg)
            digest.update(np.array([len(text), *text], dtype=np.int64).tobytes())
            self._memory.add(text)
        self._corpus_digest = digest.hexdigest() if tokens else None
        self._unread: deque[list[int]] = deque()  # answers that are over and not in the memory yet
        self._over: set[int] = set()  # rows whose answers are among them, or in the memory

    @property
    def memory(self) -> TextIndex:
        """Corpus and answers, as far as they are not forgotten."""
        while self._unread:
            self._take_in()
        return self._memory

    def save_memory(self, file: str | os.PathLike[str]) -> None:
        """Write corpus and answers to a file of safetensors, which `corpus=pathlib.Path(file)` reads again."""
        save_texts(self.memory.texts, file)

    @property
    def settings(self) -> dict[str, Any]:
        """Its arguments; of the corpus, a hash."""
        return {
            "corpus": self._corpus_digest,
            "share_answers": self._share_answers,
            "memory_tokens": self._memory.max_tokens,
        }

    @abstractmethod
    def continuation(self, text: TextIndex, most: int) -> Continuation:
        """Return what a text is expected to go on with, by itself and by the memory."""

    def new_text(self) -> TextIndex:
        """Return an empty index."""
        return TextIndex()

    def start(self, call: DraftCall) -> None:
        """Forget the rows of an earlier call, but not the memory.

        Raises:
            ValueError: If a token of it is none of the target's.
        """
        if self._memory.largest_token >= call.vocabulary_size:
            msg = (
                f"corpus: token {self._memory.largest_token} is not in the target's vocabulary of "
                f"{call.vocabulary_size}. Make the tokens with the target's tokenizer, and give targets of other "
                "vocabularies drafters of their own."
            )
            raise ValueError(msg)
        super().start(call)
        self._over = set()
        self._has_time = False  # whether there is time beside passes, so that no round waits for answers to be taken in

    def propose(self, sequences: SequenceBatch, most: Sequence[int]) -> list[Continuation]:
        """As for every drafter of texts, after answers were taken in where there is no time for that beside passes."""
        if not self._has_time:
            self._take_in()
        return super().propose(sequences, most)

    def prefill(self, rows: Sequence[int]) -> bool:
        """Read texts, and let contexts lead to all of them."""
        read = super().prefill(rows)
        for row in rows if read else ():
            self._read(row).learn()
        return read

    def stage_next(self, going_on: Tensor, longest: int, foreseen: int | None) -> StagedStep | None:
        """Let contexts lead to what was read before, and take answers into the memory, beside the target's pass."""
        self._has_time = True
        self._take_in()
        staged = super().stage_next(going_on, longest, foreseen)
        for text in self._texts:
            if text is not None:
                text.learn()
        return staged

    def begin_texts(self, rows: Sequence[int]) -> None:
        """Remember the answers that are over."""
        self._remember(rows)
        self._over.difference_update(rows)
        super().begin_texts(rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Remember the answers of rows that have finished."""
        kept = set(rows)
        self._remember([row for row in range(self.call.sequences.rows) if row not in kept])
        super().keep_rows(rows)

    def finish(self) -> None:
        """Remember the other answers, and let go of the texts."""
        self._remember(range(self.call.sequences.rows))
        super().finish()

    def _remember(self, rows: Sequence[int]) -> None:
        """Put aside the answers of some rows; they are taken in when there is time, or somebody looks."""
        if not self._share_answers:
            return
        sequences = self.call.sequences
        for row in rows:
            if row not in self._over and sequences.generated_counts[row]:
                self._over.add(row)
                first = max(sequences.prompt_lengths[row] - PROMPT_TAIL, 0)
                self._unread.append(sequences.host_text(row, first=first))

    def _take_in(self) -> None:
        """Take in some of the answers that were put aside, few enough for no round to take notice."""
        taken = 0
        while self._unread and taken < TAKEN_IN:
            answer = self._unread.popleft()
            self._memory.add(answer)
            taken += len(answer)

"""Drafts by the suffixes of a text that stood before, in itself or in others (SuffixDecoding, arXiv 2411.04975)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.corpus import Corpus
from hf_dsde.drafting.lookup.index import DEPTH, TextIndex
from hf_dsde.drafting.lookup.memory import MEMORY_TOKENS, MemoryDrafter
from hf_dsde.utils.checks import check_number


class SuffixDrafter(MemoryDrafter):
    """Proposes what most often followed the end of a row's text: earlier in it, in earlier answers, in a corpus.

    Of each suffix of the text that stood before, the most frequent continuation is followed token by token, at most
    `per_match` tokens per token of the suffix, and as long as all of it has at least `min_probability`. The one with
    the best score is proposed: that is the sum over its tokens of the probability that all up to there stand, by the
    counts, and so the number of tokens expected to be accepted (SuffixDecoding, arXiv 2411.04975, section 3). The row's
    own text and the memory that the rows share are asked apart, and the better of both is taken.

    The policy says how much a row may draft at most; nothing is proposed where nothing stood before. Texts stay the
    target's own, whatever is in the memory. One drafter may serve many calls, one after another, and remembers the
    answers of them all.

    Args:
        corpus: Texts that are known from the start: strings, token ids, a column of a data set, or, as a
            `pathlib.Path`, a file that `save_memory` wrote.
        tokenizer: The target's, for a corpus of strings.
        share_answers: Whether rows draft out of the answers that other rows and earlier calls have finished.
        memory_tokens: The most tokens of corpus and answers together, of about 100 bytes each. The oldest texts are
            forgotten for newer ones.
        per_match: How far a suffix reaches. More drafts further after short suffixes, and is wrong more often.
        min_probability: Where a proposal ends, in (0, 1]. More drafts less and is right more often.
        min_score: Rows whose score is lower propose nothing. Where a target's pass takes longer for every token, as in
            large batches, a token or less is not worth it.
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        share_answers: bool = True,
        memory_tokens: int = MEMORY_TOKENS,
        per_match: float = 1.0,
        min_probability: float = 0.1,
        min_score: float = 0.0,
    ) -> None:
        self._per_match = check_number("per_match", per_match, 0.0, open_minimum=True)
        self._min_probability = check_number("min_probability", min_probability, 0.0, 1.0, open_minimum=True)
        self._min_score = check_number("min_score", min_score, 0.0)
        super().__init__(corpus, tokenizer, share_answers, memory_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """Its arguments; of the corpus, a hash."""
        own = {"per_match": self._per_match, "min_probability": self._min_probability, "min_score": self._min_score}
        return super().settings | own

    def continuation(self, text: TextIndex, most: int) -> Continuation:
        """Return the better continuation of a row's own text and the memory."""
        end = text.tail(DEPTH)
        rule = self._per_match, self._min_probability, self.least_match
        best = text.continuation(end, most, *rule)
        if best.score < most and len(self._memory):
            other = self._memory.continuation(end, most, *rule)
            if other.score > best.score:
                best = other
        return best if best.score >= self._min_score else NOTHING

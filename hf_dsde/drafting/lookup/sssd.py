"""Drafts by n-grams of the row's text and of a datastore together (SSSD, arXiv 2411.05894)."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.corpus import Corpus
from hf_dsde.drafting.lookup.index import DEPTH, END, TextIndex
from hf_dsde.drafting.lookup.memory import MEMORY_TOKENS, MemoryDrafter
from hf_dsde.utils.checks import check_number

PREFIX = 3
"""Tokens of the row's text that are matched in itself, as in the authors' code."""
BRANCH = 8
"""Tokens that are proposed at most, likewise."""
UNSEEN = 1.0
"""The row's text counts as if each context of it had gone on otherwise once more: one occurrence says little."""
LEAST_PROBABILITY = 0.1


class SSSDDrafter(MemoryDrafter):
    """Proposes the likeliest continuation by two sources together, the row's text and a datastore.

    The token after the last ones has a probability by each source: the share of it among what followed the longest
    suffix that is found, of at most three tokens in the row's own text. What that text says is damped, since it has
    seen little. Both are added with weights; a source that has not gone on like the proposal drops out. The published
    method puts all likely continuations into a tree; a chain is the likeliest one of them.

    The other part of it, how many tokens a batch of `b` rows can verify before a pass takes longer (the published
    `peak FLOPS / bandwidth / b`), is what policies that weigh costs find out from measured passes: `auto`, `goodput`,
    and any other with `cost_cap`.

    Args:
        corpus: As for `SuffixDrafter`: the datastore.
        tokenizer: The target's, for a corpus of strings.
        share_answers: Whether answers that are over belong to the datastore.
        memory_tokens: The most tokens of the datastore.
        prompt_weight: Weight of the row's own text against the datastore, in [0, 1]. The published number is not known;
            around 0.65, most was accepted of what followed in source code (`benchmarks/suffix_structure.py`).
    """

    def __init__(
        self,
        corpus: Corpus | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        share_answers: bool = True,
        memory_tokens: int = MEMORY_TOKENS,
        prompt_weight: float = 0.65,
    ) -> None:
        self._prompt_weight = check_number("prompt_weight", prompt_weight, 0.0, 1.0)
        super().__init__(corpus, tokenizer, share_answers, memory_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """Its arguments; of the corpus, a hash."""
        return super().settings | {"prompt_weight": self._prompt_weight}

    def continuation(self, text: TextIndex, most: int) -> Continuation:
        """Return the likeliest continuation by both sources."""
        end = text.tail(DEPTH)
        asked = [
            (text, end[-PREFIX:], self._prompt_weight, UNSEEN),
            (self._memory, end, 1 - self._prompt_weight, 0.0),
        ]
        sources, match = [], 0
        for index, context, weight, unseen in asked:
            found = index.contexts(context) if weight else []
            if found:
                length, places = found[-1]
                sources.append((index, places, weight, unseen))
                match = max(match, length)
        return _likeliest(sources, min(most, BRANCH), match)


def _likeliest(sources: list[tuple[TextIndex, list[int], float, float]], most: int, match: int) -> Continuation:
    """Follow the likeliest token as long as all of them together are likely.

    Args:
        sources: Of each, its places, its weight and what counts as having gone on otherwise.
        most: The most tokens.
        match: Of the result.
    """
    tokens: list[int] = []
    score, probability = 0.0, 1.0
    while sources and len(tokens) < most:
        followers = [index.after(places, len(tokens) + 1) for index, places, _, _ in sources]
        likely: dict[int, float] = {}
        for (_, places, weight, unseen), after in zip(sources, followers, strict=True):
            part = weight / (len(places) + unseen)
            for token in reversed(after):
                likely[token] = likely.get(token, 0.0) + part
        likely.pop(END, None)
        if not likely:
            break
        best = max(likely, key=likely.__getitem__)
        probability *= likely[best] / sum(weight for _, _, weight, _ in sources)
        if probability < LEAST_PROBABILITY:
            break
        tokens.append(best)
        score += probability
        going_on = [
            (index, [place for place, token in zip(places, after, strict=True) if token == best], weight, unseen)
            for (index, places, weight, unseen), after in zip(sources, followers, strict=True)
        ]
        sources = [source for source in going_on if source[1]]
    return Continuation(tokens, score, match) if tokens else NOTHING

"""Where the end of a text stood before, in texts that grow and in texts that are forgotten.

The index is a tree of contexts: from the root, a place of the text goes down by its last token, the one before it, and
so on, as in a suffix tree of the text read backwards. A node holds the newest places that share its context. It is
divided by the token before only once it has more of them than count (`OCCURRENCES`): up to then, comparing them token
by token says the same. So a place takes few steps down, and what it takes of memory does not grow with the depth.

Nothing outside of the newest `OCCURRENCES` places of a context counts. This bounds the work of a look-up, and lets
recent text decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation, most_frequent

OCCURRENCES = 16
"""Places of a context that count, the newest ones."""
DEPTH = 32
"""Tokens of a context that are compared. Whoever agrees in as many agrees enough, whatever came before."""
END = -1
"""Stands between texts: no token is equal to it."""

_Places = list[int]


class _Branch:
    """A context that is divided by the token before it: its newest places, and what is known of each such token.

    That is another branch, or places that are not divided; of a single one, as most are, the number alone.
    """

    __slots__ = ("before", "places")

    def __init__(self) -> None:
        self.places: _Places = []
        self.before: dict[int, int | _Places | _Branch] = {}


class TextIndex:
    """Texts, and where each context of theirs stands.

    Args:
        max_tokens: The most tokens that `add` keeps, at least 1; the oldest texts are forgotten. None keeps all.

    Attributes:
        largest_token: The largest token that was ever added; -1 before the first.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.largest_token = -1
        self._root = _Branch()
        self._tokens = [END, END]  # every text stands between two ends
        self._shift = 0  # places count from the first token that was ever added; `_tokens` begins at this one
        self._lengths: deque[int] = deque([0])  # of the texts, the growing one last
        self._count = 0
        self._begin = 1  # place of the oldest token that is known

    def __len__(self) -> int:
        """Tokens of all texts."""
        return self._count

    @property
    def texts(self) -> list[list[int]]:
        """The texts that are known, without empty ones, the oldest first."""
        begin, texts = self._begin - self._shift, []
        for length in self._lengths:
            texts.append(self._tokens[begin : begin + length])
            begin += length + 1
        return [text for text in texts if text]

    def extend(self, tokens: Sequence[int]) -> None:
        """Let the newest text go on with some tokens."""
        if not tokens:
            return
        largest = max(tokens)
        self.largest_token = max(self.largest_token, largest)
        held = self._tokens
        # The last token had no follower so far, so nobody could have learnt from its place.
        first = len(held) - 2 + self._shift
        held[-1:] = tokens
        held.append(END)
        if not self._lengths[-1]:
            first += 1
        self._lengths[-1] += len(tokens)
        self._count += len(tokens)
        for place in range(first, len(held) - 2 + self._shift):
            self._insert(place)

    def end_text(self) -> None:
        """Let the next tokens begin another text."""
        if self._lengths[-1]:
            self._tokens.append(END)
            self._lengths.append(0)

    def add(self, text: Sequence[int]) -> None:
        """Add a whole text, and forget the oldest ones where there are too many tokens; of a longer one, keep the end.

        Args:
            text: Its tokens.
        """
        if self.max_tokens is not None:
            text = text[-self.max_tokens :]
            while len(self._lengths) > 1 and self._count + len(text) > self.max_tokens:
                self._forget_oldest()
        self.extend(text)
        self.end_text()

    def tail(self, count: int) -> list[int]:
        """The last tokens of the newest text, at most `count`."""
        count = min(count, self._lengths[-1])
        return self._tokens[len(self._tokens) - 1 - count : -1]

    def contexts(self, end: Sequence[int]) -> list[tuple[int, _Places]]:
        """Return where the end of a text stands elsewhere.

        Args:
            end: The last tokens of a text; the last `DEPTH` count.

        Returns:
            Lengths of the contexts that were found, and the newest places of each, the newest last; the shortest
            context first. Of several contexts with the same places there is the longest. A place is that of the
            context's last token: see `after`.
        """
        held, shift = self._tokens, self._shift
        found: list[tuple[int, _Places]] = []
        known, length, places = self._root, 0, []
        longest = min(len(end), DEPTH)
        while length < longest:
            below = known.before.get(end[-1 - length])
            if below is None:
                return found
            length += 1
            if not isinstance(below, _Branch):
                places = [below] if isinstance(below, int) else below[-OCCURRENCES:]
                break
            places = below.places[-OCCURRENCES:]
            found.append((length, places))
            known = below
        else:
            return found
        while length < longest and len(places) > 1:
            token, back = end[-1 - length], length + shift
            agreeing = [place for place in places if held[place - back] == token]
            if len(agreeing) != len(places):
                found.append((length, places))
                if not agreeing:
                    return found
                places = agreeing
            length += 1
        if length < longest:
            at = places[0] - shift
            while length < longest and held[at - length] == end[-1 - length]:
                length += 1
        found.append((length, places))
        return found

    def after(self, places: Sequence[int], step: int) -> list[int]:
        """The tokens that stand `step` tokens after some places; `END` where the text has ended by then."""
        held, ahead = self._tokens, step - self._shift
        return [held[place + ahead] for place in places]

    def continuation(
        self, end: Sequence[int], most: int, per_match: float = 1.0, min_probability: float = 0.1
    ) -> Continuation:
        """Return the continuation of the best score: of each context, the most frequent one.

        Args:
            end: As for `contexts`.
            most: The most tokens.
            per_match: The most tokens after a context, per token of it: a longer agreement reaches further.
            min_probability: Where all tokens so far are less likely than this, the continuation ends.
        """
        best = NOTHING
        for length, places in reversed(self.contexts(end)):
            limit = min(most, int(per_match * length))
            if limit <= best.score:
                break  # and shorter contexts have lower limits
            tokens, score = self._follow(places, limit, min_probability, best.score)
            if score > best.score:
                best = Continuation(tokens, score, length)
        return best

    def _follow(
        self, places: _Places, most: int, min_probability: float, to_beat: float
    ) -> tuple[Sequence[int], float]:
        """Go on with the most frequent token, among places that went on with all before it; give up where that loses.

        Returns:
            Tokens and their score; none and 0 if it is no better than `to_beat`.
        """
        held, ahead = self._tokens, 1 - self._shift
        tokens: list[int] = []
        score, probability = 0.0, 1.0
        while len(tokens) < most:
            if len(places) == 1:
                begin = places[0] + ahead
                rest = held[begin : begin + most - len(tokens)]
                if END in rest:
                    rest = rest[: rest.index(END)]
                return tokens + rest, score + probability * len(rest)
            followers = [held[place + ahead] for place in places]
            token, count = most_frequent(followers)
            if token == END:
                # Where most texts end, the likeliest token of the others is next.
                others = [follower for follower in followers if follower != END]
                if not others:
                    break
                token, count = most_frequent(others)
            if count != len(places):
                probability *= count / len(places)
                if probability < min_probability:
                    break
                if score + probability * (most - len(tokens)) <= to_beat:
                    return (), 0.0
                places = [place for place, after in zip(places, followers, strict=True) if after == token]
            tokens.append(token)
            score += probability
            ahead += 1
        return tokens, score

    def _insert(self, place: int) -> None:
        """Add the place of a token whose follower is known."""
        held, at = self._tokens, place - self._shift
        branch, depth = self._root, 1
        while True:
            token = held[at]
            if token == END:
                return
            below = branch.before.get(token)
            if below is None:
                branch.before[token] = place
                return
            if isinstance(below, int):
                branch.before[token] = [below, place]
                return
            if isinstance(below, list):
                below.append(place)
                if len(below) > OCCURRENCES:
                    self._divide(branch, token, below, depth)
                return
            places = below.places
            places.append(place)
            if len(places) > 2 * OCCURRENCES:
                del places[:OCCURRENCES]
            branch = below
            depth += 1
            at -= 1

    def _divide(self, parent: _Branch, token: int, places: _Places, depth: int) -> None:
        """Let a context that has more places than count be divided by the token before it, if it is not the longest."""
        if depth == DEPTH:
            if len(places) > 2 * OCCURRENCES:
                del places[:OCCURRENCES]
            return
        held, back = self._tokens, depth + self._shift
        branch = _Branch()
        branch.places = places
        before: dict[int, _Places] = {}
        for place in places:
            before.setdefault(held[place - back], []).append(place)
        before.pop(END, None)
        branch.before.update((earlier, theirs if len(theirs) > 1 else theirs[0]) for earlier, theirs in before.items())
        parent.before[token] = branch
        for earlier, theirs in before.items():
            if len(theirs) > OCCURRENCES:
                self._divide(branch, earlier, theirs, depth + 1)

    def _forget_oldest(self) -> None:
        """Forget the oldest text."""
        length = self._lengths.popleft()
        self._count -= length
        for place in range(self._begin, self._begin + length - 1):  # nobody learnt from the place of its last token
            self._remove(place)
        self._begin += length + 1
        dead = self._begin - 1 - self._shift  # the end before the next text stays
        if 2 * dead > len(self._tokens):
            del self._tokens[:dead]
            self._shift += dead

    def _remove(self, place: int) -> None:
        """Remove the oldest place that is known."""
        held, at = self._tokens, place - self._shift
        way: list[tuple[_Branch, int]] = []
        branch = self._root
        while True:
            token = held[at]
            below = branch.before.get(token)
            if token == END or below is None:
                break
            way.append((branch, token))
            if isinstance(below, int):
                break
            places = below if isinstance(below, list) else below.places
            if places[0] == place:  # else it has left for newer ones already
                del places[0]
            if isinstance(below, list):
                break
            branch = below
            at -= 1
        for parent, token in reversed(way):
            below = parent.before[token]
            if not isinstance(below, int) and (below.places if isinstance(below, _Branch) else below):
                break
            del parent.before[token]

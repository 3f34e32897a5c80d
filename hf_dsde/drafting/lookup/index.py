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
SHALLOW = 4
"""Tokens that are compared one by one; places that agree in as many often agree in all."""
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
        self._learnt = 1  # place of the first token of the newest text that no context leads to yet

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
        """Let the newest text go on with some tokens.

        Contexts lead to them once `learn` was called, or somebody asks for one that ends in such a token: putting them
        in takes as long as several look-ups, and may wait for a better moment.
        """
        if not tokens:
            return
        largest = max(tokens)
        self.largest_token = max(self.largest_token, largest)
        held = self._tokens
        held[-1:] = tokens
        held.append(END)
        self._lengths[-1] += len(tokens)
        self._count += len(tokens)

    def learn(self) -> None:
        """Put in whatever was only added so far; of the last token nobody can learn before something follows it."""
        last = len(self._tokens) - 2 + self._shift
        for place in range(self._learnt, last):
            self._insert(place)
        self._learnt = max(last, self._learnt)

    def end_text(self) -> None:
        """Let the next tokens begin another text."""
        if self._lengths[-1]:
            self.learn()
            self._tokens.append(END)
            self._lengths.append(0)
            self._learnt = len(self._tokens) - 1 + self._shift

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

    def contexts(self, end: Sequence[int], least: int = 1) -> list[tuple[int, _Places]]:
        """Return where the end of a text stands elsewhere.

        Args:
            end: The last tokens of a text; the last `DEPTH` count.
            least: Tokens of the shortest context that is wanted.

        Returns:
            Lengths of the contexts that were found, and the newest places of each, the newest last; the shortest
            context first. Of several contexts with the same places there is the longest. A place is that of the
            context's last token: see `after`.
        """
        longest = min(len(end), DEPTH)
        found: list[tuple[int, _Places]] = []
        if longest < least:
            return found
        if self._ends_in_new_tokens(end, least):
            self.learn()  # no context that is wanted leads to any other of them
        below = self._root.before.get(end[-1])
        length = 1
        while isinstance(below, _Branch):
            if length >= least:
                found.append((length, below.places[-OCCURRENCES:]))
            if length == longest:
                return found
            below = below.before.get(end[-1 - length])
            length += 1
        if below is None:
            return found
        self._compare([below] if isinstance(below, int) else below[-OCCURRENCES:], end, longest, least, found)
        return found

    def _ends_in_new_tokens(self, end: Sequence[int], least: int) -> bool:
        """Whether the end, or its last two tokens if longer contexts are wanted, stand where nothing leads to yet."""
        held, first = self._tokens, self._learnt - self._shift
        if first >= len(held) - 2 or end[-1] not in held[first:-2]:
            return False
        if least == 1:
            return True
        before, last = end[-2:]
        return any(held[at] == last and held[at - 1] == before for at in range(first, len(held) - 2))

    def _compare(
        self, places: _Places, end: Sequence[int], longest: int, least: int, found: list[tuple[int, _Places]]
    ) -> None:
        """Add the contexts of places that are not divided: they are compared token by token.

        Args:
            places: Which.
            end: The last tokens of a text.
            longest: Tokens of it that count.
            least: As for `contexts`.
            found: Is added to.
        """
        held, shift, length = self._tokens, self._shift, 1
        while length < longest and len(places) > 1:
            token, back = end[-1 - length], length + shift
            agreeing = [place for place in places if held[place - back] == token]
            if len(agreeing) != len(places):
                if length >= least:
                    found.append((length, places))
                if not agreeing:
                    return
                places = agreeing
            length += 1
            if length == SHALLOW and self._all_agree(places, end, longest):
                length = longest
        at = places[0] - shift
        while length < longest and held[at - length] == end[-1 - length]:
            length += 1
        if length >= least:
            found.append((length, places))

    def _all_agree(self, places: _Places, end: Sequence[int], longest: int) -> bool:
        """Whether all of some places agree with as much of an end as counts: of a text that goes round in circles."""
        held, after, whole = self._tokens, 1 - self._shift, list(end[-longest:])
        return all(held[max(place + after - longest, 0) : place + after] == whole for place in places)

    def after(self, places: Sequence[int], step: int) -> list[int]:
        """The tokens that stand `step` tokens after some places; `END` where the text has ended by then."""
        held, ahead = self._tokens, step - self._shift
        return [held[place + ahead] for place in places]

    def continuation(
        self, end: Sequence[int], most: int, per_match: float = 1.0, min_probability: float = 0.1, least: int = 1
    ) -> Continuation:
        """Return the continuation of the best score: of each context, the most frequent one.

        Args:
            end: As for `contexts`.
            most: The most tokens.
            per_match: The most tokens after a context, per token of it: a longer agreement reaches further.
            min_probability: Where all tokens so far are less likely than this, the continuation ends.
            least: As for `contexts`.
        """
        best = NOTHING
        for length, places in reversed(self.contexts(end, least)):
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
        rests = [held[place + ahead : place + ahead + most] for place in places]
        tokens: list[int] = []
        score, probability, fewer = 0.0, 1.0, True
        while len(tokens) < most:
            at = len(tokens)
            if fewer and rests.count(rests[-1]) == len(rests):
                rest = rests[-1][at:]
                if END in rest:
                    rest = rest[: rest.index(END)]
                return tokens + rest, score + probability * len(rest)
            followers = [rest[at] for rest in rests]
            token, count = most_frequent(followers)
            if token == END:
                # Where most texts end, the likeliest token of the others is next.
                others = [follower for follower in followers if follower != END]
                if not others:
                    break
                token, count = most_frequent(others)
            fewer = count != len(rests)
            if fewer:
                probability *= count / len(rests)
                if probability < min_probability:
                    break
                if score + probability * (most - at) <= to_beat:
                    return (), 0.0
                rests = [rest for rest in rests if rest[at] == token]
            tokens.append(token)
            score += probability
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

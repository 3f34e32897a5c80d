"""When texts are looked up, and who pays for it: plain numbers and a clock that is wound by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_drafters import cycling_model
from test_suffix_drafter import begun, write
from tiny_calls import speculative
from tiny_models import ragged_batch
from tiny_rounds import Notes, phases, round_record

import hf_dsde
from hf_dsde.costs import BatchCosts, CostCurve, CostModel, LiveCosts
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.cost_measurement import CostLearner
from hf_dsde.decoding.drafter import Drafter
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.choice import Choice
from hf_dsde.drafting.hybrid import HybridDrafter
from hf_dsde.drafting.lookup import text_drafter
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.stragglers import AHEAD
from hf_dsde.drafting.lookup.text_drafter import LONGEST_PAUSE, LOOKING_SHARE, TextDrafter

pytestmark = pytest.mark.slow  # nothing here depends on the version of transformers


class Tokens(list[int]):
    """A text as it is."""


class Scripted(TextDrafter[Tokens]):
    """Proposes drafts of given lengths and scores, and has a clock on which a look takes some seconds per row.

    Args:
        monkeypatch: Of the test.
        offers: Length and score of each row's draft.
        seconds: Of a look, per row.
        fixed: Of a look, however many rows it is at.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        offers: Sequence[tuple[int, float]],
        seconds: float = 0.0,
        fixed: float = 0.0,
    ) -> None:
        super().__init__()
        self.offered, self.seconds, self.fixed = list(offers), seconds, fixed
        self.now = 0.0
        self.looks: list[list[int]] = []
        monkeypatch.setattr(text_drafter.time, "perf_counter", lambda: self.now)

    def new_text(self) -> Tokens:
        return Tokens()

    def continuation(self, text: Tokens, most: int) -> Continuation:
        raise NotImplementedError

    def propose(self, sequences: SequenceBatch, most: Sequence[int]) -> list[Continuation]:
        rows = [row for row, n in enumerate(most) if n]
        self.looks.append(rows)
        self.now += self.seconds * len(rows) + self.fixed
        drafts = [Continuation([7] * min(n, most[row]), score) for row, (n, score) in enumerate(self.offered)]
        return [draft if most[row] and draft.tokens else NOTHING for row, draft in enumerate(drafts)]

    def run(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Let a round pass in which rows draft and some tokens stand."""
        rows = len(drafted)
        if any(drafted):
            plan = RoundPlan(drafted, [True] * rows, torch.device("cpu"))
            self.get_candidates(self.call.sequences, plan, None)  # type: ignore[arg-type] # nobody asks it
        self.update_candidate_strategy(self.call.sequences, torch.empty(0), accepted, drafted)


def prices(column: float = 0.1) -> BatchCosts:
    """A plain step takes 1, a further column per row so much."""
    return BatchCosts(None, CostCurve.line(1.0, column))


def rounds_without(drafter: Scripted, costs: BatchCosts) -> int:
    """Look once more, then count the rounds up to the next look."""
    rows = len(drafter.offered)
    before = len(drafter.looks)
    for count in range(1000):
        drafted = drafter.allot([8] * rows, [8] * rows, costs)
        drafter.run(drafted, drafted)
        if len(drafter.looks) == before + 2:
            return count - 1
    return 1000


@pytest.mark.parametrize(
    ("score", "looking", "pause"),
    [
        (0.0, 0.5, 50),  # nothing is found: all of 0.5 is lost, and 50 rounds of 1 later it was 1 %
        (4.0, 1.0, 0),  # four tokens more of each row, for 0.4: 3.6 saved
        (4.0, 3.5, 0),
        (4.0, 4.1, 50),  # 0.5 more than that
        (4.0, 9.0, LONGEST_PAUSE),
    ],
)
def test_what_looks_lose_is_a_small_share_of_the_time(
    score: float, looking: float, pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Scripted(monkeypatch, [(4 if score else 0, score)] * 2, looking / 2)
    begun(drafter, [[3, 4]] * 2)
    drafter._trust._promised = drafter._trust._kept = 1e6
    first = drafter.allot([8, 8], [8, 8], prices())
    assert first == ([4, 4] if score else [0, 0]), "what was found is drafted, whatever finding it took"
    drafter.run(first, first)
    drafter._trust._promised = drafter._trust._kept = 1e6
    drafted = []
    while len(drafter.looks) == 1:
        drafted.append(drafter.allot([8, 8], [8, 8], prices()))
        drafter.run(drafted[-1], drafted[-1])
    assert abs(len(drafted) - 1 - pause) <= 1
    assert not any(any(each) for each in drafted[:-1])


def test_drafts_that_a_plain_step_overtook_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that lost time is followed by rounds without, but what it found is drafted first."""
    drafter = Scripted(monkeypatch, [(4, 2.0)] * 2, 2.0)
    begun(drafter, [[3, 4]] * 2)
    assert drafter.allot([8, 8], [8, 8], prices(0.01)) == [4, 4]
    drafter.run([0, 0], [0, 0])
    assert drafter.allot([8, 8], [8, 8], prices(0.01)) == [4, 4]
    drafter.run([4, 4], [1, 1])
    assert drafter.allot([8, 8], [8, 8], prices(0.01)) == [0, 0]
    assert len(drafter.looks) == 2


def asked_rounds(drafter: Scripted, row: int, rounds: int, accepted: int = 0) -> list[int]:
    """Let rounds pass; return those in which a row was looked up."""
    rows, asked = len(drafter.offered), []
    for turn in range(rounds):
        before = len(drafter.looks)
        drafted = drafter.allot([8] * rows, [8] * rows, prices(0.0))
        if len(drafter.looks) > before and row in drafter.looks[-1]:
            asked.append(turn)
        drafter.run(drafted, [min(n, accepted if place == row else n) for place, n in enumerate(drafted)])
    return asked


DEAR_LOOK = 0.3
"""More than half of what a token of one of two rows takes."""


@pytest.mark.parametrize("offer", [(0, 0.0), (3, 2.0)], ids=["nothing found", "nothing stands"])
def test_a_row_whose_looks_bring_nothing_is_left_out_ever_longer(
    offer: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Scripted(monkeypatch, [offer, (8, 8.0)], DEAR_LOOK)
    begun(drafter, [[3, 4]] * 2)
    assert asked_rounds(drafter, 0, 32) == [0, 1, 3, 7, 15, 23, 31]
    assert all(1 in look for look in drafter.looks), "the other row keeps repeating itself"
    drafter.offered[0] = (3, 2.0)
    assert asked_rounds(drafter, 0, 12, accepted=1) == [7, 8, 9, 10, 11], "and this one does so again"
    drafter.offered[0] = (0, 0.0)
    assert asked_rounds(drafter, 0, 5) == [0, 1, 3], "a change in the middle of a copied passage costs nothing"
    drafter.begin_texts([0])
    assert asked_rounds(drafter, 0, 5) == [0, 1, 3], "another text starts afresh"


def test_looks_without_result_may_take_as_long_as_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's token takes half of a plain step of 1, and so ten looks of 0.049; in small batches rows are not left out.

    The look of a row alone has the same price as one of many.
    """
    drafter = Scripted(monkeypatch, [(0, 0.0), (8, 8.0)], 0.049)
    begun(drafter, [[3, 4]] * 2)
    assert asked_rounds(drafter, 0, 24) == [*range(11), 12, 16]
    drafter.begin_texts([0])
    assert asked_rounds(drafter, 0, 24) == [*range(11), 12, 16]


def test_rows_that_are_not_looked_up_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Scripted(monkeypatch, [(8, 8.0), (8, 8.0)], DEAR_LOOK)
    begun(drafter, [[3, 4]] * 2)
    lengths = []
    for _ in range(8):
        lengths.append(drafter.allot([8, 8], [8, 8], prices(0.0)))
        drafter.run(lengths[-1], [0, lengths[-1][1]])
    assert lengths == [[8, 8], [8, 8], [0, 8], [8, 8], [0, 8], [0, 8], [0, 8], [8, 8]]


def test_a_look_that_was_overtaken_says_nothing_about_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Scripted(monkeypatch, [(3, 2.0)])
    begun(drafter, [[3, 4]])
    for _ in range(6):
        assert drafter.allot([8], [8], prices(0.0)) == [3]
        drafter.run([0], [0])


def test_the_first_look_at_prompts_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes as long as hundreds of looks, and has to be done but once."""
    drafter = Scripted(monkeypatch, [(0, 0.0)] * 2)
    begun(drafter, [[3, 4]] * 2)
    original = drafter._read

    def read(row: int) -> Tokens:
        drafter.now += 50.0
        return original(row)

    monkeypatch.setattr(drafter, "_read", read)
    for expected in (100.0, 0.0):
        assert drafter.allot([8, 8], [8, 8], prices()) == [0, 0]
        assert drafter.looking_seconds == expected
        drafter.run([0, 0], [0, 0])
    assert len(drafter.looks) == 2


@pytest.mark.parametrize(
    ("column", "refilled", "looked"), [(0.3, False, [1]), (0.3, True, [0, 1]), (0.2, False, [0, 1])]
)
def test_where_columns_are_dear_rows_that_are_ahead_wait(
    column: float, refilled: bool, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless other texts take the places of those that end, or columns cost less than a quarter of a pass."""
    drafter = Scripted(monkeypatch, [(8, 8.0)] * 2)
    sequences = begun(drafter, [[3, 4]] * 2, new_tokens=90)
    sequences.texts_left = int(refilled)
    write(sequences, [[5] * (AHEAD + 2), [5]])
    drafter.allot([8, 8], [8, 8], prices(column))
    assert drafter.looks == [looked]


@pytest.mark.parametrize(
    ("texts_left", "models_drafts", "looked"), [(0, 0, [1]), (1, 0, [0, 1]), (1, 4, [1]), (2, 4, [0, 1])]
)
def test_beside_a_model_rows_that_are_ahead_wait_unless_each_has_a_text_to_come(
    texts_left: int, models_drafts: int, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Scripted(monkeypatch, [(8, 8.0)] * 2)
    sequences = begun(drafter, [[3, 4]] * 2, new_tokens=90)
    sequences.texts_left = texts_left
    write(sequences, [[5] * (AHEAD + 2), [5]])
    drafter.look([8, 8], [8, 8], prices(0.3), lambda *_: Choice(frozenset(), True), models_drafts)
    assert drafter.looks == [looked]


def test_drafts_save_no_more_than_most_rows_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in four repeats itself: the batch ends as late as without it, and all of a look is lost."""
    drafter = Scripted(monkeypatch, [(8, 8.0), *[(0, 0.0)] * 3], fixed=0.1)
    begun(drafter, [[3, 4]] * 4, new_tokens=90)
    for _ in range(60):
        drafted = drafter.allot([8] * 4, [8] * 4, prices(0.3))
        drafter.run(drafted, drafted)
    assert len(drafter.looks) < 30
    drafter = Scripted(monkeypatch, [(8, 8.0)] * 4, fixed=0.1)
    begun(drafter, [[3, 4]] * 4, new_tokens=90)
    for _ in range(60):
        drafted = drafter.allot([8] * 4, [8] * 4, prices(0.3))
        drafter.run(drafted, drafted)
    assert len(drafter.looks) == 60


def test_matches_are_trusted_by_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Scripted(monkeypatch, [])
    begun(drafter, [[3, 4]] * 2)
    for _ in range(30):
        drafter.judge([Continuation([7], 1.0, 1), Continuation([7] * 8, 8.0, 8)], [0, 8])
    trusts = drafter.trusts
    assert trusts[1] < 0.35
    assert 0.8 < trusts[4] <= 1.0
    assert drafter.trust == pytest.approx((8 + 240) / (16 + 270))
    assert trusts[2] == pytest.approx(drafter.trust), "of matches that nobody saw, what is known of all"


def test_texts_are_read_beside_passes_while_nobody_is_looked_up() -> None:
    drafter = hf_dsde.SuffixDrafter(share_answers=False)
    sequences = begun(drafter, [[5, 6, 7], [8, 9]], new_tokens=600)
    nobody = torch.zeros(2).bool()
    drafter.stage_next(nobody, 9, None)
    assert drafter._texts == [None, None], "a row that nobody asks for costs nothing"
    drafter.propose(sequences, [4, 0])
    write(sequences, [[1] * 4, [2] * 4])
    drafter.stage_next(nobody, 9, None)
    assert len(drafter._texts[0] or []) == 7
    assert drafter._texts[1] is None
    assert [list(each.tokens) for each in drafter.propose(sequences, [2, 2])] == [[1, 1], [2, 2]]


class Model(Drafter):
    """Stands for a model that drafts what the policy wants; it proposes nothing itself."""

    def get_candidates(self, *_: Any) -> CandidateBatch:
        raise NotImplementedError


ROWS, STEPS = 128, 4


class SimulatedJob:
    """A hybrid in rounds of made-up seconds: steps of 0.5 ms, passes of 6.5 ms and 1.4 for each further column per row.

    The model's drafts bring 2.2 tokens each. Some rows have texts of 8 tokens, of which a few stand.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: float, every: int, stand: int) -> None:
        offers = [(0 if row % every else 8, 0.0 if row % every else 6.0) for row in range(ROWS)]
        self.text, self.stand = Scripted(monkeypatch, offers, fixed=look), stand
        self.hybrid = HybridDrafter(self.text, Model())  # type: ignore[arg-type] # as far as it is asked
        begun(self.hybrid, [[3, 4]] * ROWS)
        verify = CostCurve((1, 2, 3, 5, 9), tuple(self.verify(ROWS * width) for width in (1, 2, 3, 5, 9)))
        self.costs = LiveCosts(CostModel({ROWS: BatchCosts(CostCurve.line(5e-4, 5e-4), verify)}), ROWS)
        self.seconds = self.tokens = 0.0
        self.model_rounds = 0
        self._numbers = 0

    def verify(self, tokens: int) -> float:
        return 0.0065 + 0.0014 * max(tokens / ROWS - 1, 0)

    def model_accepts(self) -> int:
        """2.2 in the mean."""
        self._numbers += 1
        return (4, 1, 3, 0, 3)[self._numbers % 5]

    def round(self) -> None:
        lengths = self.hybrid.allot([STEPS] * ROWS, [9] * ROWS, self.costs.current)
        copied = [bool(draft.tokens) for draft in self.hybrid._drafts]
        steps = STEPS if any(n and not taken for n, taken in zip(lengths, copied, strict=True)) else 0
        accepted = [
            self.stand if taken else self.model_accepts() if n else 0 for n, taken in zip(lengths, copied, strict=True)
        ]
        accepted = [min(pair) for pair in zip(accepted, lengths, strict=True)]
        self.hybrid._drafted = self.hybrid._drafts
        self.hybrid.update_candidate_strategy(self.text.call.sequences, torch.empty(0), accepted, lengths)
        look = self.hybrid.looking_seconds
        tokens = ROWS + sum(lengths)
        times = phases(draft=look + 5e-4 * steps, verify=self.verify(tokens))
        record = round_record(
            lengths, accepted, draft_steps=steps, times=times, looks=phases(draft=look), packed_tokens=tokens
        )
        CostLearner(self.costs).on_round(record)
        self.seconds += times.total
        self.tokens += ROWS + sum(accepted)
        self.model_rounds += steps > 0


@pytest.mark.parametrize(
    ("look", "every", "stand"),
    [
        (0.0045, 8, 3),
        (0.02, 8, 3),
        (0.0015, 6, 6),  # looks are worth it, and made in every round
    ],
)
def test_where_looking_is_dear_the_model_is_not_left_out(
    look: float, every: int, stand: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SimulatedJob(monkeypatch, look, every, stand)
    for _ in range(150):
        job.round()
    assert job.model_rounds == 150
    assert job.costs.current.draft_seconds(STEPS) == pytest.approx(STEPS * 5e-4, rel=0.05)
    alone = ROWS * 3.2 / (STEPS * 5e-4 + job.verify(ROWS * (1 + STEPS)))
    assert job.tokens / job.seconds > 0.97 * alone


def test_a_draft_step_is_not_charged_with_looks() -> None:
    """Nor is every round, where host and device take turns and looks lie in the bookkeeping."""
    looked, not_looked = (LiveCosts(CostModel.relative(0.1, [1.0, 1.1]), 1) for _ in range(2))
    for _ in range(5):
        times = phases(draft=5.2, verify=1.1, bookkeeping=3.3)
        record = round_record([2], [1], draft_steps=2, pass_width=2, times=times, looks=phases(5.0, 0.0, 3.0))
        CostLearner(looked).on_round(record)
        times = phases(draft=0.2, verify=1.1, bookkeeping=0.3)
        CostLearner(not_looked).on_round(round_record([2], [1], draft_steps=2, pass_width=2, times=times))
    assert looked.current.draft_seconds(2) == pytest.approx(not_looked.current.draft_seconds(2))
    assert looked.current.overhead == pytest.approx(not_looked.current.overhead)
    record = round_record([2], [1], times=phases(draft=1.0), looks=phases(draft=2.0))
    assert 0 < record.charged_times.draft < 0.1, "clocks differ, and no step is free"
    assert record.times.draft == 1.0
    assert LOOKING_SHARE < 0.03


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("overlapping", [False, True])
def test_rounds_say_what_looks_took(overlapping: bool, with_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look comes before its round: in its draft phase where rounds follow each other on the device, or else in the
    bookkeeping of the round before. The first one lies before all rounds."""
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: overlapping)
    monkeypatch.setattr(TextDrafter, "looking_seconds", property(lambda _: 0.5))
    target, notes = cycling_model(), Notes()
    draft = ["suffix", target] if with_model else "suffix"
    speculative(target, draft, ragged_batch([5, 8]), "static", max_new_tokens=20, speculation_listeners=[notes])
    assert len(notes.events) > 2
    looks = [record.looks for record in notes.events]
    assert looks[1:] == [phases(draft=0.5) if overlapping else phases(bookkeeping=0.5)] * (len(looks) - 1)
    assert looks[0] == (phases() if overlapping else phases(bookkeeping=0.5))
    model_alone = Notes()
    inputs = ragged_batch([5, 8])
    speculative(target, target, inputs, "static", max_new_tokens=20, speculation_listeners=[model_alone])
    assert {record.looks for record in model_alone.events} == {phases()}

"""What a plain step has overtaken of a text's draft is drafted in the next round, and no round waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled_law import toy_model
from test_drafters import law_p_value
from test_looks import Scripted, begun, prices
from tiny_calls import QUIET, compared, config_of, plain
from tiny_models import VOCABULARY, ragged_batch, tiny_model
from tiny_text import tiny_tokenizer
from torch import Tensor
from two_drafters import LENGTHS, Knowing, known

import hf_dsde
from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.drafting.lookup.continuation import NOTHING, Continuation
from hf_dsde.drafting.lookup.left_over import LeftOver

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
GRAPH = config_of(QUIET, runner="graph")
ROW = st.tuples(
    st.lists(st.integers(1, 3), max_size=5),  # its draft
    st.integers(1, 3),  # the token that it gets
    st.booleans(),  # whether it goes on
    st.integers(1, 6),  # tokens that it may emit
)


class Hurried(Knowing):
    """No round waits for what it finds."""

    waits = False  # type: ignore[assignment] # a property of all others


def enabled(family: str = "llama") -> Any:
    target = tiny_model(family)
    hf_dsde.enable(target)
    return target


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CandidateBatch, list[Continuation]]]:
    """Let the loop work as on a GPU; the list has what was left over: as the device has it, and as the host does."""
    found: list[tuple[CandidateBatch, list[Continuation]]] = []
    own = LeftOver.standing

    def standing(self: LeftOver, sequences: SequenceBatch, most: Sequence[int]) -> list[Continuation]:
        candidates = self.candidates
        assert candidates is not None
        drafts = own(self, sequences, most)
        found.append((candidates, drafts))
        return drafts

    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    monkeypatch.setattr(LeftOver, "standing", standing)
    return found


def agree(candidates: CandidateBatch, drafts: Sequence[Continuation]) -> bool:
    """Whether device and host draft the same."""
    lengths = candidates.lengths.tolist()
    rows = zip(lengths, candidates.tokens.tolist(), drafts, strict=True)
    return all(tokens[:length] == list(draft.tokens) for length, tokens, draft in rows)


@given(st.lists(ROW, min_size=1, max_size=4))
def test_device_and_host_let_the_same_rows_go_on(rows: list[tuple[list[int], int, bool, int]]) -> None:
    tokens = torch.tensor([[token] for _, token, _, _ in rows])
    sequences = SequenceBatch(torch.ones_like(tokens), torch.ones_like(tokens), 6, scratch=9, pad_token=0)
    sequences.limits = torch.tensor([limit for *_, limit in rows])
    going_on = torch.tensor([on for _, _, on, _ in rows])
    drafts = [Continuation(draft, 0.7 * len(draft), 1) if draft else NOTHING for draft, *_ in rows]
    left = LeftOver()
    sequences.append(tokens, torch.ones(len(rows), dtype=torch.long))
    candidates = left.offer(drafts, sequences, going_on)
    if max(len(draft) for draft, *_ in rows) < 2:
        assert candidates is None
        return
    assert candidates is not None
    # One token has been emitted, and the target adds one of its own.
    room = [max(limit - 2, 0) if on else 0 for *_, on, limit in rows]
    expected = [draft[1 : 1 + n] * (draft[:1] == [token]) for (draft, token, *_), n in zip(rows, room, strict=True)]
    lengths = candidates.lengths.tolist()
    assert [line[:n] for line, n in zip(candidates.tokens.tolist(), lengths, strict=True)] == expected
    assert all(n <= bound for n, bound in zip(lengths, candidates.host_lengths or (), strict=True))
    sequences.synchronise(sequences.generated.tolist(), tokens)
    standing = left.standing(sequences, room)
    assert [list(draft.tokens) for draft in standing] == expected
    assert all(0 <= draft.score <= len(draft.tokens) for draft in standing)
    taken = left.take([len(draft.tokens) for draft in standing])
    assert (taken is not None) == any(expected)
    assert left.take([0] * len(rows)) is None


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
def test_the_text_is_the_targets_own(family: str, offered: list[tuple[CandidateBatch, list[Continuation]]]) -> None:
    target = enabled(family)
    inputs = ragged_batch(LENGTHS)
    drafter = Hurried(*known(target, inputs, 60)[:3], longest=5)
    output = compared(target, drafter, inputs, hf_dsde.StaticPolicy(4), GRAPH, max_new_tokens=60)
    assert sum(any(draft.tokens for draft in drafts) for _, drafts in offered) > 5
    assert all(agree(*each) for each in offered)
    assert output.speculation_statistics.accepted > 20


def test_a_pass_over_drafts_that_do_not_follow_is_a_plain_step(
    offered: list[tuple[CandidateBatch, list[Continuation]]],
) -> None:
    class Wrong(Hurried):
        def continuation(self, text: Any, most: int) -> Continuation:
            return Continuation([VOCABULARY - 1] * min(most, 3), 3.0, 1)

    output = compared(enabled(), Wrong(), ragged_batch(LENGTHS), hf_dsde.StaticPolicy(4), GRAPH, max_new_tokens=40)
    assert len(offered) > 5
    assert not any(draft.tokens for _, drafts in offered for draft in drafts)
    widths = [counts.pass_width for counts in output.speculation_statistics.rounds]
    assert widths.count(3) >= len(offered) - 1, "two tokens were left of three"


def test_the_drafted_pass_begins_before_the_host_knows(
    offered: list[tuple[CandidateBatch, list[Continuation]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are those of the proposal that the target then judges."""
    judged: list[Tensor] = []
    own = run_ahead.RunAhead.run_target

    def run_target(self: Any, candidates: CandidateBatch, plan: Any) -> Any:
        if self._left_over is not None and self.begun:
            judged.append(candidates.tokens)
        return own(self, candidates, plan)

    monkeypatch.setattr(run_ahead.RunAhead, "run_target", run_target)
    target = enabled()
    inputs = ragged_batch(LENGTHS)
    drafter = Hurried(*known(target, inputs, 40), longest=5)
    compared(target, drafter, inputs, hf_dsde.StaticPolicy(4), GRAPH, max_new_tokens=40)
    assert len(judged) > 5
    assert all(any(tokens is candidates.tokens for candidates, _ in offered) for tokens in judged)


def test_sampled_text_has_the_targets_law(offered: list[tuple[CandidateBatch, list[Continuation]]]) -> None:
    class Likely(Hurried):
        def continuation(self, text: Any, most: int) -> Continuation:
            tokens = [(text[-1] + step) % 5 for step in range(min(most, 3))]
            return Continuation(tokens, float(len(tokens)), 1)

    target = toy_model(5)
    hf_dsde.enable(target, assistant_model=Likely(), speculation_config=GRAPH)
    try:
        assert law_p_value(Likely(), rows=1024, depth=4, max_new_tokens=6) > 1e-4
    finally:
        hf_dsde.disable(target)
    assert sum(any(draft.tokens for draft in drafts) for _, drafts in offered) > 0


def test_a_job_gives_what_each_prompt_gives_alone(offered: list[tuple[CandidateBatch, list[Continuation]]]) -> None:
    target = enabled()
    prompts = torch.randint(3, VOCABULARY, (9, 5), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [plain(target, {"input_ids": torch.tensor([p])}, max_new_tokens=24)[0].tolist() for p in prompts]
    generator = hf_dsde.BatchGenerator(
        target,
        tiny_tokenizer(),
        assistant_model=Hurried(*texts, longest=4),
        speculation_policy="static",
        speculation_config=GRAPH,
        batch_size=3,
        max_new_tokens=24,
    )
    results = list(generator.stream([{"input_ids": prompt} for prompt in prompts], ordered=True))
    assert [result.token_ids for result in results] == [text[5:] for text in texts]
    assert all(agree(*each) for each in offered)
    assert sum(any(draft.tokens for draft in drafts) for _, drafts in offered) > 5


@pytest.mark.parametrize(("score", "waits"), [(0.1, False), (3.0, True)])
def test_the_device_waits_while_looks_save_half_a_plain_round(
    score: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = Scripted(monkeypatch, [(3, score)] * 2)
    begun(drafter, [[3, 4]] * 2)
    assert drafter.waits, "before anything is known"
    for _ in range(20):
        drafted = drafter.allot([8, 8], [8, 8], prices(0.0))
        drafter.run(drafted, [round(score)] * 2 if any(drafted) else [0, 0])
    assert drafter.waits == waits


def test_nobody_waits_for_looks_that_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Scripted(monkeypatch, [(0, 0.0)] * 2, seconds=0.5)
    begun(drafter, [[3, 4]] * 2)
    assert drafter.waits
    drafter.allot([8, 8], [8, 8], prices())
    assert not drafter.waits

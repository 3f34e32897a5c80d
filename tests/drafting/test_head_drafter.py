"""A head drafts what it would draft if everything were computed again from the whole text, and the text stays exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import QUIET, config_of, endless_model, speculative
from tiny_heads import guessed_ids, other_head, reference_draft, tiny_head
from tiny_models import ragged_batch
from tiny_policies import RandomLengths, ScriptedLengths
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde import signals
from hf_dsde.decoding import loop, run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.draft_monitor import DraftMonitor
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.sequences import SequenceBatch
from hf_dsde.decoding.verification import VerifiedBlock
from hf_dsde.drafting import head as heads
from hf_dsde.drafting.head import HeadDrafter
from hf_dsde.policies import Signal, StoppingPolicy

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

LENGTHS = [1, 7, 2, 13]
OTHERWISE = r"after \d+ tokens|not close"
"""What the comparison says where a proposal is not the reference's."""


class Watched(RandomLengths):
    """Random lengths of a policy that looks at distributions."""

    requires = frozenset({Signal.KLD})


class AnyEnd:
    """Stands for verification: any number of draft tokens stands, and any token follows."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, scores: Tensor, candidates: CandidateBatch, **_: Any) -> VerifiedBlock:
        draws = torch.rand(len(scores), generator=self._generator)
        accepted = (draws * (candidates.lengths + 1)).long()
        return VerifiedBlock(accepted, torch.randint(3, self._vocabulary, (len(scores),), generator=self._generator))


class Noted:
    """Every proposal of a call, to be compared with the reference after it.

    Attributes:
        proposals: A text, what was drafted after it, and the logits, if anybody asked for them.
        begun: How many proposals began with a pass that was under way already.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proposals: list[tuple[list[int], list[int], Tensor | None]] = []
        self.begun = 0
        original = HeadDrafter.get_candidates

        def get_candidates(
            drafter: HeadDrafter, sequences: SequenceBatch, plan: RoundPlan, monitor: DraftMonitor
        ) -> CandidateBatch:
            self.begun += drafter._prepared is not None
            candidates = original(drafter, sequences, plan, monitor)
            self.add(sequences, candidates)
            return candidates

        monkeypatch.setattr(HeadDrafter, "get_candidates", get_candidates)

    def add(self, sequences: SequenceBatch, candidates: CandidateBatch) -> None:
        for row, length in enumerate(candidates.lengths.tolist()):
            if length:
                logits = None if candidates.logits is None else candidates.logits.over_target()[row, :length]
                drafted = candidates.tokens[row, :length].tolist()
                self.proposals.append((sequences.host_text(row), drafted, logits))

    def check(self, target: PreTrainedModel, head: Any) -> None:
        outside = torch.ones(head.config.vocab_size, dtype=torch.bool)
        outside[guessed_ids(head)] = False
        for text, drafted, logits in self.proposals:
            best, expected = reference_draft(target, head, text, drafted)
            assert drafted == best, f"after {len(text)} tokens"
            if logits is not None:
                torch.testing.assert_close(logits[:, guessed_ids(head)], expected.float(), rtol=1e-5, atol=1e-5)
                assert (logits[:, outside] == signals.UNKNOWN_TOKEN_LOGIT).all()


def checked_call(
    monkeypatch: pytest.MonkeyPatch,
    target: PreTrainedModel,
    head: Any,
    policy: StoppingPolicy,
    lengths: list[int] = LENGTHS,
    *,
    overlapping: bool = True,
    config: Any = QUIET,
    **arguments: Any,
) -> None:
    """Let a head draft for texts that go on in any way, and compare each proposal with the reference."""
    if overlapping:
        monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    monkeypatch.setattr(loop, "verify", AnyEnd(target.config.get_text_config().vocab_size))
    noted = Noted(monkeypatch)
    speculative(target, head, ragged_batch(lengths), policy, config, **{"max_new_tokens": 26, **arguments})
    assert len(noted.proposals) > 10
    assert bool(noted.begun) == overlapping
    noted.check(target, head)


@pytest.mark.parametrize(
    ("kind", "watched", "overlapping"),
    [("llama", False, False), ("llama", True, True), ("qwen3", False, True), ("qwen3", True, False)],
)
def test_every_proposal_is_that_of_the_whole_text(
    kind: str, watched: bool, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = endless_model()
    head = tiny_head(target, kind=kind, draft_vocabulary=60)
    policy = Watched(5, stop_probability=0.2) if watched else RandomLengths(5)
    checked_call(monkeypatch, target, head, policy, overlapping=overlapping)


@pytest.mark.parametrize("runner", [{}, {"fused_layers": False}], ids=["fused", "recorded"])
def test_recorded_passes_propose_the_same(
    runner: dict[str, Any], recording: list[NotingCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = endless_model()
    head = tiny_head(target, draft_vocabulary=60)
    config = config_of(QUIET, **runner)
    checked_call(monkeypatch, target, head, Watched(4), config=config, max_new_tokens=24)
    assert len(recording) == 2
    assert all(capture.recorded for capture in recording)


SETTINGS: dict[str, dict[str, Any]] = {
    "normed": {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
    "normed before fc": {"norm_before_fc": True},
    "two layers": {"config": {"num_hidden_layers": 2}},
    "sliding": {
        "kind": "qwen3",
        "config": {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    },
    "one layer of the target": {"layers": (1,)},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("runner", [None, "graph"])
@pytest.mark.usefixtures("recording")
def test_every_kind_of_head(settings: dict[str, Any], runner: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    target = endless_model()
    config = config_of(QUIET, runner=runner or "eager")
    head = tiny_head(target, **settings)
    checked_call(monkeypatch, target, head, Watched(4), [1, 5, 9], config=config, max_new_tokens=20)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma3", "gpt2", "mixtral", "gpt_oss"])
def test_every_target(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "PROJECTED_AT_ONCE", 5)
    target = endless_model(family)
    checked_call(monkeypatch, target, tiny_head(target), Watched(4), [1, 12, 3], max_new_tokens=16)


@pytest.mark.parametrize("runner", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.usefixtures("recording")
def test_heads_of_other_kinds(kind: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = endless_model()
    config = config_of(QUIET, runner=runner)
    checked_call(monkeypatch, target, other_head(target, kind), Watched(4), [1, 5, 9], config=config, max_new_tokens=16)


def test_after_more_plain_rounds_than_the_ring_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that draft at last, rows that sit out meanwhile, and rounds of one row alone."""
    monkeypatch.setattr(heads, "SMALLEST_RING", 12)
    script = [[3, 3, 0], *[[0, 0, 0]] * 40, [0, 0, 2], *[[0, 4, 0]] * 15, [2, 3, 4], [0, 0, 0], [1, 0, 4]]
    target = endless_model()
    head = tiny_head(target)
    config = config_of(QUIET, max_draft_length=5)
    checked_call(monkeypatch, target, head, ScriptedLengths(script), [1, 6, 3], config=config, max_new_tokens=90)


def skewed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are counted from another end."""
    layers = property(lambda drafter: tuple(min(n + 1, 2) for n in drafter._head.feature_layers))
    monkeypatch.setattr(HeadDrafter, "hidden_layers", layers)


def shifted_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is put together with the state after it."""
    original = HeadDrafter._text_block

    def text_block(self: HeadDrafter, width: int) -> Any:
        self._ring = self._ring.roll(-1, 1)
        block = original(self, width)
        self._ring = self._ring.roll(1, 1)
        return block

    monkeypatch.setattr(HeadDrafter, "_text_block", text_block)


def unshifted_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are stored with the token of the state's own position."""
    original = SequenceBatch.tokens_at

    def tokens_at(self: SequenceBatch, spans: Any) -> Tensor:
        return original(self, [type(span)(span.row, max(span.start - 1, 0), span.count) for span in spans])

    monkeypatch.setattr(SequenceBatch, "tokens_at", tokens_at)


def kept_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the ring of a rejected token stays."""
    original = HeadDrafter.accept

    def accept(self: HeadDrafter, verified: VerifiedBlock, hidden: tuple[Tensor, ...]) -> None:
        before, first = self._ring.clone(), self.call.sequences.lengths[:, None] - 1
        original(self, verified, hidden)
        end = getattr(self, "_end", torch.zeros_like(first))
        positions = first + torch.arange(hidden[0].shape[1])
        for row, column in ((positions < end) & (positions > 0)).nonzero().tolist():
            place = positions[row, column] % self._size
            self._ring[row, place] = before[row, place]
        self._end = torch.maximum(end, positions[:, -1:] + 1)

    monkeypatch.setattr(HeadDrafter, "accept", accept)


def kept_own_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drafted and accepted counts as stored."""
    monkeypatch.setattr(
        HeadDrafter, "_held", lambda self, length, matches, drafted: length + min(matches, max(drafted - 1, 0))
    )
    monkeypatch.setattr(HeadDrafter, "_staged_width", lambda self: 2)


def chain_from_the_first_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a chain is fed the state of the first."""
    original = HeadDrafter._stage

    def stage(self: HeadDrafter, ends: Tensor, tokens: Tensor, position: int, drafting: Tensor, before: Any) -> Any:
        self._first = before if position == 1 else self._first
        return original(self, ends, tokens, position, drafting, self._first)

    monkeypatch.setattr(HeadDrafter, "_stage", stage)


@pytest.mark.parametrize(
    "mutate",
    [
        skewed_layers,
        shifted_pairs,
        unshifted_prompts,
        kept_states,
        kept_own_states,
        chain_from_the_first_state,
    ],
)
def test_the_reference_catches_mutants(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    target = endless_model()
    with pytest.raises(AssertionError, match=OTHERWISE):
        checked_call(monkeypatch, target, tiny_head(target, draft_vocabulary=60), Watched(5))


def test_the_reference_catches_a_ring_that_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadDrafter, "_store_missing", lambda self, rows: False)
    with pytest.raises(AssertionError, match=OTHERWISE):
        test_after_more_plain_rounds_than_the_ring_holds(monkeypatch)

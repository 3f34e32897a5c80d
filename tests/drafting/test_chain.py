"""A chain of replayed steps drafts what as many single passes draft, for whatever rows are in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import NotingCapture
from tiny_calls import QUIET, config_of, end_tokens, endless_model, speculative
from tiny_heads import other_head, tiny_head
from tiny_models import AGREEMENT, noisy_copy, ragged_batch, tiny_model
from tiny_policies import ScriptedLengths
from torch import Tensor
from transformers import PreTrainedModel

from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.drafting.chain import ChainDrafter
from hf_dsde.execution import graph_runner
from hf_dsde.execution.fused_families import why_not_fused
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.recorded_chain import Chain, ChainStep, DraftedChain
from hf_dsde.execution.workspaces import RecordedPass
from hf_dsde.policies import Signal

pytestmark = pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")

LENGTHS = [1, 9, 4, 17]
Rows = tuple[int, int]
Drafts = dict[tuple[int, ...], list[tuple[int, Tensor]]]
"""By the text they were drafted after: tokens, with the logits they were chosen from where those are kept."""
LEAVING: list[Rows] = [(1, 2), (0, 3)]
PAIRS: dict[str, tuple[str, Callable[[PreTrainedModel], PreTrainedModel]]] = {
    "head": ("llama", lambda target: tiny_head(target, draft_vocabulary=60)),
    "whole vocabulary": ("llama", lambda target: tiny_head(target, kind="qwen3", norm_output=True, fc_norm=True)),
    "short context": ("llama", lambda target: tiny_head(target, config={"max_position_embeddings": 24})),
    "mtp": ("llama", lambda target: other_head(target, "mtp")),
    "model": ("llama", lambda target: noisy_copy(target, AGREEMENT["half"])),
    "larger vocabulary": ("llama", lambda _: tiny_model(vocab_size=120)),
    "smaller vocabulary": ("llama", lambda _: tiny_model(vocab_size=80)),
    "learned positions": ("llama", lambda _: tiny_model("gpt2", max_position_embeddings=30)),
    "sliding window": ("mistral", lambda target: noisy_copy(target, AGREEMENT["half"])),
}


def script(rows: int = len(LENGTHS), longest: int = 5) -> list[list[int]]:
    """Lengths of many rounds, some without drafts; no row stops inside of one."""
    draws = random.Random(4)
    return [[draws.randint(0, longest) * (draws.random() < 0.9) for _ in range(rows)] for _ in range(60)]


class WatchedLengths(ScriptedLengths):
    """Looks at the divergence of what it lets rows draft."""

    requires = frozenset({Signal.KLD})


def proposals(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    leaving: Rows,
    monkeypatch: pytest.MonkeyPatch,
    lengths: type[ScriptedLengths] = ScriptedLengths,
    **settings: Any,
) -> Drafts:
    """What a call drafts. Two rows leave: the texts of `leaving` end early."""
    found: Drafts = {}
    original = ChainDrafter.get_candidates

    def get_candidates(drafter: ChainDrafter, sequences: Any, plan: Any, monitor: Any) -> CandidateBatch:
        candidates = original(drafter, sequences, plan, monitor)
        assert candidates.host_lengths == candidates.lengths.tolist()
        assert candidates.width == max(candidates.host_lengths)
        assert candidates.steps >= candidates.width  # those count that began too early and were not wanted
        assert (candidates.logits is None) == (lengths is ScriptedLengths)
        logits = candidates.tokens[..., None] if candidates.logits is None else candidates.logits.over_target()
        for row, length in enumerate(candidates.host_lengths):
            if length:
                tokens = candidates.tokens[row, :length].tolist()
                found[tuple(sequences.host_text(row))] = list(zip(tokens, logits[row], strict=False))
        return candidates

    config = config_of(QUIET, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(ChainDrafter, "get_candidates", get_candidates)
        patch.setattr(run_ahead, "overlaps", lambda device: True)
        inputs, policy = ragged_batch(LENGTHS), lengths(script())
        ends = end_tokens(target, inputs, (leaving[0], 5), (leaving[1], 8))
        speculative(target, draft, inputs, policy, config, max_new_tokens=22, eos_token_id=ends)
    assert len(found) > 8
    return found


def same(found: Drafts, expected: Drafts) -> bool:
    """Whether two calls draft the same where both draft; which rounds do may depend on what had begun before."""
    common = found.keys() & expected.keys()
    assert len(common) > 8
    pairs = [pair for text in common for pair in zip(found[text], expected[text], strict=False)]
    return all(a == b and torch.allclose(x, y, rtol=1e-5, atol=1e-6) for (a, x), (b, y) in pairs)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and steps of each chain that was drafted without the host."""
    ran: list[tuple[int, int]] = []
    original = GraphRunner._drafted

    def noted(self: GraphRunner, chain: Chain, *, ahead: bool) -> DraftedChain | None:
        drafted = original(self, chain, ahead=ahead)
        if drafted is not None:
            ran.append((len(self.live_rows), chain.steps))
        return drafted

    monkeypatch.setattr(GraphRunner, "_drafted", noted)
    return ran


@pytest.mark.parametrize(
    ("kind", "fused"),
    [*((kind, True) for kind in PAIRS), ("head", False), ("short context", False), ("smaller vocabulary", False)],
)
def test_proposals_are_those_of_single_passes(
    kind: str,
    fused: bool,
    recording: list[NotingCapture],
    chains: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_runner, "CAPACITY_STEP", 16)  # the cache grows on the way
    family, make = PAIRS[kind]
    target = endless_model(family)
    draft = make(target)
    for leaving in LEAVING:  # the second call finds what the first has recorded
        expected = proposals(target, draft, leaving, monkeypatch, runner="eager")
        ran = len(chains)
        assert same(proposals(target, draft, leaving, monkeypatch, runner="graph", fused_layers=fused), expected)
        assert len(chains) > ran
        assert [capture.recorded for capture in recording[2:]] == []
    assert len({steps for _, steps in chains}) > 2
    rows_leave = fused and why_not_fused(draft) is None
    assert (len({rows for rows, _ in chains}) > 1) == rows_leave  # a recorded pass of the model's own keeps all rows


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "recorded"])
@pytest.mark.parametrize("kind", ["head", "model", "larger vocabulary", "smaller vocabulary"])
@pytest.mark.usefixtures("recording")
def test_what_a_chain_chose_from_is_kept_for_who_wants_it(
    kind: str, fused: bool, chains: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, make = PAIRS[kind]
    target = endless_model(family)
    draft = make(target)
    expected = proposals(target, draft, LEAVING[0], monkeypatch, WatchedLengths, runner="eager")
    assert not chains
    found = proposals(target, draft, LEAVING[0], monkeypatch, WatchedLengths, runner="graph", fused_layers=fused)
    assert same(found, expected)
    assert len({steps for _, steps in chains}) > 2


@pytest.mark.usefixtures("recording")
def test_drafts_longer_than_a_chain_are_drafted_step_by_step(
    chains: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "LONGEST_CHAIN", 4)
    target = endless_model()
    head = tiny_head(target)
    expected = proposals(target, head, LEAVING[0], monkeypatch, runner="eager")
    assert same(proposals(target, head, LEAVING[0], monkeypatch, runner="graph"), expected)
    assert {steps for _, steps in chains} == {1, 2, 3}


def stuck_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps write to one slot."""
    original = ChainStep.aim

    def aim(self: ChainStep) -> None:
        original(self)
        self.places.sub_(1)

    monkeypatch.setattr(ChainStep, "aim", aim)


def stale_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is fed the state of the first."""
    original = ChainStep.feed

    def feed(self: ChainStep, model: Any, output: Any) -> None:
        states = self.buffers.states.clone()
        original(self, model, output)
        self.buffers.states.copy_(states)

    monkeypatch.setattr(ChainStep, "feed", feed)


def stale_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have left are still run."""
    monkeypatch.setattr(RecordedPass, "follow_rows", lambda self, live, choice: None)


def early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end a token before they have drafted all."""
    original = ChainStep.begin

    def begin(self: ChainStep, *arguments: Any) -> None:
        original(self, *arguments)
        self.ends.sub_(1)

    monkeypatch.setattr(ChainStep, "begin", begin)


@pytest.mark.parametrize("mutate", [stuck_places, stale_states, stale_rows, early_end])
@pytest.mark.usefixtures("recording")
def test_single_passes_catch_mutants(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = endless_model()
    head = tiny_head(target, draft_vocabulary=60)
    expected = [proposals(target, head, leaving, monkeypatch, runner="eager") for leaving in LEAVING]
    mutate(monkeypatch)
    found = [proposals(target, head, leaving, monkeypatch, runner="graph") for leaving in LEAVING]
    assert not all(map(same, found, expected))

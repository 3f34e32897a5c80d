"""Chains that begin before the host knows how long they have to be draft what they would have drafted later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_launches import DRAFTS
from tiny_calls import QUIET, config_of, endless_model, speculative
from tiny_models import ragged_batch
from tiny_policies import ScriptedLengths

from hf_dsde.decoding import run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.recorded_chain import BegunChain, Chain, DraftedChain
from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.policies import RoundOutcome, Signal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.usefixtures("recording"),
]
LENGTHS = [[3, 3, 3], [3, 1, 2], [5, 2, 5], [2, 2, 0], [4, 4, 4], [4, 4, 4], [1, 1, 1], [0, 0, 0], [3, 3, 3]]


class Divergences(ScriptedLengths):
    """Follows a script, and notes divergences."""

    requires = frozenset({Signal.KLD})

    def start(self, batch: Any) -> None:
        super().start(batch)
        self.noted: list[torch.Tensor] = []

    def observe(self, outcome: RoundOutcome) -> None:
        super().observe(outcome)
        assert outcome.kld is not None
        drafted = torch.arange(outcome.kld.shape[1]) < outcome.drafted[:, None]
        self.noted.append(outcome.kld[drafted])


class Rounds(RoundListener):
    def __init__(self) -> None:
        self.counts: list[tuple[list[int], list[int]]] = []

    def on_round(self, record: RoundRecord) -> None:
        self.counts.append((list(record.drafted), list(record.accepted)))


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_it_drafts_the_same(name: str, looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    target = endless_model()
    draft = DRAFTS[name][1](target)
    begun: list[bool] = []
    replays: list[tuple[bool, int]] = []
    ready: list[bool] = []
    original, original_run = GraphRunner.begin_chain, BegunChain.run

    run_target = RunAhead.run_target

    def noting_run_target(self: RunAhead, candidates: CandidateBatch, plan: RoundPlan) -> PassOutput:
        ready.append(self.is_ready(candidates))
        return run_target(self, candidates, plan)

    monkeypatch.setattr(RunAhead, "run_target", noting_run_target)

    def run(self: BegunChain, chain: Chain, *of_rows: Any) -> None:
        before = self.steps
        original_run(self, chain, *of_rows)
        replays.append((chain.goes_on, self.steps - before))

    def played(early: bool) -> tuple[torch.Tensor, list[Any], list[torch.Tensor]]:
        def begin_chain(self: GraphRunner, chain: Chain) -> DraftedChain | None:
            drafted = original(self, chain) if early else None
            begun.append(drafted is not None)
            return drafted

        monkeypatch.setattr(GraphRunner, "begin_chain", begin_chain)
        policy = (Divergences if looks else ScriptedLengths)(LENGTHS)
        rounds = Rounds()
        output = speculative(
            target,
            draft,
            ragged_batch([5, 3, 7]),
            policy,
            config_of(QUIET, runner="graph"),
            max_new_tokens=40,
            speculation_listeners=[rounds],
        )
        return output.sequences, rounds.counts, getattr(policy, "noted", [])

    expected = played(early=False)
    assert not any(ready)
    played(early=True)  # records what is still missing
    begun.clear()
    ready.clear()
    monkeypatch.setattr(BegunChain, "run", run)
    text, counts, noted = played(early=True)
    assert torch.equal(text, expected[0])
    assert counts == expected[1]
    assert len(noted) == len(expected[2])
    for ours, theirs in zip(noted, expected[2], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum(begun) > 3
    further = [steps for goes_on, steps in replays if goes_on]
    assert min(further) > 0, "longer than the last one"
    assert sum(begun) > len(further) + 1, "as long as the last one, or shorter, needs nothing more"
    assert sum(ready) > 1, "and of one as long, the target's pass was ready"

"""Beside a GPU, a policy that may lag learns from a round during the next one's pass; its answer counts after that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import record_on_cpu
from tiny_calls import QUIET, assert_same_text, compared, config_of, pair, plain, speculative
from tiny_models import ragged_batch
from tiny_pair import tiny_pair

from hf_dsde.batch.generator import BatchGenerator
from hf_dsde.decoding import lengths, run_ahead
from hf_dsde.decoding.candidates import CandidateBatch
from hf_dsde.decoding.plan import RoundPlan
from hf_dsde.decoding.run_ahead import RunAhead
from hf_dsde.execution.graph_runner import GraphRunner
from hf_dsde.execution.pass_output import PassOutput
from hf_dsde.execution.recorded_chain import Chain, DraftedChain
from hf_dsde.measurement.rounds import RoundListener, RoundRecord
from hf_dsde.policies import BatchInfo, RoundOutcome, StoppingPolicy, create_policy

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning")]
INPUTS = ragged_batch([5, 3, 7])
RECORDED = config_of(QUIET, runner="graph")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop work as beside a GPU."""
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    monkeypatch.setattr(lengths, "overlaps", lambda device: True)


class Events(list[Any]):
    """What happens, in order; also where a generator copies its policy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Events:
        return self


class Counts(StoppingPolicy):
    """Wants as many tokens as it has heard of rounds, and two to begin with; lags where its list says so.

    Args:
        lags: By rounds heard of; the last one counts for all later ones.
        events: Gets what it is told.
    """

    name = "counts"

    def __init__(self, lags: list[bool], events: list[Any]) -> None:
        self._lags, self._events = lags, events

    @property
    def may_lag(self) -> bool:
        return self._lags[min(self._heard, len(self._lags) - 1)]

    def start(self, batch: BatchInfo) -> None:
        self._rows, self._heard = batch.rows, 0

    def draft_lengths(self) -> torch.Tensor:
        return torch.full((self._rows,), min(self._heard + 2, 6))

    def observe(self, outcome: RoundOutcome) -> None:
        self._heard += 1
        self._events.append(("heard", int(outcome.drafted.max())))

    def select_rows(self, index: torch.Tensor) -> None:
        self._events.append(("moved", index.tolist()))


class Drafted(RoundListener):
    """Notes each round's longest draft, and the steps that were made for it."""

    def __init__(self) -> None:
        self.longest: list[int] = []
        self.steps: list[int] = []

    def on_round(self, record: RoundRecord) -> None:
        self.longest.append(max(record.drafted))
        self.steps.append(record.draft_steps)


def noting_passes(monkeypatch: pytest.MonkeyPatch, events: list[Any]) -> None:
    original = RunAhead.run_target

    def run_target(self: RunAhead, candidates: CandidateBatch, plan: RoundPlan) -> PassOutput:
        events.append(("pass", candidates.width))
        return original(self, candidates, plan)

    monkeypatch.setattr(RunAhead, "run_target", run_target)


def played(lags: list[bool], events: list[Any]) -> Drafted:
    drafted = Drafted()
    target, draft = pair(agreement="never")
    policy = Counts(lags, events)
    output = speculative(target, draft, INPUTS, policy, RECORDED, max_new_tokens=12, speculation_listeners=[drafted])
    assert_same_text(output, plain(target, INPUTS, max_new_tokens=12))
    return drafted


@pytest.mark.usefixtures("beside")
def test_it_learns_during_the_next_pass_and_its_answer_counts_in_the_one_after(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    noting_passes(monkeypatch, events)
    assert played([True], events).longest[:6] == [2, 2, 3, 4, 5, 6]
    passes = [("pass", 2), ("pass", 2), ("heard", 2), ("pass", 3), ("heard", 2), ("pass", 4), ("heard", 3)]
    assert events[: len(passes)] == passes


@pytest.mark.usefixtures("beside")
def test_any_other_policy_answers_before_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    noting_passes(monkeypatch, events)
    assert played([False], events).longest[:5] == [2, 3, 4, 5, 6]
    assert events[:4] == [("pass", 2), ("heard", 2), ("pass", 3), ("heard", 3)]


@pytest.mark.usefixtures("beside")
def test_once_it_may_not_lag_it_learns_all_before_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    noting_passes(monkeypatch, events)
    assert played([True, False], events).longest[:5] == [2, 2, 4, 5, 6]
    passes = [("pass", 2), ("pass", 2), ("heard", 2), ("heard", 2), ("pass", 4), ("heard", 4), ("pass", 5)]
    assert events[: len(passes)] == passes


def test_a_host_that_takes_turns_with_the_device_waits_for_every_answer() -> None:
    target, draft = pair(agreement="never")
    drafted = Drafted()
    speculative(target, draft, INPUTS, Counts([True], []), max_new_tokens=12, speculation_listeners=[drafted])
    assert drafted.longest[:5] == [2, 3, 4, 5, 6]


@pytest.mark.usefixtures("beside")
def test_rows_move_after_what_was_learnt_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that ends is replaced: the policy has heard of all rounds of the old rows before it hears of new ones."""
    events = Events()
    noting_passes(monkeypatch, events)
    models = tiny_pair(torch.float64)
    generator = BatchGenerator(
        models.target,
        models.tokenizer,
        assistant_model=models.draft,
        speculation_policy=Counts([True], events),
        speculation_config=RECORDED,
        batch_size=2,
        max_new_tokens=9,
    )
    prompts = ["abc", "fedcba", "d", "bcdbcd", "ee", "af"]
    assert len(list(generator.stream(prompts))) == len(prompts)
    moves = [place for place, event in enumerate(events) if event[0] == "moved"]
    assert moves, events
    for place in moves:
        kinds = [kind for kind, _ in events[:place]]
        assert kinds.count("heard") == kinds.count("pass")


@pytest.mark.parametrize("policy", ["static", "dsde", "goodput", "auto"])
@pytest.mark.parametrize("cost_cap", [False, True])
@pytest.mark.usefixtures("beside")
def test_the_text_is_that_of_plain_decoding(policy: str, cost_cap: bool) -> None:
    target, draft = pair(agreement="half")
    config = config_of(QUIET, runner="graph", cost_cap=cost_cap)
    output = compared(target, draft, INPUTS, policy, config, max_new_tokens=40)
    assert sum(output.speculation_statistics.drafted_by_position) > 0


@pytest.mark.usefixtures("beside")
def test_goodput_asks_for_its_probes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft that is hardly ever right it gives up drafting, and probes as where each answer is waited for."""
    target, draft = pair(agreement="never")

    def longest() -> list[int]:
        drafted = Drafted()
        policy = create_policy("goodput", probe_share=0.02)
        speculative(target, draft, INPUTS, policy, RECORDED, max_new_tokens=90, speculation_listeners=[drafted])
        return drafted.longest[:70]

    lagging = longest()
    monkeypatch.setattr(lengths, "overlaps", lambda device: False)
    answered = longest()
    gave_up = answered.index(0)
    assert sum(answered[gave_up:]) > 10
    assert lagging[:gave_up] == [answered[0], *answered[: gave_up - 1]]
    assert lagging[gave_up:] == answered[gave_up:], "a plain round is not begun before all is learnt"


@pytest.mark.parametrize(("lags", "surplus"), [(True, 0), (False, 1)])
@pytest.mark.usefixtures("beside")
def test_what_is_foreseen_is_drafted_ahead_and_no_more(
    lags: bool, surplus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that begins before the policy has answered has as many steps as the last one, which may be too many."""
    lengths_of_rounds = [5, 5, 2, 4, 4, 1, 3, 3, 3, 3, 3, 3]

    class Script(Counts):
        def draft_lengths(self) -> torch.Tensor:
            return torch.full((self._rows,), lengths_of_rounds[min(self._heard, len(lengths_of_rounds) - 1)])

    target, draft = pair(agreement="never")
    further: list[int] = []
    original = GraphRunner.chain

    def chain(self: GraphRunner, chain: Chain) -> DraftedChain | None:
        further.append(chain.steps)
        return original(self, chain)

    def rounds() -> Drafted:
        drafted = Drafted()
        policy = Script([lags], [])
        speculative(target, draft, INPUTS, policy, RECORDED, max_new_tokens=20, speculation_listeners=[drafted])
        return drafted

    rounds()  # records what is begun ahead in the second call
    monkeypatch.setattr(GraphRunner, "chain", chain)
    drafted = rounds()
    too_many = [steps - longest for steps, longest in zip(drafted.steps, drafted.longest, strict=True) if longest]
    in_the_middle = too_many[:-3]  # towards the end, rows have no use for all that is wanted
    assert (max(in_the_middle) > 0) == (surplus > 0), (drafted.steps, drafted.longest)
    assert (len(further) > 2) == (surplus > 0), "what was begun had to go on"


def test_a_device_answer_is_no_lagging_one() -> None:
    """Policies that stop inside rounds answer beside the drafts; nothing of theirs is put off."""
    asked: list[Any] = []
    events: list[Any] = []

    class Stops(Counts):
        def should_stop(self, step: Any) -> torch.Tensor:
            asked.append(step)
            return torch.zeros(self._rows, dtype=torch.bool)

    target, draft = pair(agreement="never")
    drafted = Drafted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengths, "overlaps", lambda device: True)
        patch.setattr(run_ahead, "overlaps", lambda device: True)
        noting_passes(patch, events)
        policy = Stops([True], events)
        speculative(target, draft, INPUTS, policy, max_new_tokens=12, speculation_listeners=[drafted])
    assert asked
    assert drafted.longest[:5] == [2, 3, 4, 5, 6]
    assert events[:4] == [("pass", 2), ("heard", 2), ("pass", 3), ("heard", 3)]

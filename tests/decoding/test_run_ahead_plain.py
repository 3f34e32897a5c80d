"""A step without drafts may begin before the host knows how the last one ended; a policy's wish then waits a round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_calls import QUIET, config_of
from tiny_models import AGREEMENT, EOS, fresh_pair, noisy_copy, ragged_batch, random_lengths, tiny_model
from tiny_policies import RandomLengths, ScriptedLengths
from transformers import PreTrainedModel

import hf_dsde
from hf_dsde.costs import LiveCosts
from hf_dsde.decoding import loop, run_ahead
from hf_dsde.decoding.plan import RoundPlan, next_plan
from hf_dsde.execution.model_runner import ModelRunner
from hf_dsde.execution.spans import Span
from hf_dsde.measurement.statistics import RoundCounts
from hf_dsde.plots import LivePlot
from hf_dsde.policies import BatchInfo, RoundOutcome, Signal, StaticPolicy, StoppingPolicy
from hf_dsde.utils import tuning

pytestmark = [pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"), pytest.mark.usefixtures("recording")]
ROWS = 5


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the loop work as on a GPU; the list says after how many rounds a plain step was begun."""
    after: list[int] = []

    def planned(previous: RoundPlan | None, *arguments: Any, plain_begun: bool, **flags: Any) -> RoundPlan:
        plan = next_plan(previous, *arguments, plain_begun=plain_begun, **flags)
        if plain_begun:
            after.append(plan.index)
        return plan

    monkeypatch.setattr(run_ahead, "overlaps", lambda device: True)
    monkeypatch.setattr(loop, "next_plan", planned)
    return after


class Wishes(StoppingPolicy):
    """Wants given lengths, one after each round that it hears of."""

    name = "wishes"

    def __init__(self, wanted: list[int]) -> None:
        self._wanted = wanted
        self.heard: list[list[int]] = []

    def start(self, batch: BatchInfo) -> None:
        self._rows = batch.rows
        self.heard = []

    def draft_lengths(self) -> torch.Tensor:
        return torch.full((self._rows,), self._wanted[min(len(self.heard), len(self._wanted) - 1)])

    def observe(self, outcome: RoundOutcome) -> None:
        self.heard.append(outcome.drafted.tolist())


def generate(
    target: PreTrainedModel,
    policy: StoppingPolicy,
    noise: float = 0.0,
    new_tokens: int = 24,
    runner: str = "graph",
    draft: PreTrainedModel | None = None,
    **call: Any,
) -> Any:
    hf_dsde.enable(target)
    return target.generate(
        **ragged_batch(random_lengths(ROWS)),
        **{"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, **call},
        assistant_model=noisy_copy(target, noise) if draft is None else draft,
        speculation_policy=policy,
        speculation_config=config_of(QUIET, runner=runner),
        return_dict_in_generate=True,
    )


def rounds_of(output: Any) -> tuple[RoundCounts, ...]:
    rounds: tuple[RoundCounts, ...] = output.speculation_statistics.rounds
    return rounds


def test_after_two_plain_steps_each_but_the_one_too_many_is_begun(begun: list[int]) -> None:
    target = tiny_model()
    plain = target.generate(
        **ragged_batch(random_lengths(ROWS)), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    output = generate(target, StaticPolicy(0), eos_token_id=None)
    assert torch.equal(output.sequences, plain)
    assert begun == list(range(2, 24))
    rounds = rounds_of(output)
    assert len(rounds) == 24
    assert [number for number, counts in enumerate(rounds) if counts.draft_seconds == 0] == begun


@pytest.mark.parametrize(("family", "agreement"), [("llama", "half"), ("qwen3", "never"), ("gemma3", "full")])
def test_the_text_is_that_of_plain_decoding(family: str, agreement: str, begun: list[int]) -> None:
    target = tiny_model(family)
    plain = target.generate(**ragged_batch(random_lengths(ROWS)), max_new_tokens=40, do_sample=False)
    script = ScriptedLengths([[0] * ROWS, [0] * ROWS, [0] * ROWS, [3, 0, 1, 0, 0], [2, 2, 0, 4, 1]] * 20)
    assert torch.equal(generate(target, script, AGREEMENT[agreement], 40).sequences, plain)
    assert begun


def test_what_a_policy_wants_meanwhile_is_done_a_round_later(begun: list[int]) -> None:
    """It hears nothing of the step in between, so that rounds and wishes stay in order."""
    policy = Wishes([0, 0, 0, 3, 2, 0, 0, 1])
    plot = LivePlot(ROWS)
    output = generate(tiny_model(), policy, eos_token_id=None, speculation_listeners=[plot])
    assert begun[:3] == [2, 3, 8]
    assert [max(lengths) for lengths in plot.rounds()[0]][:8] == [0, 0, 0, 3, 2, 0, 0, 1]
    # Rounds 0 to 2 as wanted, one in between, 3 and 2 tokens, two plain ones, one in between; a token until the end.
    # (A draft begins as long as the last one was, before the host knows what is wanted.)
    assert [counts.draft_steps for counts in rounds_of(output)][:10] == [0, 0, 0, 0, 3, 3, 0, 0, 0, 1]
    assert [max(drafted) for drafted in policy.heard][:8] == [0, 0, 0, 3, 2, 0, 0, 1]


def test_a_wish_that_waits_is_lowered_to_what_is_left(begun: list[int]) -> None:
    policy = Wishes([0, 0, 0, 6])
    output = generate(tiny_model(), policy, new_tokens=7, eos_token_id=None)
    assert begun
    assert [counts.draft_steps for counts in rounds_of(output)] == [0, 0, 0, 0, 2]


def test_rows_that_end_meanwhile_are_left_out(begun: list[int]) -> None:
    target = tiny_model()
    ends = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    call = {"eos_token_id": [EOS, *ends]}
    plain = target.generate(
        **ragged_batch(random_lengths(ROWS)), max_new_tokens=24, do_sample=False, pad_token_id=0, **call
    )
    assert torch.equal(generate(target, StaticPolicy(0), **call).sequences, plain)
    assert begun


def test_no_step_begins_that_is_not_recorded(begun: list[int]) -> None:
    generate(tiny_model(), StaticPolicy(0), runner="eager")
    assert begun == []


def test_sampled_text_is_that_of_steps_one_after_the_other(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model()

    def sampled() -> torch.Tensor:
        torch.manual_seed(5)
        text: torch.Tensor = generate(target, StaticPolicy(0), do_sample=True, temperature=0.9).sequences
        return text

    text = sampled()
    assert begun
    monkeypatch.setattr(run_ahead, "overlaps", lambda device: False)
    assert torch.equal(sampled(), text)


@pytest.mark.parametrize(("runner", "tokens"), [("graph", 0), ("graph", 10_000), ("eager", 0), ("eager", 200)])
def test_a_draft_that_has_missed_much_knows_all_of_it_when_it_drafts(
    tokens: int, runner: str, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting with the target itself, every token is accepted, unless one was missed or stored in a wrong place."""
    stored = stores(monkeypatch)
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, stored_sizes=(8, 16), wide_pass_tokens=tokens))
    script: list[list[int]] = []
    for gap, lengths in ((12, [2, 0, 0, 1, 0]), (1, [1, 1, 0, 2, 0]), (9, [0, 0, 3, 0, 0]), (14, [1, 2, 3, 4, 5])):
        script += [*[[0] * ROWS] * gap, lengths, [2] * ROWS if gap == 9 else lengths]
    policy = HeardScript(script)
    output = generate(tiny_model(), policy, new_tokens=90, runner=runner, eos_token_id=None)
    statistics = output.speculation_statistics
    assert statistics.drafted_by_position[0] > 40
    assert statistics.accepted_by_position == statistics.drafted_by_position
    gaps = [span for spans in stored for span in spans if span.start > 0]
    assert bool(gaps) == (tokens == 0), "five rows are fed 32 tokens each at once"


def test_rows_that_draft_for_the_first_time_know_their_text_beside_rows_that_drafted_before(begun: list[int]) -> None:
    """The pass that was begun for the others did not see it."""
    policy = ScriptedLengths([[1, 1, 0, 0, 0], [2] * ROWS])
    statistics = generate(tiny_model(), policy, new_tokens=20, eos_token_id=None).speculation_statistics
    assert statistics.drafted_by_position[0] > ROWS
    assert statistics.accepted_by_position == statistics.drafted_by_position


def stores(monkeypatch: pytest.MonkeyPatch) -> list[list[Span]]:
    """What each call stores without asking for logits."""
    stored: list[list[Span]] = []
    original = ModelRunner.store

    def store(self: ModelRunner, spans: list[Span], tokens: torch.Tensor) -> None:
        stored.append(list(spans))
        original(self, spans, tokens)

    monkeypatch.setattr(ModelRunner, "store", store)
    return stored


def test_a_draft_reads_nothing_while_nobody_drafts(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stores(monkeypatch)
    generate(tiny_model(), StaticPolicy(0), new_tokens=16, eos_token_id=None)
    assert stored == [[Span(row, 0, length - 1) for row, length in enumerate(random_lengths(ROWS))]]


def test_only_rows_that_draft_are_read_by_the_draft(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stores(monkeypatch)
    script = [*[[0] * ROWS] * 12, [0, 1, 0, 2, 0], [0] * ROWS]
    generate(tiny_model(), HeardScript(script), new_tokens=16, eos_token_id=None)
    ends = [length + 13 for length in random_lengths(ROWS)]  # twelve plain steps, and one while the wish waits
    _, texts = stored
    assert texts == [Span(row, 0, ends[row] - 1) for row in (1, 3)]


def test_only_rows_that_draft_take_in_what_they_have_missed(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "HOPPER", replace(tuning.HOPPER, wide_pass_tokens=0))
    stored = stores(monkeypatch)
    script = [[1] * ROWS, *[[0] * ROWS] * 12, [0, 1, 0, 2, 0], [0] * ROWS]
    generate(tiny_model(), HeardScript(script), new_tokens=20, eos_token_id=None)
    _, _, missed = stored
    assert [span.row for span in missed] == [1, 3]
    assert all(span.start >= length for span, length in zip(missed, random_lengths(ROWS)[1:4:2], strict=True))


def test_catching_up_is_no_price_of_a_draft_step(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        LiveCosts, "observe", lambda self, **seen: charged.append((seen["draft_steps"], seen["resumed"]))
    )
    monkeypatch.setattr(Wishes, "requires", frozenset({Signal.COSTS}))
    target, draft = fresh_pair(noise=0.0)
    for _ in range(2):  # rounds that record passes say nothing of costs
        charged.clear()
        output = generate(target, Wishes([2, 1, 0, 2, 0, 0, 0, 3, 1]), draft=draft, eos_token_id=None)
        assert len(charged) == sum(not counts.recorded_passes for counts in rounds_of(output))
    # After 2 and 3 tokens, where 1 is wanted, as many steps had begun.
    assert [counts.draft_steps for counts in rounds_of(output)][:10] == [2, 2, 0, 2, 0, 0, 0, 0, 3, 3]
    steps = [(2, False), (2, False), (0, False), (2, False), *[(0, False)] * 4, (3, True), (3, False)]
    assert charged[:10] == steps


class HeardScript(ScriptedLengths):
    """Goes on in its script when it hears of a round."""

    def start(self, batch: BatchInfo) -> None:
        super().start(batch)
        self._heard = 0

    def draft_lengths(self) -> torch.Tensor:
        return torch.tensor(self._rounds[min(self._heard, len(self._rounds) - 1)])

    def observe(self, outcome: RoundOutcome) -> None:
        self._heard += 1


def test_random_lengths_keep_the_text(begun: list[int]) -> None:
    target = tiny_model()
    plain = target.generate(**ragged_batch(random_lengths(ROWS)), max_new_tokens=60, do_sample=False)
    for seed in range(2):
        policy = RandomLengths(1, seed=seed)  # half of the rows draft nothing; all of them, once in 32 rounds
        assert torch.equal(generate(target, policy, 0.05, 60).sequences, plain)

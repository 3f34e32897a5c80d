"""Recorded functions give what the functions give, with few launches, and a policy decides alike with either."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from recorded import NotingCapture, recording  # noqa: F401 - a fixture
from tiny_models import noisy_copy, ragged_batch, random_lengths, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_dsde
from hf_dsde.config import SpeculationConfig
from hf_dsde.costs import CostModel, LiveCosts
from hf_dsde.execution import recorded_function
from hf_dsde.execution.create_runner import RunnerWarning
from hf_dsde.execution.recorded_function import FunctionRecorder, RecordedFunction, function_recorder
from hf_dsde.policies import BatchInfo, DraftStep, GoodputPolicy, MarginalGoodputPolicy, RoundOutcome
from hf_dsde.policies.base import as_it_is

pytestmark = [
    pytest.mark.filterwarnings("ignore::hf_dsde.SpeculationWarning"),
    pytest.mark.usefixtures("recording"),
]
CPU = torch.device("cpu")
VOCABULARY = 17


def mixed(flags: Tensor, scale: Tensor, values: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Results of four dtypes, a scalar, one without entries, an argument and a tensor of stride 0."""
    scaled = torch.where(flags, values * scale, 0.0)
    largest = scaled.amax()
    return (
        scaled > 1,
        largest,
        counts + flags.long(),
        values[:0],
        scale,
        largest.expand(3),
        scaled.double() / 3,
        values.T,
    )


def arguments(generator: torch.Generator, rows: int = 5) -> tuple[Tensor, ...]:
    values = torch.randn(3, rows, generator=generator)
    counts = torch.randint(0, 9, (rows,), generator=generator)
    return values[:1].T > 0, torch.randn((), generator=generator), values.T, counts[:, None].expand(rows, 3)


def call(function: Any, generator: torch.Generator, rows: int = 5) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return what `function` gives and what `mixed` gives, for the same random arguments."""
    given = arguments(generator, rows)
    return function(*given), mixed(*given)


def assert_same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(results) == len(expected)
    for result, value in zip(results, expected, strict=True):
        assert (result.shape, result.dtype) == (value.shape, value.dtype)
        assert torch.equal(result, value)


def test_results_are_those_of_the_function_for_any_arguments(recording: list[NotingCapture]) -> None:  # noqa: F811
    recorded, generator = FunctionRecorder(CPU)(mixed), torch.Generator().manual_seed(0)
    for _ in range(10):
        assert_same(*call(recorded, generator))
    assert recording[0].recorded == 2, "the function, and what keeps the memory"


def test_other_shapes_are_recorded_anew(recording: list[NotingCapture]) -> None:  # noqa: F811
    recorded, generator = FunctionRecorder(CPU)(mixed), torch.Generator().manual_seed(1)
    for rows in (5, 5, 1, 1, 4, 5):
        assert_same(*call(recorded, generator, rows))
    assert recording[0].recorded == 1 + 4


def test_results_outlive_later_calls_and_changes_of_arguments() -> None:
    recorded = FunctionRecorder(CPU)(lambda values: (values + 1, values))
    values = torch.zeros(4)
    first = recorded(values)
    values.fill_(7.0)
    assert_same(first, (torch.ones(4), torch.zeros(4)))
    assert_same(recorded(values), (torch.full((4,), 8.0), torch.full((4,), 7.0)))
    assert_same(first, (torch.ones(4), torch.zeros(4)))


def test_functions_of_one_call_share_a_capture(recording: list[NotingCapture]) -> None:  # noqa: F811
    record = FunctionRecorder(CPU)
    double, negative = record(lambda x: (2 * x,)), record(lambda x: (-x,))
    for number in (1.0, 3.0):
        x = torch.tensor([number])
        assert_same((*double(x), *negative(x)), (2 * x, -x))
    assert [capture.recorded for capture in recording] == [3]


def test_nothing_is_captured_for_policies_that_record_nothing(recording: list[NotingCapture]) -> None:  # noqa: F811
    FunctionRecorder(CPU)(mixed)
    assert recording == []


def test_memory_is_handed_on_once_nobody_can_replay(recording: list[NotingCapture]) -> None:  # noqa: F811
    def recorded() -> Any:
        function = FunctionRecorder(CPU)(lambda x: (x + 1,))
        function(torch.ones(2))
        return function

    kept = recorded()
    other = recorded()
    assert len(recording) == 2, "both are in use"
    del kept
    gc.collect()
    recorded()
    assert len(recording) == 2
    assert_same(other(torch.zeros(2)), (torch.ones(2),))


def counted(record: FunctionRecorder, offset: float, key: Any) -> Any:
    return record(lambda x: (x + offset,), key)


def test_functions_of_a_key_are_recorded_once_for_all_calls(recording: list[NotingCapture]) -> None:  # noqa: F811
    x = torch.zeros(2)
    for _ in range(3):
        record = FunctionRecorder(CPU)
        for offset in (1.0, 2.0):
            assert_same(counted(record, offset, ("add", offset))(x), (x + offset,))
        del record
        gc.collect()
    assert [capture.recorded for capture in recording] == [1 + 2]


def test_what_has_no_key_or_is_in_use_is_recorded_anew(recording: list[NotingCapture]) -> None:  # noqa: F811
    x = torch.zeros(2)
    first, second = FunctionRecorder(CPU), FunctionRecorder(CPU)
    kept = [counted(record, 1.0, "one") for record in (first, second)]
    assert_same(kept[0](x) + kept[1](x), (x + 1, x + 1))
    assert [capture.recorded for capture in recording] == [2, 2], "two calls at a time share nothing"
    for _ in range(2):
        assert_same(counted(first, 3.0, None)(x), (x + 3,))
    assert recording[0].recorded == 4


def test_the_functions_used_least_recently_are_let_go(
    recording: list[NotingCapture],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_function, "KEPT_FUNCTIONS", 2)
    record, x = FunctionRecorder(CPU), torch.zeros(2)
    for offset in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):  # 2 goes when 3 comes
        assert_same(counted(record, offset, offset)(x), (x + offset,))
    assert recording[0].recorded == 1 + 4


def test_a_function_that_failed_is_tried_again_by_the_next_call() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return (x * float(x.sum()),)

    for _ in range(2):
        recorded = FunctionRecorder(CPU)(function, "waits")
        with pytest.warns(RunnerWarning, match="recording failed with"):
            recorded(torch.ones(2))
        del recorded
        gc.collect()


@pytest.mark.parametrize("policy", ["goodput", "marginal_goodput"])
def test_a_second_call_records_no_arithmetic(policy: str, recording: list[NotingCapture]) -> None:  # noqa: F811
    target = hf_dsde.enable(tiny_model())
    draft = noisy_copy(target, 0.05)

    def recorded_by_a_call(rows: int = 4) -> int:
        target.generate(
            **ragged_batch(random_lengths(rows)),
            max_new_tokens=10,
            assistant_model=draft,
            speculation_policy=policy,
            speculation_config=SpeculationConfig(runner="graph"),
        )
        gc.collect()
        return recording[2].recorded

    first = recorded_by_a_call()
    assert first == {"goodput": 2, "marginal_goodput": 4}[policy]
    assert recorded_by_a_call() == first
    assert recorded_by_a_call(rows=2) > first


class Launches(TorchDispatchMode):
    """Counts operations that a device would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Silent:
    """Stands in for something recorded, whose replay is one launch."""

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def __call__(self) -> None:
        return None


def test_a_call_launches_a_copy_per_dtype_a_replay_and_a_copy_of_all_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments may come with other strides where a size is 1, as a view of a wider tensor does.

    torch copies all tensors of a list at once only if each has the strides of its target.
    """
    original = torch._foreach_copy_

    def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        assert [target.stride() for target in targets] == [source.stride() for source in sources]
        original(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)

    class Capture:
        bytes = 0

        def __call__(self, body: Any) -> Silent:
            return Silent(body())

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor + 1 for tensor in tensors)

    recorded = RecordedFunction(function, Capture(), pytest.fail)
    given = (torch.ones(1, 9)[:, :4], torch.ones(()), torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(2))
    recorded(*given)
    with Launches() as launches:
        recorded(*given)
    views = {"as_strided", "view", "slice", "alias", "detach", "empty"}
    assert {name: n for name, n in launches.counts.items() if name not in views} == {"_foreach_copy_": 2, "clone": 1}


@pytest.mark.parametrize("failure", ["waits", "raises"])
def test_what_cannot_be_recorded_is_run_as_it_is_with_one_warning(failure: str) -> None:
    recording_now = []

    def function(x: Tensor) -> tuple[Tensor, ...]:
        if failure == "waits":
            return (x * float(x.sum()),)
        recording_now.append(1)
        if len(recording_now) == 2:  # warming up goes well
            raise LookupError("no such thing")
        return (x * x.sum(),)

    record = FunctionRecorder(CPU)
    recorded, others = record(function), record(lambda x: (x * float(x[0]),))
    x = torch.tensor([1.0, 2.0])
    with pytest.warns(RunnerWarning, match="The policy's arithmetic.*recording failed with") as caught:
        assert_same(recorded(x), (3 * x,))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(recorded(x), (3 * x,))
        assert_same(others(x), (x,))
        assert_same(record(lambda x: (x + 1,))(x), (x + 1,))


@pytest.mark.parametrize(("runner", "records"), [(None, True), ("graph", True), ("eager", False)])
def test_policies_record_where_passes_are_recorded(
    runner: str | None, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (function_recorder(CPU, runner) is not as_it_is) == records
    monkeypatch.undo()
    assert function_recorder(CPU, runner) is as_it_is, "nothing is recorded on a CPU"


class Both:
    """`marginal_goodput` recorded and as it is, in the same random rounds."""

    def __init__(self, rows: int, sampled: bool, seed: int, warmup_tokens: int = 4, limit: int = 12) -> None:
        self.policies = [MarginalGoodputPolicy(warmup_tokens=warmup_tokens, probe_share=0.03) for _ in range(2)]
        model = CostModel.relative(0.1, [1 + 0.0301 * k for k in range(limit + 1)], rows)
        self.costs = [LiveCosts(model, rows) for _ in self.policies]
        for policy, costs, record in zip(self.policies, self.costs, (as_it_is, FunctionRecorder(CPU)), strict=True):
            policy.start(BatchInfo(rows, CPU, VOCABULARY, limit, 1000, costs, record))
        self.rows, self.sampled = rows, sampled
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths: list[int] = []
        self.probes = self.surprises = 0

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def agreed(self, answers: list[Tensor]) -> Tensor:
        assert torch.equal(*answers)
        return answers[0]

    def draft(self, drafting: Tensor, quality: float) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        drafted, steps = torch.zeros(self.rows, dtype=torch.int64), []
        while bool(drafting.any()):
            logits = torch.randn(self.rows, VOCABULARY, generator=self.generator) * (1 + 6 * self.random(self.rows, 1))
            step = (len(steps), drafted, logits, logits, drafting)
            stops = self.agreed([policy.should_stop(DraftStep(*step)) for policy in self.policies])
            chance = quality * logits.softmax(-1).amax(-1)
            steps.append((self.random(self.rows) < chance, chance))
            drafted, drafting = drafted + drafting, drafting & ~stops
        return drafted, steps

    def round(self, quality: float) -> None:
        lengths = self.agreed([policy.draft_lengths() for policy in self.policies])
        active = self.random(self.rows) < 0.9
        drafted, steps = self.draft(active & (lengths > 0) & (self.random(self.rows) < 0.95), quality)
        accepted, labels = torch.zeros_like(drafted), torch.zeros(self.rows, 0)
        if steps:
            hits = torch.stack([hit for hit, _ in steps], 1)
            accepted = torch.minimum(hits.long().cumprod(1).sum(1), drafted)
            labels = torch.stack([chance for _, chance in steps], 1) if self.sampled else hits.float()
            untested = torch.arange(len(steps)) >= torch.minimum(drafted, accepted + 1)[:, None]
            labels = labels.masked_fill(untested, torch.nan)
        self.probes += int(self.policies[0]._probes.price > 0)
        outcome = RoundOutcome(
            drafted,
            accepted,
            active,
            acceptance=labels,
            next_entropy=3 * self.random(self.rows),
            next_probability=0.05 + 0.9 * self.random(self.rows),
        )
        stretch = 1 + 0.3 * float(self.random(1))
        for policy, costs in zip(self.policies, self.costs, strict=True):
            policy.observe(outcome)
            width = len(steps) + 1
            costs.observe(
                draft_steps=len(steps), width=width, draft=0.1 * len(steps) * stretch, verify=stretch, overhead=0.0
            )
        self.surprises += int(steps != [] and float(self.policies[0]._tally.noticed) == 0)
        self.lengths.append(len(steps))

    def rearrange(self) -> None:
        index = torch.randperm(self.rows, generator=self.generator)
        index[0] = -1
        for policy in self.policies:
            policy.select_rows(index)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_marginal_goodput_decides_alike_recorded_or_not(sampled: bool) -> None:
    probes = surprises = 0
    lengths = set()
    for rows, rounds, warmup_tokens in ((1, 50, 4), (4, 80, 160)):  # many forced drafts: bad text surprises
        both = Both(rows, sampled, rows, warmup_tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RunnerWarning)
            for number in range(rounds):
                both.round(0.99 if number // 25 % 2 == 0 else 0.05)
                if number % 17 == 16:
                    both.rearrange()
        plain, recorded = both.policies
        for mine, other in zip(plain._known.tensors(), recorded._known.tensors(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        probes, surprises = probes + both.probes, surprises + both.surprises
        lengths |= set(both.lengths)
    assert probes > 0
    assert {0, 1, 2, 3, 4, 5} <= lengths
    if not sampled:  # labels that are exact probabilities surprise less, and tempt less to draft long
        assert surprises > 0
        assert 12 in lengths


@pytest.mark.parametrize("knobs", [{}, {"interval": 3, "estimator": "drafted"}, {"num_draft_tokens": 0}], ids=str)
def test_goodput_decides_alike_recorded_or_not(knobs: dict[str, Any], recording: list[NotingCapture]) -> None:  # noqa: F811
    rows, generator = 6, torch.Generator().manual_seed(0)
    policies = [GoodputPolicy(probe_share=0.05, **knobs) for _ in range(2)]
    # Drafting must not pay at first, to be probed, and pay later.
    model = CostModel.relative(0.1, [1 + 0.0301 * k for k in range(9)], rows)
    costs = [LiveCosts(model, rows) for _ in policies]
    for policy, live, record in zip(policies, costs, (as_it_is, FunctionRecorder(CPU)), strict=True):
        policy.start(BatchInfo(rows, CPU, VOCABULARY, 8, 1000, live, record))
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunnerWarning)
        for number in range(120):
            first, second = (policy.draft_lengths() for policy in policies)
            assert torch.equal(first, second)
            seen.add(tuple(first.tolist()))
            active = torch.rand(rows, generator=generator) < 0.9
            hits = torch.rand(rows, 9, generator=generator) < (0.02 if 20 <= number < 80 else 0.9)
            drafted = first * active
            outcome = RoundOutcome(drafted, torch.minimum(hits.long().cumprod(1).sum(1), drafted), active)
            for policy, live in zip(policies, costs, strict=True):
                policy.observe(outcome)
                live.observe(draft_steps=1, width=2, draft=0.1 + number / 2000, verify=1.03, overhead=0.0)
            if number % 30 == 29:
                index = torch.randperm(rows, generator=generator)
                index[0] = -1
                for policy in policies:
                    policy.select_rows(index)
    assert torch.equal(policies[0].acceptance, policies[1].acceptance)
    assert [capture.recorded for capture in recording] == [2], "the recorder's own piece of memory, and the function"
    if not knobs:
        assert any(sum(lengths) in range(1, 5) for lengths in seen), "never probed"
        assert (3,) * rows in seen or (4,) * rows in seen


def test_marginal_goodput_starts_anew_after_recording() -> None:
    """It rehearses a round, so that recording disturbs no real one's time."""
    both = Both(3, sampled=False, seed=0)
    plain, recorded = both.policies
    assert recorded._rounds == 0
    assert_same(recorded._known.tensors(), plain._known.tensors())
    assert_same(tuple(recorded._outlook), tuple(plain._outlook))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_text_is_that_of_the_eager_runner(do_sample: bool, recording: list[NotingCapture]) -> None:  # noqa: F811
    target = hf_dsde.enable(tiny_model())
    draft = noisy_copy(target, 0.05)

    def text(runner: str) -> Tensor:
        torch.manual_seed(4)
        # Costs that are measured would let every run decide otherwise.
        costs = CostModel.relative(0.1, [1.0, 1.05, 1.1, 1.2]).to_dict()
        config = SpeculationConfig(runner=runner, costs=costs, refresh_costs=False)
        return target.generate(
            **ragged_batch(random_lengths(4)),
            max_new_tokens=32,
            do_sample=do_sample,
            assistant_model=draft,
            speculation_policy="marginal_goodput",
            speculation_config=config,
        )

    expected = text("eager")
    assert recording == []
    assert torch.equal(text("graph"), expected)
    assert [capture.recorded for capture in recording][2] == 4, "three functions, beside the models' passes"

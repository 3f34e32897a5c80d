"""Methods take turns on the same prompts with the same seed, and whatever is not measured is written down."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from tiny_pair import PROMPTS, tiny_pair

from hf_dsde.bench.baselines import BASELINES
from hf_dsde.bench.methods import Answer, Method, parse_policy
from hf_dsde.bench.results import BASELINE, OURS, BenchResults
from hf_dsde.bench.sweep import Sweep, SweepOptions
from hf_dsde.bench.workloads import Workload
from hf_dsde.measurement.statistics import StatisticsRecorder
from hf_dsde.trace.prompts import Prompt

pytestmark = pytest.mark.slow

LETTERS = Workload("letters", [Prompt("letters", "abcdef"[index % 6] * (1 + index // 6)) for index in range(24)])


class FakeClock:
    """Time that passes only when a method says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeMethod(Method):
    """Emits draws of the generator, takes seconds of the fake clock, and writes down how it was called."""

    kind = OURS

    def __init__(self, name, clock, log, seconds=1.0, kind=OURS, fails_at=None, tokens=None):
        self.name, self.kind, self.clock, self.log = name, kind, clock, log
        self.seconds, self.fails_at, self.tokens = seconds, fails_at, tokens
        self.calls = self.closed = 0
        self.settings = {"name": name}

    def refusal(self, rows, temperature):
        return "too many rows" if rows > 4 else None

    def __call__(self, pair, inputs, request):
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.clock.now += self.seconds
        rows = len(inputs["input_ids"])
        draws = torch.randint(3, 96, (rows, self.tokens or request.new_tokens))
        self.log.append((self.name, inputs["input_ids"].tolist(), draws.tolist(), request))
        warnings.warn(f"{self.name} is slow", UserWarning, stacklevel=1)
        return Answer(torch.cat([inputs["input_ids"], draws], 1))

    def close(self):
        self.closed += 1


@pytest.fixture
def clock():
    return FakeClock()


def run(methods, clock, *, pairs=None, save=lambda: None, workload=LETTERS, steps=None, **options):
    results = BenchResults([{}], references=("a",))
    chosen = SweepOptions(tuple(methods), **{"batches": (2,), "new_tokens": 5, "repeats": 3} | options)
    sweep = Sweep(
        chosen,
        pairs or {"tiny": tiny_pair},
        [workload],
        results,
        save=save,
        on_step=lambda what: steps.append(what) if steps is not None else None,
        clock=clock,
    )
    sweep.run()
    return results, sweep


def test_methods_take_turns_and_every_repeat_begins_with_the_next(clock):
    log = []
    results, _ = run([FakeMethod(name, clock, log) for name in "abc"], clock)
    assert "".join(name for name, *_ in log) == "abc" + "abc" + "bca" + "cab"
    orders = {case.method: [repeat.order for repeat in case.repeats] for case in results.cases}
    assert orders == {"a": [0, 2, 1], "b": [1, 0, 2], "c": [2, 1, 0]}


def test_prompts_and_seed_are_the_same_for_all_methods_of_a_repeat(clock):
    log = []
    run([FakeMethod(name, clock, log) for name in "ab"], clock)
    timed = log[2:]
    for first, second in zip(timed[::2], timed[1::2], strict=True):
        assert first[1:] == second[1:]
    assert len({json.dumps(draws) for _, _, draws, _ in timed}) == 3
    assert len({json.dumps(prompts) for _, prompts, _, _ in log}) == 1


def test_repeats_go_through_the_batches_of_prompts_and_each_is_warmed_up(clock):
    log = []
    method = FakeMethod("a", clock, log)
    results, _ = run([method], clock, prompt_batches=2, warmup_tokens=1)
    prompts = [prompts for _, prompts, _, _ in log]
    assert prompts == [prompts[0], prompts[1], prompts[0], prompts[1], prompts[0]]
    assert prompts[0] != prompts[1]
    assert [request.new_tokens for *_, request in log] == [1, 1, 5, 5, 5]
    assert results.cases[0].warmup_seconds == 2.0


def test_warms_up_until_nothing_is_recorded(clock):
    class Recording(FakeMethod):
        def __call__(self, pair, inputs, request):
            answer = super().__call__(pair, inputs, request)
            own = StatisticsRecorder(2, "fake").finish([0, 0])
            return replace(answer, own=replace(own, recorded_passes=max(self.shapes - self.calls, 0)))

    for shapes, calls in ((1, 1), (3, 3), (9, 4)):
        log = []
        method = Recording("a", clock, log)
        method.shapes = shapes
        results, _ = run([method], clock, repeats=1, warmup_tokens=1)
        assert [request.new_tokens for *_, request in log] == [1] * calls + [5]
        assert results.cases[0].warmup_seconds == calls


def test_the_clock_gives_seconds_speed_and_ratio(clock):
    log = []
    results, _ = run([FakeMethod("a", clock, log, 2.0), FakeMethod("b", clock, log, 0.5)], clock)
    slow, fast = results.cases
    assert [repeat.seconds for repeat in fast.repeats] == [0.5] * 3
    assert fast.tokens_per_second.median == 2 * 5 / 0.5
    assert results.ratio(fast, "a").median == 4.0
    assert slow.warmup_seconds == 2.0
    assert fast.settings == {"name": "b"}
    assert fast.warnings == ["UserWarning: b is slow"]


def test_a_method_that_fails_is_recorded_and_the_others_go_on(clock):
    log = []
    methods = [
        FakeMethod("a", clock, log),
        FakeMethod("b", clock, log, fails_at=1),
        FakeMethod("c", clock, log, fails_at=3),
    ]
    results, _ = run(methods, clock, batches=(1, 2))
    first = results.cases[:3]
    assert [len(case.repeats) for case in first] == [3, 0, 1]
    assert first[1].error == first[2].error == "OutOfMemoryError: CUDA out of memory"
    # In the next cell they have another chance.
    assert [len(case.repeats) for case in results.cases[3:]] == [3, 3, 3]
    assert [method.closed for method in methods] == [2, 2, 2]


def test_an_answer_of_another_length_is_an_error(clock):
    results, _ = run([FakeMethod("a", clock, [], tokens=4)], clock)
    assert results.cases[0].error == "RuntimeError: 4 tokens per row were generated, but 5 were asked for"
    results, _ = run([FakeMethod("a", clock, [], tokens=6)], clock, stop_at_eos=True)
    assert "6 tokens per row" in results.cases[0].error
    results, _ = run([FakeMethod("a", clock, [], tokens=4)], clock, stop_at_eos=True)
    assert results.cases[0].error is None


def test_what_a_method_refuses_is_skipped_with_its_reason(clock):
    method = FakeMethod("a", clock, [])
    results, _ = run([method], clock, batches=(8,))
    assert results.cases[0].skipped == "too many rows"
    assert method.calls == 0


def test_a_spent_budget_skips_what_is_left_and_says_so(clock):
    log = []
    # Two warm-ups and a, b, b take five seconds.
    methods = [FakeMethod("a", clock, log), FakeMethod("b", clock, log)]
    loaded = []
    pairs = {"one": tiny_pair, "two": lambda: loaded.append(1)}
    results, _ = run(methods, clock, pairs=pairs, batches=(1, 2), budget_seconds=5.0)
    a, b, *rest = results.cases
    assert (len(a.repeats), len(b.repeats)) == (1, 2)
    assert a.skipped == "the budget of 5 s was spent after 1 of 3 repeats"
    assert b.skipped == "the budget of 5 s was spent after 2 of 3 repeats"
    assert len(rest) == 6
    assert {case.skipped for case in rest} == {"the budget of 5 s was spent after 0 of 3 repeats"}
    assert not loaded


def test_a_pair_that_cannot_be_loaded_fails_all_its_cases(clock):
    def broken():
        raise OSError("no such folder")

    log = []
    results, _ = run([FakeMethod("a", clock, log)], clock, pairs={"broken": broken, "tiny": tiny_pair}, batches=(1, 2))
    assert [case.error for case in results.cases] == ["OSError: no such folder"] * 2 + [None] * 2
    assert all(len(case.repeats) == 3 for case in results.cases[2:])


def test_too_few_prompts_fail_the_cell_alone(clock):
    results, _ = run(
        [FakeMethod("a", clock, [])], clock, batches=(4, 2), workload=Workload("x", [Prompt("x", c) for c in "abc"])
    )
    assert "too few" in results.cases[0].error
    assert len(results.cases[1].repeats) == 3


def test_results_are_saved_after_every_timed_call(clock, tmp_path):
    seen = []
    path = tmp_path / "r.json"
    results = BenchResults([{}])

    def save():
        results.save(path)
        seen.append(sum(len(case.repeats) for case in BenchResults.load(path).cases))

    options = SweepOptions((FakeMethod("a", clock, []), FakeMethod("b", clock, [])), batches=(2,), new_tokens=5)
    Sweep(options, {"tiny": tiny_pair}, [LETTERS], results, save=save, clock=clock).run()
    assert seen == [1, 2, 3, 4, 5, 6, 6]


def test_an_interrupted_sweep_stops(clock):
    class Interrupted(FakeMethod):
        def __call__(self, pair, inputs, request):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([Interrupted("a", clock, [])], clock)


def test_every_step_is_announced(clock):
    steps = []
    _, sweep = run([FakeMethod(name, clock, []) for name in "ab"], clock, temperatures=(0.0, 1.0), steps=steps)
    assert len(steps) == sweep.steps
    assert steps[0] == "loading tiny"
    assert "tiny, letters, batch 2, T=1: b, run 3 of 3" in steps


def test_tokens_after_an_end_are_counted_apart(clock):
    class Ends(FakeMethod):
        def __call__(self, pair, inputs, request):
            self.clock.now += 1
            ids = inputs["input_ids"]
            return Answer(torch.cat([ids, torch.tensor([[5, 2, 5, 5, 5], [5, 5, 5, 5, 5]])], 1))

    on, _ = run([Ends("a", clock, [])], clock)
    off, _ = run([Ends("a", clock, [])], clock, stop_at_eos=True)
    assert (on.cases[0].repeats[0].tokens, on.cases[0].repeats[0].past_end_tokens) == (10, 3)
    assert (off.cases[0].repeats[0].tokens, off.cases[0].repeats[0].past_end_tokens) == (7, 0)


def test_rows_equal_to_plain_generate_are_counted_for_greedy_texts(clock):
    methods = [
        FakeMethod("generate", clock, [], kind=BASELINE),
        FakeMethod("same", clock, []),
        FakeMethod("none", clock, []),
    ]
    methods[2].__class__ = type("Other", (FakeMethod,), {"__call__": _other})
    results, _ = run(methods, clock, temperatures=(0.0, 1.0))
    assert [[repeat.equal_rows for repeat in case.repeats] for case in results.cases[:3]] == [[2] * 3, [2] * 3, [0] * 3]
    assert {repeat.equal_rows for case in results.cases[3:] for repeat in case.repeats} == {None}


def _other(self, pair, inputs, request):
    torch.rand(7)
    return FakeMethod.__call__(self, pair, inputs, request)


def test_the_real_methods_on_a_tiny_pair_agree_and_report():
    methods = (*BASELINES.values(), parse_policy("static:3"), parse_policy("dsde+fill"))
    results = BenchResults([{}])
    workload = Workload("tiny", [Prompt("tiny", prompt.text) for prompt in PROMPTS])
    options = SweepOptions(methods, batches=(1, 3), new_tokens=10, repeats=2, warmup_tokens=4)
    Sweep(options, {"tiny": lambda: tiny_pair(torch.float64)}, [workload], results).run()
    for case in results.cases:
        if case.method in ("assisted", "prompt_lookup") and case.batch == 3:
            assert "takes one row" in case.skipped
            continue
        assert (case.error, case.skipped) == (None, None), case
        assert [repeat.tokens for repeat in case.repeats] == [10 * case.batch] * 2
        assert [repeat.equal_rows for repeat in case.repeats] == [case.batch] * 2
        if case.kind == OURS:
            assert case.statistics["emitted"] == 2 * 10 * case.batch
            assert case.repeats[0].prefill_seconds > 0
            assert results.ratio(case, "generate").smallest > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"batches": (0,)},
        {"repeats": 0},
        {"new_tokens": 0},
        {"temperatures": (-1.0,)},
        {"prompt_batches": 4},
        {"methods": ()},
        {"warmup_tokens": 0},
    ],
)
def test_impossible_options_are_refused(clock, changes):
    options = SweepOptions((FakeMethod("a", clock, []),))
    with pytest.raises(ValueError, match=f"`{next(iter(changes))}`"):
        replace(options, **changes)


def test_methods_of_one_name_are_refused(clock):
    with pytest.raises(ValueError, match="none of them twice"):
        SweepOptions((FakeMethod("a", clock, []), FakeMethod("a", clock, [])))

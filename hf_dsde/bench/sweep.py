"""The grid of a benchmark: pair by pair, cell by cell, and in a cell all methods in turn.

In each repeat every method makes one timed call on the same prompts with the same seed, and the next repeat begins
with the next method, so that a machine that gets slower meanwhile slows all of them alike. What fails, and what time
does not suffice for, is written down as a result of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from transformers import BatchEncoding

from hf_dsde.bench.baselines import forget_static_cache
from hf_dsde.bench.measure import Clock, Measurement, equal_rows, free_memory, measure_call
from hf_dsde.bench.methods import Answer, Method, Request
from hf_dsde.bench.results import BASELINE, BenchResults, CaseResult, Cell, RepeatResult
from hf_dsde.bench.workloads import Workload
from hf_dsde.integration.hooks import enable
from hf_dsde.pairs import Pair, encode
from hf_dsde.utils.checks import check_integer, check_number

PLAIN = "generate"
"""The baseline whose greedy tokens the others' are compared with."""


MOST_WARM_UPS = 4
"""Untimed calls for a batch of prompts, at most."""


@dataclass(frozen=True)
class SweepOptions:
    """What is measured, and how often.

    Attributes:
        methods: Compared with each other in every cell; their names differ.
        batches: Rows per call.
        temperatures: 0 is greedy.
        new_tokens: Tokens per row.
        repeats: Timed calls of each method in a cell.
        prompt_batches: Different batches of prompts that the repeats of a cell go through in turn. Each is warmed up.
        warmup_tokens: Tokens per row of the untimed calls; as many as of the timed ones when None, so that every shape
            has been seen.
        seed: Of the sampling; each repeat adds its index.
        stop_at_eos: Whether rows end at their end token. Otherwise every method generates the same number of tokens.
        budget_seconds: Time after which no further call begins; None for no limit.
    """

    methods: tuple[Method, ...]
    batches: tuple[int, ...] = (1, 8)
    temperatures: tuple[float, ...] = (0.0,)
    new_tokens: int = 256
    repeats: int = 3
    prompt_batches: int = 1
    warmup_tokens: int | None = None
    seed: int = 0
    stop_at_eos: bool = False
    budget_seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the sizes, and that results can be told apart."""
        for rows in self.batches:
            check_integer("batches", rows, 1)
        for temperature in self.temperatures:
            check_number("temperatures", temperature, 0)
        check_integer("new_tokens", self.new_tokens, 1)
        check_integer("repeats", self.repeats, 1)
        check_integer("prompt_batches", self.prompt_batches, 1, self.repeats)
        if self.warmup_tokens is not None:
            check_integer("warmup_tokens", self.warmup_tokens, 1)
        names = [method.name for method in self.methods]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`methods` are {names}, but at least one, and none of them twice, is needed.")

    def to_dict(self) -> dict[str, Any]:
        """All values as JSON holds them."""
        values = dict(vars(self))
        return values | {
            "methods": [method.name for method in self.methods],
            "batches": list(self.batches),
            "temperatures": list(self.temperatures),
        }


@dataclass
class _RunningCase:
    """A case, and what is only needed until its cell is done."""

    method: Method
    result: CaseResult
    answers: list[Answer] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        return self.result.error is None and self.result.skipped is None


class Sweep:
    """Runs the grid, adding to results as it goes.

    Args:
        options: What to measure.
        pairs: For each pair's name what loads it. A pair is loaded when its turn comes and let go afterwards.
        workloads: The prompts.
        results: Cases are added to it; those of this run belong to its last entry in `runs`.
        save: Called after every call that changed the results.
        on_step: Told what comes next.
        clock: Gives seconds.
    """

    def __init__(
        self,
        options: SweepOptions,
        pairs: Mapping[str, Callable[[], Pair]],
        workloads: Sequence[Workload],
        results: BenchResults,
        *,
        save: Callable[[], None] = lambda: None,
        on_step: Callable[[str], None] = lambda _: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._options = options
        self._pairs = pairs
        self._workloads = workloads
        self._results = results
        self._save = save
        self._on_step = on_step
        self._clock = clock
        self._deadline: float | None = None

    @property
    def steps(self) -> int:
        """How often `on_step` is told of something in a complete run: pairs that are loaded, and calls of methods."""
        options = self._options
        cells = len(self._workloads) * len(options.batches) * len(options.temperatures)
        return len(self._pairs) * (1 + cells * len(options.methods) * (options.repeats + options.prompt_batches))

    def run(self) -> None:
        """Run all cells."""
        budget = self._options.budget_seconds
        self._deadline = None if budget is None else self._clock() + budget
        for name, load in self._pairs.items():
            self._run_pair(name, load)

    def _run_pair(self, name: str, load: Callable[[], Pair]) -> None:
        options = self._options
        grid = list(product(self._workloads, options.batches, options.temperatures))
        loading = self._started(Cell(name, "", 0, 0.0))
        pair: Pair | None = None
        if not self._out_of_time(loading):
            self._on_step(f"loading {name}")
            with _recording(loading):
                pair = load()
                enable(pair.target)
        for workload, rows, temperature in grid:
            cases = self._started(Cell(name, workload.name, rows, temperature))
            self._results.cases += [case.result for case in cases]
            if pair is None:
                for case, why in zip(cases, loading, strict=True):
                    case.result.error, case.result.skipped = why.result.error, why.result.skipped
            else:
                self._run_cell(pair, workload, cases)
            self._save()
        del pair
        free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def _started(self, cell: Cell) -> list[_RunningCase]:
        """A case for every method, with nothing measured yet."""
        run = max(len(self._results.runs) - 1, 0)
        cases = []
        for method in self._options.methods:
            result = CaseResult(*cell, method.name, method.kind, dict(method.settings), run=run)
            result.skipped = method.refusal(cell.batch, cell.temperature)
            cases.append(_RunningCase(method, result))
        return cases

    def _run_cell(self, pair: Pair, workload: Workload, cases: Sequence[_RunningCase]) -> None:
        options, rows = self._options, cases[0].result.batch
        batches: list[BatchEncoding] = []
        with _recording(cases):
            texts = [workload.batch(rows, index) for index in range(options.prompt_batches)]
            batches = [encode(pair.tokenizer, batch).to(pair.target.device) for batch in texts]
        for case in cases:
            self._warm_up(pair, batches, case)
        for repeat in range(options.repeats):
            start = repeat % len(cases)
            for order, case in enumerate([*cases[start:], *cases[:start]]):
                if case.goes_on and not self._out_of_time([case], repeat):
                    self._repeat(pair, batches, case, repeat, order)
        _compare(cases)
        self._clean_up(pair, cases)

    def _clean_up(self, pair: Pair, cases: Sequence[_RunningCase]) -> None:
        """Let go of everything that the methods keep for a cell."""
        for case in cases:
            with _recording([case]):
                case.method.close()
        if any(case.method.compiles for case in cases):
            # Shapes of other cells would count towards the limit of recompilations.
            torch.compiler.reset()
        forget_static_cache(pair)
        free_memory(pair.target.device)

    def _warm_up(self, pair: Pair, batches: Sequence[BatchEncoding], case: _RunningCase) -> None:
        """Call a method for every batch of prompts until it has compiled and recorded what it needs.

        A policy that tries other lengths in each call meets shapes that it has not recorded yet for some calls.
        """
        result, options = case.result, self._options
        request = Request(options.warmup_tokens or options.new_tokens, result.temperature, options.stop_at_eos)
        for inputs in batches:
            for _ in range(MOST_WARM_UPS):
                if not case.goes_on or self._out_of_time([case]):
                    return
                measured = self._call(pair, inputs, case, request, 0, "warm-up")
                if measured is None:
                    break
                result.warmup_seconds = (result.warmup_seconds or 0.0) + measured.seconds
                if measured.answer.own is None or not measured.answer.own.recorded_passes:
                    break

    def _repeat(
        self, pair: Pair, batches: Sequence[BatchEncoding], case: _RunningCase, repeat: int, order: int
    ) -> None:
        """Make one timed call and keep its result."""
        options, result = self._options, case.result
        request = Request(options.new_tokens, result.temperature, options.stop_at_eos)
        what = f"run {repeat + 1} of {options.repeats}"
        measured = self._call(pair, batches[repeat % len(batches)], case, request, repeat, what)
        if measured is None:
            return
        case.answers.append(measured.answer)
        result.repeats.append(
            RepeatResult(
                repeat=repeat,
                order=order,
                seconds=measured.seconds,
                tokens=measured.tokens,
                prefill_seconds=measured.answer.prefill_seconds,
                past_end_tokens=measured.past_end_tokens,
                peak_memory_bytes=measured.peak_memory_bytes,
                statistics=case.method.summarise([measured.answer], measured.seconds),
            )
        )
        result.statistics = case.method.summarise(case.answers, sum(r.seconds for r in result.repeats))
        self._save()

    def _call(
        self, pair: Pair, inputs: BatchEncoding, case: _RunningCase, request: Request, repeat: int, what: str
    ) -> Measurement | None:
        """Call a method; None when it failed, which its case says then."""
        result, seed = case.result, self._options.seed + repeat
        self._on_step(f"{_described(result.cell)}: {result.method}, {what}")
        measured: Measurement | None = None
        with _recording([case]):
            measured = measure_call(case.method, pair, inputs, request, seed=seed, clock=self._clock)
            result.warnings += [text for text in measured.warnings if text not in result.warnings]
            result.settings = dict(case.method.settings)
        if measured is None:
            # Outside of the handler, where the failure no longer holds what was being computed.
            free_memory(pair.target.device)
        return measured

    def _out_of_time(self, cases: Sequence[_RunningCase], done: int = 0) -> bool:
        """Whether the budget is spent; if so, the cases say what they lack."""
        if self._deadline is None or self._clock() < self._deadline:
            return False
        for case in cases:
            if case.goes_on:
                case.result.skipped = (
                    f"the budget of {self._options.budget_seconds:g} s was spent after {done} of "
                    f"{self._options.repeats} repeats"
                )
        return True


def _described(cell: Cell) -> str:
    return f"{cell.pair}, {cell.workload}, batch {cell.batch}, T={cell.temperature:g}"


@contextmanager
def _recording(cases: Sequence[_RunningCase]) -> Iterator[None]:
    """Turn a failure into the result of these cases, as far as they have none yet."""
    try:
        yield
    except Exception as failure:  # noqa: BLE001 - whatever breaks a case must not end a sweep of hours
        for case in cases:
            if case.goes_on:
                case.result.error = f"{type(failure).__name__}: {failure}"


def _compare(cases: Sequence[_RunningCase]) -> None:
    """Count the rows of greedy answers that plain `generate` gave too."""
    plain = next((c for c in cases if c.result.kind == BASELINE and c.result.method == PLAIN), None)
    if plain is None or plain.result.temperature > 0:
        return
    expected = {r.repeat: a.sequences for r, a in zip(plain.result.repeats, plain.answers, strict=True)}
    for case in cases:
        case.result.repeats = [
            replace(r, equal_rows=equal_rows(a.sequences, expected[r.repeat])) if r.repeat in expected else r
            for r, a in zip(case.result.repeats, case.answers, strict=True)
        ]

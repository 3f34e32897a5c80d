"""The demo: requests one by one and in one batch, plain `generate` against speculation, on the packaged pair.

Methods are timed in turn, round by round, so that a machine which gets slower meanwhile slows all of them; each runs
once before the clock starts. This module measures and returns; `view` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import BatchEncoding

from hf_dsde.cli.demo.prompts import SERVINGS, DemoPrompt, Serving
from hf_dsde.config import SpeculationConfig
from hf_dsde.divergence import BatchComparison, Verdict, compare_outputs
from hf_dsde.integration.hooks import disable, enable
from hf_dsde.measurement import provenance
from hf_dsde.measurement.statistics import SpeculationStatistics
from hf_dsde.pairs import Pair, answer_lengths, encode, end_tokens, generate_once

PLAIN = "plain generate"
WARM_UP_TOKENS = 4

PairLoader = Callable[[torch.dtype, torch.device], Pair]


@dataclass(frozen=True)
class Method:
    """One way of generating; without a speculation it is plain `generate`."""

    name: str
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot equal plain `generate`."""
        if self.speculation is not None and self.speculation.acceptance is not None:
            raise ValueError(
                f"`speculation` accepts tokens by a lossy rule, {self.speculation.acceptance}, but the demo expects "
                "the text of plain `generate`. Use SpeculationConfig(acceptance=None)."
            )


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs.

    Attributes:
        dtypes: Each is loaded and measured for itself.
        methods: Compared with plain `generate`, which always runs.
        max_new_tokens: Limit of every answer.
        repeats: Timed runs of every method.
        device: Where both models run.
        servings: What is asked for, and how much of it at once.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    methods: tuple[Method, ...] = tuple(Method(policy, SpeculationConfig(policy)) for policy in ("auto", "dsde"))
    max_new_tokens: int = 64
    repeats: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    servings: tuple[Serving, ...] = SERVINGS

    @property
    def steps(self) -> int:
        """How often `run_demo` says what comes next."""
        return len(self.dtypes) * (1 + len(self.servings) * (1 + len(self.methods)) * (1 + self.repeats))


@dataclass(frozen=True)
class MethodResult:
    """What one method did in one dtype and serving.

    Attributes:
        name: Of the method.
        emitted: Tokens of all answers, up to their ends.
        seconds: Wall time of each timed run over all batches, prompts included.
        texts: The answers.
        statistics: Of the last run; None for plain `generate`.
        comparison: With plain `generate`'s tokens; None for itself.
    """

    name: str
    emitted: int
    seconds: tuple[float, ...]
    texts: tuple[str, ...]
    statistics: SpeculationStatistics | None = None
    comparison: BatchComparison | None = None

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second in the median run."""
        return self.emitted / median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Tokens per second of the slowest and of the fastest run."""
        return self.emitted / max(self.seconds), self.emitted / min(self.seconds)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per row and target pass; exactly 1 for plain `generate`."""
        return 1.0 if self.statistics is None else self.statistics.block_efficiency

    def to_dict(self) -> dict[str, Any]:
        """Everything in types that `json.dumps` takes."""
        slowest, fastest = self.spread
        return {
            "method": self.name,
            "emitted": self.emitted,
            "seconds": list(self.seconds),
            "tokens_per_second": {"median": self.tokens_per_second, "slowest": slowest, "fastest": fastest},
            "tokens_per_pass": self.tokens_per_pass,
            "equality": None if self.comparison is None else {v.value: self.comparison.count(v) for v in Verdict},
            "statistics": None if self.statistics is None else self.statistics.to_dict(),
            "texts": list(self.texts),
        }


@dataclass(frozen=True)
class ServingResult:
    """All methods in one dtype and serving, plain `generate` first."""

    dtype: torch.dtype
    serving: Serving
    methods: tuple[MethodResult, ...]

    def speedup(self, method: MethodResult) -> float:
        """How many times as fast as plain `generate`."""
        return method.tokens_per_second / self.methods[0].tokens_per_second


@dataclass(frozen=True)
class DemoResult:
    """What `run_demo` measured."""

    options: DemoOptions
    device_name: str
    servings: tuple[ServingResult, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every method gave plain `generate`'s tokens in every dtype that promises it."""
        return all(
            method.comparison is None or method.comparison.is_exact
            for result in self.servings
            if torch.finfo(result.dtype).bits >= torch.finfo(torch.float32).bits
            for method in result.methods
        )

    def to_dict(self) -> dict[str, Any]:
        """Result and provenance in types that `json.dumps` takes."""
        return {
            "schema_version": 2,
            "provenance": provenance.collect(self.options.device),
            "max_new_tokens": self.options.max_new_tokens,
            "repeats": self.options.repeats,
            "servings": [
                {
                    "dtype": name_of(result.dtype),
                    "serving": result.serving.name,
                    "batches": [[prompt.kind for prompt in batch] for batch in result.serving.batches],
                    "methods": [method.to_dict() for method in result.methods],
                }
                for result in self.servings
            ],
        }


def name_of(dtype: torch.dtype) -> str:
    """Return what users call a dtype."""
    return str(dtype).removeprefix("torch.")


def run_demo(
    options: DemoOptions,
    load: PairLoader,
    on_step: Callable[[str], None] = lambda _: None,
    on_answer: Callable[[DemoPrompt, str], None] = lambda *_: None,
) -> DemoResult:
    """Load, generate, time and compare.

    Args:
        options: What to run.
        load: Gives the pair for a dtype and a device.
        on_step: Told what comes next, before every loading and every run.
        on_answer: Told each request and its answer as soon as there is one.
    """
    results = []
    shown: set[DemoPrompt] = set()

    def show_once(prompt: DemoPrompt, text: str) -> None:
        if prompt not in shown:
            shown.add(prompt)
            on_answer(prompt, text)

    for dtype in options.dtypes:
        on_step(f"loading the models in {name_of(dtype)}")
        pair = load(dtype, options.device)
        enable(pair.target)
        try:
            results += [_Measurement(pair, serving, options, on_step, show_once).run() for serving in options.servings]
        finally:
            disable(pair.target)
    return DemoResult(options, provenance.describe_device(options.device), tuple(results))


class _Measurement:
    """Times all methods over the batches of a serving, in turn, and compares each with plain `generate`."""

    def __init__(
        self,
        pair: Pair,
        serving: Serving,
        options: DemoOptions,
        on_step: Callable[[str], None],
        on_answer: Callable[[DemoPrompt, str], None],
    ) -> None:
        self._pair = pair
        self._serving = serving
        self._options = options
        self._on_step = on_step
        self._on_answer = on_answer
        self._methods = (Method(PLAIN), *options.methods)
        self._inputs = [
            encode(pair.tokenizer, [prompt.text for prompt in batch]).to(options.device) for batch in serving.batches
        ]
        self._outputs: dict[str, list[Any]] = {}

    def run(self) -> ServingResult:
        """Warm every method up, then let all of them take turns."""
        seconds: dict[str, list[float]] = {method.name: [] for method in self._methods}
        for method in self._methods:
            self._say(method, "warm-up")
            self._generate(method, _warm_up_inputs(self._inputs[0]), WARM_UP_TOKENS)
        for repeat in range(self._options.repeats):
            for method in self._methods:
                self._say(method, f"run {repeat + 1} of {self._options.repeats}")
                seconds[method.name].append(self._timed_run(method))
        methods = [self._result(method, seconds[method.name]) for method in self._methods]
        return ServingResult(self._pair.target.dtype, self._serving, tuple(methods))

    def _say(self, method: Method, step: str) -> None:
        self._on_step(f"{name_of(self._pair.target.dtype)}, {self._serving.name}: {method.name}, {step}")

    def _generate(self, method: Method, inputs: BatchEncoding, max_new_tokens: int) -> tuple[Any, float]:
        return generate_once(self._pair, inputs, method.speculation, max_new_tokens=max_new_tokens, do_sample=False)

    def _timed_run(self, method: Method) -> float:
        """Answer all batches; return the seconds."""
        outputs, total = [], 0.0
        for batch, inputs in zip(self._serving.batches, self._inputs, strict=True):
            output, seconds = self._generate(method, inputs, self._options.max_new_tokens)
            outputs.append(output)
            total += seconds
            for prompt, text in zip(batch, self._texts(inputs, output), strict=True):
                self._on_answer(prompt, text)
        self._outputs[method.name] = outputs
        return total

    def _texts(self, inputs: BatchEncoding, output: Any) -> list[str]:
        width = inputs["input_ids"].shape[1]
        texts = self._pair.tokenizer.batch_decode(output.sequences[:, width:], skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _result(self, method: Method, seconds: list[float]) -> MethodResult:
        """What a method did, from its last outputs and all its times."""
        outputs, ends = self._outputs[method.name], end_tokens(self._pair)
        runs = list(zip(self._inputs, outputs, strict=True))
        lengths = [answer_lengths(output.sequences, inputs["input_ids"].shape[1], ends) for inputs, output in runs]
        comparison = statistics = None
        if method.speculation is not None:
            statistics = SpeculationStatistics.merge([output.speculation_statistics for output in outputs])
            comparison = self._comparison(outputs)
        return MethodResult(
            name=method.name,
            emitted=sum(int(each.sum()) for each in lengths),
            seconds=tuple(seconds),
            texts=tuple(text for inputs, output in runs for text in self._texts(inputs, output)),
            statistics=statistics,
            comparison=comparison,
        )

    def _comparison(self, outputs: Sequence[Any]) -> BatchComparison:
        """Compare all answers with plain `generate`'s."""
        parts = [
            compare_outputs(
                self._pair.target,
                inputs["input_ids"],
                inputs["attention_mask"],
                expected.sequences,
                output.sequences,
                eos_token_id=end_tokens(self._pair),
            )
            for inputs, expected, output in zip(self._inputs, self._outputs[PLAIN], outputs, strict=True)
        ]
        rows = [replace(row, row=place) for place, row in enumerate(row for part in parts for row in part.rows)]
        return replace(parts[0], rows=tuple(rows))


def _warm_up_inputs(inputs: BatchEncoding) -> BatchEncoding:
    """The batch itself on a GPU, where kernels are chosen by shape; a cheap part of it on a CPU, where prompts cost."""
    lengths = inputs["attention_mask"].sum(-1)
    if lengths.device.type != "cpu":
        return inputs
    rows = lengths.argsort()[:2]
    width = int(lengths[rows].max())
    return BatchEncoding({name: tensor[rows, -width:] for name, tensor in inputs.items()})
